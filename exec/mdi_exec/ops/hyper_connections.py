"""Hyper-connections: how a sublayer reads from and writes to the n parallel residual streams.

`hc_mixes` projects the streams, `hc_split` turns the projection into the three sets of
coefficients, `hc_read` and `hc_write` apply them (docs/model.md, 3). `hc_finish` splits a
projection that comes in parts; `hc_read_norm` reads, normalises and rounds in one pass. Which
sublayer's read coefficients are used where ("shifted") is `transformer.py`'s business.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mdi_exec.ops.backend import select
from mdi_exec.ops.elementwise import everywhere
from mdi_exec.ops.gemm import matmul_ref
from mdi_exec.ops.quantise import Quantised
from mdi_exec.ops.rms_norm import rms_norm_round_ref

# Float32 coefficients against another summation order of the same projection.
HC_MAX_ABS = 1e-5
TERMS = 3  # bfloat16 numbers that add up to a float32 one


class HcCoefficients(NamedTuple):
    """Float32: read [T, n], write [T, n], mix [T, n, n]; mix[:, j, k] carries stream j into k."""

    read: Tensor
    write: Tensor
    mix: Tensor


def hc_mixes_ref(streams: Tensor, projection: Tensor, norm_eps: float) -> Tensor:
    flat = streams.flatten(1).to(torch.float32)
    rstd = torch.rsqrt(flat.square().mean(dim=-1, keepdim=True) + norm_eps)
    return matmul_ref(flat, projection) * rstd


def hc_mixes(streams: Tensor, projection: Tensor, norm_eps: float) -> Tensor:
    """Project streams [T, n, D] by projection float32 [(2+n)n, nD]; returns float32 [T, (2+n)n]."""
    return select(streams, ref=hc_mixes_ref)(streams, projection, norm_eps)


def hc_split_ref(
    mixes: Tensor, base: Tensor, scale: Tensor, *, n: int, iterations: int, eps: float
) -> HcCoefficients:
    mixes = mixes.to(torch.float32)
    read = everywhere(torch.sigmoid, mixes[:, :n] * scale[0] + base[:n]) + eps
    write = 2 * everywhere(torch.sigmoid, mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    mix = torch.unflatten(mixes[:, 2 * n :] * scale[2] + base[2 * n :], -1, (n, n))
    mix = everywhere(torch.exp, mix - mix.amax(dim=-1, keepdim=True))
    mix = mix / mix.sum(dim=-1, keepdim=True) + eps
    mix = mix / (mix.sum(dim=-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        mix = mix / (mix.sum(dim=-1, keepdim=True) + eps)
        mix = mix / (mix.sum(dim=-2, keepdim=True) + eps)
    return HcCoefficients(read, write, mix)


def hc_split(
    mixes: Tensor, base: Tensor, scale: Tensor, *, n: int, iterations: int, eps: float
) -> HcCoefficients:
    """Turn mixes [T, (2+n)n] into coefficients; base [(2+n)n] and scale [3] are float32.

    The n x n part is normalised by Sinkhorn's iteration: a row softmax, then `iterations` column
    and `iterations - 1` row normalisations in turn; the last one is over columns.
    """
    run = select(
        mixes, ref=hc_split_ref, kernel="hc_coefficients.hc_split", dtypes=(torch.float32,)
    )
    return run(mixes, base, scale, n=n, iterations=iterations, eps=eps)


def hc_finish_ref(
    parts: Tensor, squares: Tensor, base: Tensor, scale: Tensor, *, width: int, norm_eps: float,
    n: int, iterations: int, eps: float,
) -> HcCoefficients:  # fmt: skip
    total, square = parts[0], squares[0]
    for part in range(1, parts.shape[0]):
        total, square = total + parts[part], square + squares[part]
    mixes = total * torch.rsqrt(square * (1.0 / width) + norm_eps).unsqueeze(-1)
    return hc_split_ref(mixes, base, scale, n=n, iterations=iterations, eps=eps)


def hc_finish(
    parts: Tensor, squares: Tensor, base: Tensor, scale: Tensor, *, width: int, norm_eps: float,
    n: int, iterations: int, eps: float,
) -> HcCoefficients:  # fmt: skip
    """Add up a projection's parts in order, normalise it, and do `hc_split`.

    parts float32 [S, T, (2+n)n] are partial projections of the streams, squares float32 [S, T] the
    same parts' sums of squares; width = nD is how many values a token's squares were taken of.
    """
    run = select(
        parts, ref=hc_finish_ref, kernel="hc_coefficients.hc_finish", dtypes=(torch.float32,)
    )
    return run(parts, squares, base, scale, width=width, norm_eps=norm_eps, n=n,
               iterations=iterations, eps=eps)  # fmt: skip


def term_rows(coefficients: int) -> int:
    """Rows of a projection's terms, one below the other, up to a multiple of 32."""
    return -(-TERMS * coefficients // 32) * 32


class HcProjection:
    """A projection float32 [(2+n)n, nD]; for kernels also split into bfloat16 terms, once."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight
        self._terms: Tensor | None = None

    @property
    def terms(self) -> Tensor:
        """High, middle and low bfloat16 terms, one below the other, then zeros to a multiple of 32.

        Their sum is the float32 weight, so that tensor cores multiply it exactly.
        """
        if self._terms is None:
            rest, terms = self.weight, []
            for _ in range(TERMS):
                terms.append(rest.to(torch.bfloat16))
                rest = rest - terms[-1].to(torch.float32)
            stacked = torch.cat(terms)
            padding = term_rows(self.weight.shape[0]) - stacked.shape[0]
            self._terms = torch.nn.functional.pad(stacked, (0, 0, 0, padding))
        return self._terms


def hc_coefficients_ref(
    streams: Tensor, projection: HcProjection, base: Tensor, scale: Tensor, *,
    norm_eps: float, iterations: int, eps: float,
) -> HcCoefficients:  # fmt: skip
    mixes = hc_mixes_ref(streams, projection.weight, norm_eps)
    n = streams.shape[1]
    return hc_split_ref(mixes, base, scale, n=n, iterations=iterations, eps=eps)


def hc_coefficients(
    streams: Tensor, projection: HcProjection, base: Tensor, scale: Tensor, *,
    norm_eps: float, iterations: int, eps: float,
) -> HcCoefficients:  # fmt: skip
    """Do `hc_mixes` and `hc_split`: a sublayer's coefficients from the streams [T, n, D]."""
    run = select(streams, ref=hc_coefficients_ref, kernel="gemm.hc_coefficients")
    return run(streams, projection, base, scale, norm_eps=norm_eps, iterations=iterations, eps=eps)


def hc_read_ref(streams: Tensor, read: Tensor) -> Tensor:
    total = read[:, 0:1] * streams[:, 0].to(torch.float32)
    for j in range(1, streams.shape[1]):
        total = total + read[:, j : j + 1] * streams[:, j].to(torch.float32)
    return total.to(streams.dtype)


def hc_read(streams: Tensor, read: Tensor) -> Tensor:
    """Mix streams [T, n, D] by read [T, n] into one sublayer input [T, D], summed in float32."""
    return select(streams, ref=hc_read_ref, kernel="hyper_connections.hc_read")(streams, read)


def hc_read_norm_ref(
    streams: Tensor, read: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Quantised | Tensor]:
    return rms_norm_round_ref(hc_read_ref(streams, read), weight, eps)


def hc_read_norm(
    streams: Tensor, read: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Quantised | Tensor]:
    """Do `hc_read`, then `rms_norm_round` by weight [D]: a sublayer's input, normed and rounded."""
    run = select(streams, ref=hc_read_norm_ref, kernel="hyper_connections.hc_read_norm")
    return run(streams, read, weight, eps)


def hc_write_ref(streams: Tensor, output: Tensor, coefficients: HcCoefficients) -> Tensor:
    mix = coefficients.mix.unsqueeze(-1)
    mixed = mix[:, 0] * streams[:, 0:1].to(torch.float32)
    for j in range(1, streams.shape[1]):
        mixed = mixed + mix[:, j] * streams[:, j : j + 1].to(torch.float32)
    written = coefficients.write.unsqueeze(-1) * output.to(torch.float32).unsqueeze(1)
    return (written + mixed).to(streams.dtype)


def hc_write(streams: Tensor, output: Tensor, coefficients: HcCoefficients) -> Tensor:
    """Write a sublayer's output [T, D] back: returns the new streams [T, n, D]."""
    run = select(streams, ref=hc_write_ref, kernel="hyper_connections.hc_write")
    return run(streams, output, coefficients)


def hc_write_read_ref(
    streams: Tensor, output: Tensor, coefficients: HcCoefficients, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Quantised | Tensor]:
    written = hc_write_ref(streams, output, coefficients)
    return written, *hc_read_norm_ref(written, coefficients.read, weight, eps)


def hc_write_read(
    streams: Tensor, output: Tensor, coefficients: HcCoefficients, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Quantised | Tensor]:
    """Do `hc_write`, and `hc_read_norm` of the new streams with the same coefficients."""
    run = select(streams, ref=hc_write_read_ref, kernel="hyper_connections.hc_write_read")
    return run(streams, output, coefficients, weight, eps)
