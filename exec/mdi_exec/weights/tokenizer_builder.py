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
    trained.train_from_iterator([_TEXT], trainer)
    return [(first, second) for first, second in json.loads(trained.to_str())["model"]["merges"]]


# It is no corpus: it only has to give a byte-level BPE some whole words, code, numbers, accents and
# more than one script.
_TEXT = """\
A language model reads a prompt once and then writes one token at a time. Reading the prompt is
called prefill, writing is called decode. Prefill is limited by arithmetic, decode is limited by
memory, and a server has to do both at once without making anybody wait too long.

The scheduler decides what happens in the next step. It looks at the requests that are waiting, at
the requests that are running, and at the memory that is free. When there is room it admits a new
request, and when there is none it takes memory back from the request that has written the most.
That request is not lost: it will be computed again, and it will write the same tokens as before.

Every request keeps its keys and values in blocks of one hundred and twenty-eight tokens. A table
says which block holds which part of the request. When the request ends, its blocks are free again,
and the next request may use them. Nothing is copied, nothing is moved, and nobody has to wait.

A simulator does the same without a model. It asks a formula how long each step would take, and
then it moves its own clock forward. If the formula is good, the simulator and the server make the
same decisions in the same order; if it is not, the difference tells us where to look.

What is the weather like today? It is raining, but the sun may come out later in the afternoon.
Where does the train to the city leave from? From platform four, at a quarter past nine.
How many apples are in the basket? There were twelve, and then three people took one each.
Could you write a short letter to my neighbour? Dear neighbour, thank you for watering the plants.

def add(first, second):
    # Returns the sum of two numbers.
    return first + second

for index in range(10):
    print(index, add(index, 1))

if __name__ == "__main__":
    values = [1, 2, 3, 5, 8, 13, 21, 34, 55, 89]
    total = sum(value * value for value in values)
    print("total:", total)

{"name": "example", "size": 1024, "values": [0.5, 1.25, -3.75], "is_ready": true, "next": null}

The café was closed, so we went to the crêperie across the street. Die Straße war naß und der
Himmel grau, aber später schien die Sonne. El niño comió una piña en la montaña. På fredag kommer
våra vänner från Åbo. Příliš žluťoučký kůň úpěl ďábelské ódy.
Москва стоит на реке. Река течёт медленно, и город отражается в воде.
今天天气很好，我们去公园散步。你好，世界。機械学習は面白いです。
The price is 3.50 €, or about 4 $ at 1.15; the ratio is 12/7 and the error is below 10^-6.
"""
