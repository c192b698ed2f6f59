"""What the blocks of a request hold, as keys: equal keys, equal tokens from the first one on.

A key stands for a block and all blocks before it. So a request's leading keys that are in the cache
are the prefix it shares, and no token is compared.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import Protocol

KEY_BYTES = 16
_TOKEN_TYPE = "i"


class Contents(Protocol):
    """The keys of one request's blocks.

    `grain` is how many tokens an id of their source covers, a multiple of the block size: a common
    prefix is known to that only.
    """

    @property
    def grain(self) -> int: ...

    def keys(self, count: int) -> Sequence[int]:
        """Return the keys of its first `count` full blocks; fewer where the rest is not known."""
        ...


class TokenContents:
    """Keys made of token ids, each once, when first asked for.

    `tokens` are the int32 ids of prompt and output so far; the array may grow. A key is the 128-bit
    BLAKE2b hash of the key before it and the block's ids. Two prefixes with one key would be taken
    for each other: with 2^30 blocks in a cache the chance of any such pair is 2^-69, and nobody is
    known to be able to make one.
    """

    __slots__ = ("_keys", "_tokens", "grain")

    def __init__(self, tokens: "array[int]", block_size: int) -> None:
        assert tokens.typecode == _TOKEN_TYPE, "token ids are int32"
        self._tokens = tokens
        self.grain = block_size
        self._keys: list[int] = []

    def keys(self, count: int) -> Sequence[int]:
        size, made = self.grain, self._keys
        count = min(count, len(self._tokens) // size)
        for block in range(len(made), count):
            before = made[-1].to_bytes(KEY_BYTES, "little") if made else b""
            ids = self._tokens[block * size : (block + 1) * size].tobytes()
            made.append(int.from_bytes(blake2b(before + ids, digest_size=KEY_BYTES).digest(),
                                       "little"))  # fmt: skip
        return made[:count]


class GivenContents:
    """Keys that somebody else made, such as the block ids of a trace (`mdi_traces/prefixes.py`)."""

    __slots__ = ("_keys", "grain")

    def __init__(self, keys: Sequence[int], grain: int) -> None:
        self._keys = keys
        self.grain = grain

    def keys(self, count: int) -> Sequence[int]:
        return self._keys[:count]
