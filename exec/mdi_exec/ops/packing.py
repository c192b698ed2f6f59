"""Quantised weights reordered for tensor cores: same bytes, same values, another order.

Within a row, each block of K inputs (`block_of`) is cut in four columns, one for each of the four
threads that share a row of a tensor-core operand. A thread's codes lie side by side, group after
group: of each group of 32 inputs it owns eight, in the order (16-input step, 8-input half, pair).
FP4's eight codes make one 32-bit word, FP8's make two. The bits inside a word are placed for cheap
decoding (`kernels/decode_source.py`). Packing is undone exactly by `unpack_codes`.
"""

import torch
from torch import Tensor

from mdi_exec.ops.quantise import GROUP

LARGEST_FP4_SCALE = 128  # E8M0 byte, 2^1: decoding multiplies by 2^126 times the scale
LARGEST_FP8_SCALE = 134

# Bit positions of a pair's low half within a word, most significant first: sign, two exponent
# bits, mantissa. The high half lies 16 bits above.
_FP4_BITS = ((15, 8, 7, 6), (12, 5, 4, 3), (9, 2, 1, 0), (14, 13, 11, 10))


def block_of(width: int) -> int:
    """Inputs of one packed block: the largest of 128, 64 and 32 that divides the row."""
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
    """Reorder FP4 bytes [..., K/2] (even input in the low nibble) into int32 words [..., K/8]."""
    raw = codes.view(torch.uint8)
    nibbles = torch.stack((raw & 0xF, raw >> 4), dim=-1).flatten(-2)
    pairs = _by_thread(nibbles).to(torch.int64)
    word = torch.zeros(pairs.shape[:-2], dtype=torch.int64, device=codes.device)
    for p, positions in enumerate(_FP4_BITS):
        for bit, position in zip((3, 2, 1, 0), positions, strict=True):
            for half in (0, 1):
                word |= ((pairs[..., p, half] >> bit) & 1) << (position + 16 * half)
    return _wrapped(word).flatten(-3)


def unpack_fp4(words: Tensor) -> Tensor:
    """Invert `pack_fp4`: int32 [..., K/8] to bytes [..., K/2]."""
    groups = block_of(8 * words.shape[-1]) // GROUP
    split = torch.unflatten(words, -1, (-1, 4, groups)).to(torch.int64)
    pairs = torch.zeros((*split.shape, 4, 2), dtype=torch.uint8, device=words.device)
    for p, positions in enumerate(_FP4_BITS):
        for bit, position in zip((3, 2, 1, 0), positions, strict=True):
            for half in (0, 1):
                pairs[..., p, half] |= (((split >> (position + 16 * half)) & 1) << bit).to(
                    torch.uint8
                )
    nibbles = _by_input(pairs)
    return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)


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


def _wrapped(word: Tensor) -> Tensor:
    """Keep the low 32 bits as int32, whatever the sign."""
    return torch.where(word >= 2**31, word - 2**32, word).to(torch.int32)
