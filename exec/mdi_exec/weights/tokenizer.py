"""Text to token ids and back, and the compressed vocabulary that Engram hashes.

A thin layer over the `tokenizers` library: whole texts (`Tokenizer`), text as it is generated
(`TextStream`), and `compressed_vocab_map` (docs/model.md, 1). Chat templates are not here: the
caller formats its prompts. Read next: `model/engram.py` (who uses the map).
"""

import codecs
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from tokenizers import decoders, normalizers
from torch import Tensor

from mdi_shared.errors import ConfigError
from mdi_shared.json_input import read_text

REPLACEMENT = "\ufffd"  # what bytes that are no UTF-8 decode to
LONE_SPACE = "\ue000"  # stands for a text of one space while texts are stripped


def _byte_spellings() -> list[str]:
    """Return the character that stands for each byte in a byte-level vocabulary.

    Printable Latin-1 characters stand for themselves; the other bytes, in order, for U+0100 and on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


_BYTE_OF = {char: byte for byte, char in enumerate(_byte_spellings())}


def _spelled_bytes(spelling: str) -> bytes:
    """Return what a vocabulary entry stands for: bytes, or itself if it is not spelled so."""
    if all(char in _BYTE_OF for char in spelling):
        return bytes(_BYTE_OF[char] for char in spelling)
    return spelling.encode()


class Tokenizer:
    """A byte-level BPE tokenizer from a tokenizer.json."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        if not isinstance(backend.decoder, decoders.ByteLevel):
            raise ConfigError("tokenizer.decoder", type(backend.decoder).__name__,
                              "only ByteLevel is implemented")  # fmt: skip
        self.backend = backend
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_file(cls, path: str | Path) -> "Tokenizer":
        """Read a tokenizer.json; raises `ConfigError` when it is absent or not usable."""
        text = read_text(Path(path), "tokenizer")
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:
            raise ConfigError("tokenizer", str(path), f"is no tokenizer.json: {error}") from error
        return cls(backend)

    @property
    def vocab_size(self) -> int:
        """One more than the highest id the tokenizer defines, special tokens included."""
        return max(self.backend.get_vocab().values(), default=-1) + 1

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`; special tokens written out in it become their ids.

        Raises `ConfigError` for half characters, which no file or terminal gives.
        """
        try:
            return list(self.backend.encode(text, add_special_tokens=False).ids)
        except TypeError as error:  # the library's word for a lone surrogate
            raise ConfigError("prompts", text, "must be a text of Unicode characters") from error

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; bytes that are no UTF-8 become U+FFFD."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        """Return what an id adds to the text; nothing for ids that are undefined or skipped."""
        if skip_special_tokens and token_id in self._special_ids:
            return b""
        found = self._bytes.get(token_id)
        if found is None:
            found = self._bytes[token_id] = _spelled_bytes(self.token(token_id) or "")
        return found

    def token(self, token_id: int) -> str | None:
        """Return the vocabulary's own spelling of an id, None for one it does not define."""
        return self.backend.id_to_token(token_id)


class TextStream:
    """Decodes ids as they come; what `push` and `flush` return joins to `Tokenizer.decode` of all.

    Each id is looked at once. A character's bytes may be spread over tokens: at most three bytes
    are held back for it, until they are a character or cannot become one (U+FFFD then).
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, *ids: int) -> str:
        """Add ids; return the text that became certain."""
        spell = self.tokenizer.token_bytes
        skips = self.skip_special_tokens
        return "".join(
            [self._decoder.decode(spell(token, skip_special_tokens=skips)) for token in ids]
        )

    def flush(self) -> str:
        """Return what was held back; the stream starts afresh."""
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


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
