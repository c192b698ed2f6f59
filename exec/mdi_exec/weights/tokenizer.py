"""Text to token ids and back, and the compressed vocabulary that Engram hashes.

A thin layer over the `tokenizers` library: whole texts (`Tokenizer`), text as it is generated
(`TextStream`), and `compressed_vocab_map` (docs/model.md, 1). Chat templates are not here: the
caller formats its prompts. Read next: `model/engram.py` (who uses the map).
"""

from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from tokenizers import normalizers
from torch import Tensor

from mdi_shared.errors import ConfigError

REPLACEMENT = "\ufffd"  # what bytes that are no UTF-8 decode to
LONE_SPACE = "\ue000"  # stands for a text of one space while texts are stripped


class Tokenizer:
    """A byte-level BPE tokenizer from a tokenizer.json."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend

    @classmethod
    def from_file(cls, path: str | Path) -> "Tokenizer":
        """Read a tokenizer.json; raises `ConfigError` when it is absent or not usable."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("tokenizer", str(path), f"cannot be read: {error}") from error
        try:
            return cls(tokenizers.Tokenizer.from_str(text))
        except Exception as error:
            raise ConfigError("tokenizer", str(path), f"is no tokenizer.json: {error}") from error

    @property
    def vocab_size(self) -> int:
        """One more than the highest id the tokenizer defines, special tokens included."""
        return max(self.backend.get_vocab().values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; special tokens written out in it become their ids."""
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary's own spelling of an id, None for one it does not define."""
        return self.backend.id_to_token(token_id)


class TextStream:
    """Decodes ids as they come; what `push` and `flush` return joins to the whole text.

    A character's bytes may be spread over tokens, so text that ends in U+FFFD is held back until
    the next token, or the end, decides what it is.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self._held: list[int] = []

    def push(self, *ids: int) -> str:
        """Add ids; return the text that became certain."""
        self._held += ids
        text = self._text()
        if text.endswith(REPLACEMENT):
            return ""
        self._held.clear()
        return text

    def flush(self) -> str:
        """Return what was held back; the stream starts afresh."""
        text = self._text()
        self._held.clear()
        return text

    def _text(self) -> str:
        return self.tokenizer.decode(self._held, skip_special_tokens=self.skip_special_tokens)


def compressed_vocab_map(tokenizer: Tokenizer, vocab_size: int | None = None) -> Tensor:
    """Map token ids to compressed ids, int64 [vocab_size]: ids that look alike share one.

    Compressed ids count distinct normalised texts in order of first appearance, so their number is
    the map's maximum plus one. `vocab_size` is the tokenizer's own unless given; ids it does not
    define decode to nothing, and share one compressed id.
    """
    normalise = _normaliser()
    ids_by_text: dict[str, int] = {}
    mapped: list[int] = []
    for token_id in range(tokenizer.vocab_size if vocab_size is None else vocab_size):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        if REPLACEMENT in text:  # part of a character: only its spelling tells it apart
            key = tokenizer.token(token_id)
            assert key is not None, f"token {token_id} has a text but no spelling"
        else:
            key = normalise.normalize_str(text) or text
        mapped.append(ids_by_text.setdefault(key, len(ids_by_text)))
    return torch.tensor(mapped, dtype=torch.int64)


def _normaliser() -> normalizers.Normalizer:
    """Forget case, accents, compatibility forms and the amount of white space."""
    return normalizers.Sequence([
        normalizers.NFKC(),
        normalizers.NFD(),
        normalizers.StripAccents(),
        normalizers.Lowercase(),
        normalizers.Replace(tokenizers.Regex(r"[ \t\r\n]+"), " "),
        normalizers.Replace(tokenizers.Regex(r"^ $"), LONE_SPACE),
        normalizers.Strip(),
        normalizers.Replace(LONE_SPACE, " "),
    ])  # fmt: skip
