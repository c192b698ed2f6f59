"""Quantised weights reordered for tensor cores: same bytes, same values, another order.

A row's K inputs come in blocks, and each block is cut in four columns, one for each of the four
threads that share a row of a tensor-core operand. A thread's codes lie side by side, group after
group: of each group of 32 inputs it owns eight. The bits inside a word are placed for cheap
decoding (`kernels/decode_source.py`, `kernels/expert_source.py`, `kernels/folded_source.py`).

FP8 rows keep their place. FP4 weights, which experts have, are turned: a block of all rows lies
together, [..., blocks, N, 16 words], and its scales alike, so that what many rows need next is one
piece of memory. Packing is undone exactly.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from mdi_exec.ops.quantise import GROUP

LARGEST_FP4_SCALE = 128  # E8M0 byte, 2^1: decoding multiplies by 2^126 times the scale
LARGEST_FP8_SCALE = 134
FP4_BLOCK = 128  # inputs of a block of FP4 weights; rows are filled up with zeros to whole blocks
_BLOCK_GROUPS = FP4_BLOCK // GROUP

# Bit positions of a word's eight codes, most significant bit first: sign, two exponent bits,
# mantissa. Pairs for bfloat16: the second of a pair lies 16 bits above the first.
_PAIR_TOPS = ((15, 8), (12, 5), (14, 2), (13, 11))
_FP4_BITS = tuple(
    (sign + at, top + at, top - 1 + at, top - 2 + at) for sign, top in _PAIR_TOPS for at in (0, 16)
)
# For a table of bytes: magnitudes are four-bit numbers without their highest bits, where signs lie;
# of the first four codes, signs are where those of bytes are, of the others four bits below.
_FOLDED_BITS = tuple((8 * (i % 4) + (7, 3)[i // 4], 4 * i + 2, 4 * i + 1, 4 * i) for i in range(8))


def block_of(width: int) -> int:
    """Inputs of one packed block of FP8: the largest of 128, 64 and 32 that divides the row."""
    return next(block for block in (128, 64, 32) if width % block == 0)


def _by_thread(codes: Tensor) -> Tensor:
    """Reorder codes [..., K], one a byte, to [..., blocks, 4 threads, groups, 4 pairs, 2]."""
    block = block_of(codes.shape[-1])
    split = torch.unflatten(codes, -1, (-1, block // GROUP, 2, 2, 4, 2))  # b g step half thread low
    order = [*range(split.dim() - 6), *(split.dim() + i for i in (-6, -2, -5, -4, -3, -1))]
    return split.permute(order).flatten(-3, -2)


def _by_input(pairs: Tensor) -> Tensor:
    """Invert `_by_thread`: [..., blocks, 4, groups, 4, 2] to [..., K]."""
    split = torch.unflatten(pairs, -2, (2, 2))  # blocks thread group step half low
    order = [*range(split.dim() - 6), *(split.dim() + i for i in (-6, -4, -3, -2, -5, -1))]
    return split.permute(order).flatten(-6)


def pack_fp4(codes: Tensor) -> Tensor:
    """Turn FP4 bytes [..., N, K/2] (even input in the low nibble) into int32 [..., blocks, N, 16].

    A thread's eight codes of a group are ordered by 16-input step, 8-input half, and pair.
    """
    return _turned(_words(_by_thread(_nibbles(codes)).flatten(-2), _FP4_BITS))


def unpack_fp4(words: Tensor) -> Tensor:
    """Invert `pack_fp4`: int32 [..., blocks, N, 16] to bytes [..., N, blocks * 64]."""
    pairs = torch.unflatten(_codes(_unturned(words), _FP4_BITS), -1, (4, 2))
    return _bytes(_by_input(pairs))


def pack_folded(codes: Tensor) -> Tensor:
    """Do as `pack_fp4` for E4M3 operands: a thread's codes are two runs of four inputs."""
    split = torch.unflatten(_nibbles(codes), -1, (-1, _BLOCK_GROUPS, 2, 4, 4))  # b g run thread i
    order = [*range(split.dim() - 5), *(split.dim() + i for i in (-5, -2, -4, -3, -1))]
    return _turned(_words(split.permute(order).flatten(-2), _FOLDED_BITS))


def unpack_folded(words: Tensor) -> Tensor:
    """Invert `pack_folded`."""
    split = torch.unflatten(_codes(_unturned(words), _FOLDED_BITS), -1, (2, 4))  # b thread g run i
    order = [*range(split.dim() - 5), *(split.dim() + i for i in (-5, -3, -2, -4, -1))]
    return _bytes(split.permute(order).flatten(-5))


def pack_scales(scales: Tensor) -> Tensor:
    """Turn bytes of FP4 weights' groups [..., N, K/32] into [..., blocks, N, 4], as their codes."""
    filled = pad(scales.view(torch.uint8), (0, -scales.shape[-1] % _BLOCK_GROUPS))
    turned = torch.unflatten(filled, -1, (-1, _BLOCK_GROUPS)).transpose(-3, -2)
    return turned.contiguous().view(scales.dtype)


def unpack_scales(turned: Tensor) -> Tensor:
    """Invert `pack_scales`, of bytes or of what they stand for: to [..., N, blocks * 4]."""
    return turned.transpose(-3, -2).flatten(-2)


def _nibbles(codes: Tensor) -> Tensor:
    """Codes [..., K] one a byte, filled up with zeros to whole blocks, of bytes [..., K/2]."""
    raw = codes.view(torch.uint8)
    nibbles = torch.stack((raw & 0xF, raw >> 4), dim=-1).flatten(-2)
    return pad(nibbles, (0, -nibbles.shape[-1] % FP4_BLOCK))


def _bytes(nibbles: Tensor) -> Tensor:
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


def _words(codes: Tensor, bits: tuple[tuple[int, ...], ...]) -> Tensor:
    """Put eight codes each [..., 8] into int32 words, bit by bit."""
    values = codes.to(torch.int32)
    word = torch.zeros(values.shape[:-1], dtype=torch.int32, device=codes.device)
    for i, positions in enumerate(bits):
        for bit, position in zip((3, 2, 1, 0), positions, strict=True):
            word |= ((values[..., i] >> bit) & 1) << position
    return word


def _codes(words: Tensor, bits: tuple[tuple[int, ...], ...]) -> Tensor:
    """Invert `_words`: uint8 [..., 8]."""
    codes = torch.zeros((*words.shape, 8), dtype=torch.uint8, device=words.device)
    for i, positions in enumerate(bits):
        for bit, position in zip((3, 2, 1, 0), positions, strict=True):
            codes[..., i] |= (((words >> position) & 1) << bit).to(torch.uint8)
    return codes


def _turned(words: Tensor) -> Tensor:
    """Turn words [..., N, blocks, 4 threads, groups] into [..., blocks, N, 16]."""
    return words.flatten(-2).transpose(-3, -2).contiguous()


def _unturned(words: Tensor) -> Tensor:
    return torch.unflatten(words, -1, (4, _BLOCK_GROUPS)).transpose(-4, -3)


def pack_fp8(codes: Tensor) -> Tensor:
    """Reorder E4M3 codes [..., K] into int32 words [..., K/4]."""
    pairs = _by_thread(codes.view(torch.uint8))
    two = torch.unflatten(pairs, -2, (2, 2))  # [..., word, pair, half]
    words = two.transpose(-1, -2).flatten(-2).contiguous().view(torch.int32)
    return words.flatten(-5)


def unpack_fp8(words: Tensor) -> Tensor:
    """Invert `pack_fp8`: int32 [..., K/4] to E4M3 codes [..., K]."""
    groups = block_of(4 * words.shape[-1]) // GROUP
    raw = torch.unflatten(words.contiguous().view(torch.uint8), -1, (-1, 4, groups, 2, 2, 2))
    pairs = raw.transpose(-1, -2).flatten(-3, -2)
    return _by_input(pairs).contiguous().view(torch.float8_e4m3fn)
