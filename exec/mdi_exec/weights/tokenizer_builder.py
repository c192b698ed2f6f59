"""Builds the byte-level BPE tokenizer of a made checkpoint: any vocabulary size, always the same.

Merges learned from a small text come first; pairs of what was learned fill the rest of the
vocabulary, so that random ids decode to something word-like. Its compression is poor and of no
interest. Read next: `tokenizer.py` (how tokenizers are used).
"""

import itertools
import json
from collections.abc import Iterator, Mapping

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from mdi_exec.weights.tokenizer_text import TEXT
from mdi_shared.errors import ConfigError

Merge = tuple[str, str]

SPACE = "Ġ"  # how a byte-level vocabulary spells a space
NUM_BYTES = 256


def build_tokenizer(
    vocab_size: int, special_tokens: Mapping[int, str]
) -> tokenizers.Tokenizer:  # fmt: skip
    """Return a tokenizer of exactly `vocab_size` ids with `special_tokens` (id -> text) among them.

    Raises `ConfigError` when the vocabulary has no room for them and the 256 bytes.
    """
    least = NUM_BYTES + len(special_tokens)
    if vocab_size < least or not all(0 <= token < vocab_size for token in special_tokens):
        raise ConfigError("vocab_size", vocab_size, f"must be at least {least} (256 bytes and the "
                          "special tokens) and above every special id")  # fmt: skip
    merges, spellings = _merges_and_spellings(vocab_size - len(special_tokens))
    rest = iter(spellings)
    vocab = {special_tokens[i] if i in special_tokens else next(rest): i for i in range(vocab_size)}
    built = _byte_level(models.BPE(vocab=vocab, merges=merges))
    built.add_special_tokens([
        tokenizers.AddedToken(text, special=True, normalized=False)
        for _, text in sorted(special_tokens.items())
    ])  # fmt: skip
    return built


def _byte_level(model: models.BPE) -> tokenizers.Tokenizer:
    built = tokenizers.Tokenizer(model)
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    built.decoder = decoders.ByteLevel()
    return built


def _merges_and_spellings(count: int) -> tuple[list[Merge], list[str]]:
    """Return `count` spellings, bytes first, and the merges that make all others."""
    spellings = sorted(pre_tokenizers.ByteLevel.alphabet())
    known = set(spellings)
    merges: list[Merge] = []
    for merge in _endless_merges(count):
        if len(spellings) == count:
            break
        joined = merge[0] + merge[1]
        if joined not in known:
            known.add(joined)
            spellings.append(joined)
            merges.append(merge)
    return merges, spellings


def _endless_merges(most_learned: int) -> Iterator[Merge]:
    """Yield learned merges, then pairs of word parts, common ones first, pairs of pairs last."""
    learned = _learned_merges(most_learned)
    yield from learned
    parts = [part for part in map("".join, learned) if _is_word_part(part)]
    for total in itertools.count():
        for i in range(max(0, total - len(parts) + 1), min(total + 1, len(parts))):
            first, second = parts[i], parts[total - i]
            if not second.startswith(SPACE):
                parts.append(first + second)
                yield first, second


def _is_word_part(spelling: str) -> bool:
    letters = spelling.removeprefix(SPACE)
    return letters.isascii() and letters.isalpha() and letters.islower()


def _learned_merges(most: int) -> list[Merge]:
    trained = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=most, min_frequency=2, show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )  # fmt: skip
    trained.train_from_iterator([TEXT], trainer)
    return [(first, second) for first, second in json.loads(trained.to_str())["model"]["merges"]]
