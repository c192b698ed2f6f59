"""Random weights in the checkpoint's own formats, the same for the same seed.

Files (`tensor_data`): weights are drawn as codes. A 16-bit random number looks up one of 65,536
normal quantiles already rounded to the dtype, and FP4 bytes are the random bits themselves. Scales
make up the wanted spread. A trained model's statistics are not imitated beyond that: activations
stay finite, and logits spread by about 3.

Devices (`RandomSource`): a slice of the released model is tens of GB. Written to files and read
back it would take minutes that drawing on a GPU does not. The laws are the same, the numbers are
not: they follow from seed, name and kind of device. Read next: `make_checkpoint.py`, `source.py`.
"""

import hashlib
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import scipy.special
import torch
from torch import Tensor

from mdi_exec.model.config import ModelConfig, require
from mdi_exec.ops.quantise import E4M3_MAX, E8M0_BIAS
from mdi_exec.weights.names import TensorSpec, expected_tensors

Array = npt.NDArray[Any]

TABLE_ENTRIES = 2**16
WORDS_AT_ONCE = 2**20  # 8 MiB of random bits
E4M3_SPREAD = 100.0  # codes of one standard deviation: the table's ends stay below 448
E2M1_RMS = math.sqrt(68.5 / 8)  # of the eight magnitudes, each equally likely


PIECE_ELEMENTS = 2**26  # 256 MiB of float32: bounds what is drawn at once

DTYPES = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu, "I8": torch.int8,
}  # fmt: skip


class Law(NamedTuple):
    """Mean and standard deviation; `by_inputs` divides the latter by the root of the inputs."""

    mean: float
    std: float
    by_inputs: bool = False


# First match wins. Small gains on what writes to the residual streams keep one sublayer from
# drowning the others; 3 on the head is the logits' spread.
_LAWS: tuple[tuple[str, Law], ...] = (
    (r"norm\d?\.weight$|\.[qk]_weight$", Law(1.0, 0.15)),
    (r"hc_\w+_scale$", Law(0.5, 0.1)),
    (r"hc_\w+_base$|attn_sink$", Law(0.0, 1.0)),
    (r"gate\.bias|\.bias$", Law(0.0, 0.1)),
    (r"(^|\.)embed\.weight$|^image_", Law(0.0, 1.0)),
    (r"markov_head\.head\.weight$", Law(0.0, 2.5, by_inputs=True)),
    (r"^head\.weight$", Law(0.0, 3.0, by_inputs=True)),
    (r"gate\.weight$|experts\.(\d+\.)?w[13]\.weight$", Law(0.0, 1.6, by_inputs=True)),
    (r"experts\.(\d+\.)?w2\.weight$", Law(0.0, 0.1, by_inputs=True)),
    (r"attn\.wo_b\.weight$", Law(0.0, 0.3, by_inputs=True)),
    (r"", Law(0.0, 1.0, by_inputs=True)),
)

_QUANTILES = scipy.special.ndtri((np.arange(TABLE_ENTRIES) + 0.5) / TABLE_ENTRIES)


def law_of(name: str) -> Law:
    """Return how a tensor's values are spread, by its name."""
    return next(law for pattern, law in _LAWS if re.search(pattern, name))


def tensor_data(
    name: str, tensors: Mapping[str, TensorSpec], seed: int
) -> Iterator[memoryview]:  # fmt: skip
    """Yield the bytes of one of `tensors`, piece by piece; they depend on name, spec and seed."""
    spec = tensors[name]
    remaining = spec.nbytes
    table = _table(name, tensors)
    bits = _bit_generator(name, seed)
    while remaining:
        item_bytes = 1 if table is None else table.itemsize * 4  # of 8 random bytes
        words = min(WORDS_AT_ONCE, -(-remaining // (8 if table is None else item_bytes)))
        piece = _piece(bits.random_raw(words).astype("<u8", copy=False), table)[:remaining]
        remaining -= len(piece)
        yield piece


def _piece(words: Array, table: Array | None) -> memoryview:
    found = words if table is None else table[words.view("<u2")]
    return found.view(np.uint8).data


def _bit_generator(name: str, seed: int) -> np.random.BitGenerator:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest()
    return np.random.SFC64(int.from_bytes(digest, "little"))


def _table(name: str, tensors: Mapping[str, TensorSpec]) -> Array | None:
    """Return the 65,536 equally likely values of a tensor, None for FP4: any byte will do."""
    spec = tensors[name]
    if spec.dtype == "I8":
        return None
    if spec.dtype == "F8_E4M3":
        return _e4m3_codes().view(torch.uint8).numpy()
    if spec.dtype == "F8_E8M0":
        weight_name = f"{name.removesuffix('.scale')}.weight"
        return _scale_bytes(weight_name, tensors[weight_name])
    values = torch.from_numpy(_QUANTILES) * spread_of(name, spec) + law_of(name).mean
    if spec.dtype == "BF16":
        return values.to(torch.bfloat16).view(torch.int16).numpy()
    assert spec.dtype == "F32", f"{name}: no law for {spec.dtype}"
    return values.to(torch.float32).numpy()


def _e4m3_codes() -> torch.Tensor:
    return torch.from_numpy(_QUANTILES * E4M3_SPREAD).to(torch.float8_e4m3fn)


def spread_of(name: str, spec: TensorSpec) -> float:
    """Return the standard deviation of a tensor's values."""
    law = law_of(name)
    inputs = spec.shape[-1] * (2 if spec.dtype == "I8" else 1)
    return law.std * inputs**-0.5 if law.by_inputs else law.std


def _scale_bytes(weight_name: str, weight: TensorSpec) -> Array:
    """Tabulate the two neighbouring powers of two that `scale_law` names, as E8M0 codes."""
    exponent, share_of_upper = scale_law(weight_name, weight)
    table = np.full(TABLE_ENTRIES, exponent + E8M0_BIAS, np.uint8)
    table[: round(share_of_upper * TABLE_ENTRIES)] += 1
    return table


def scale_law(weight_name: str, weight: TensorSpec) -> tuple[int, float]:
    """Return the lower of two exponents, and how many scales take the one above it.

    Mixed so, codes times scales have the mean square that the weight's law asks for.
    """
    code_rms = _e4m3_rms() if weight.dtype == "F8_E4M3" else E2M1_RMS
    wanted = spread_of(weight_name, weight) / code_rms
    exponent = math.floor(math.log2(wanted))
    return exponent, ((wanted / 2.0**exponent) ** 2 - 1) / 3


@cache
def _e4m3_rms() -> float:
    return float(_e4m3_codes().to(torch.float64).square().mean().sqrt())


class RandomSource:
    """A `TensorSource` without files: `get` draws the tensor anew, the same one every time.

    Raises `ConfigError` for a tensor that `config` does not ask for.
    """

    def __init__(self, config: ModelConfig, seed: int, device: torch.device | str) -> None:
        self.config = config
        self.seed = seed
        self.device = torch.device(device)
        self.tensors = expected_tensors(config)
        self._generator = torch.Generator(self.device)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors the config asks for."""
        return sum(spec.nbytes for spec in self.tensors.values())

    def get(self, name: str) -> Tensor:
        """Return a tensor on the source's device, in the dtype of the released file."""
        spec = self._spec(name)
        out = torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device=self.device)
        self._fill(out, name, spec)
        return out

    def get_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows start .. stop-1 of what `get` returns.

        Everything is drawn, since a row depends on those before it, but of FP8 codes only a piece
        at a time is held beside the rows.
        """
        spec = self._spec(name)
        require(0 <= start <= stop <= spec.shape[0], f"rows of {name}", (start, stop),
                f"must lie in 0 .. {spec.shape[0]}")  # fmt: skip
        if spec.dtype != "F8_E4M3":
            return self.get(name)[start:stop].clone()
        out = torch.empty((stop - start, *spec.shape[1:]), dtype=torch.float8_e4m3fn,
                          device=self.device)  # fmt: skip
        width = spec.num_elements // spec.shape[0]
        first, end, flat = start * width, stop * width, out.view(-1)
        for begin, values in self._e4m3_pieces(spec, self._rng(name)):
            low, high = max(begin, first), min(begin + len(values), end)
            if low < high:
                flat[low - first : high - first].copy_(values[low - begin : high - begin])
        return out

    def _spec(self, name: str) -> TensorSpec:
        require(name in self.tensors, "tensor", name, "is none of those the config asks for")
        return self.tensors[name]

    def _fill(self, out: Tensor, name: str, spec: TensorSpec) -> None:
        rng = self._rng(name)
        if spec.dtype == "I8":  # two FP4 codes: any byte will do
            out.view(torch.uint8).random_(0, 256, generator=rng)
        elif spec.dtype == "F8_E8M0":
            weight_name = f"{name.removesuffix('.scale')}.weight"
            exponent, share_of_upper = scale_law(weight_name, self.tensors[weight_name])
            codes = out.view(torch.uint8).bernoulli_(share_of_upper, generator=rng)
            codes += exponent + E8M0_BIAS
        elif spec.dtype == "F8_E4M3":
            for begin, values in self._e4m3_pieces(spec, rng):
                out.view(-1)[begin : begin + len(values)].copy_(values)
        else:
            out.normal_(law_of(name).mean, spread_of(name, spec), generator=rng)

    def _rng(self, name: str) -> torch.Generator:
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=7).digest()
        return self._generator.manual_seed(int.from_bytes(digest, "little"))

    def _e4m3_pieces(self, spec: TensorSpec, rng: torch.Generator) -> Iterator[tuple[int, Tensor]]:
        """Draw a tensor's values piece by piece: the first one's flat index, and float32 values."""
        for begin in range(0, spec.num_elements, PIECE_ELEMENTS):
            size = min(PIECE_ELEMENTS, spec.num_elements - begin)
            values = torch.empty(size, device=self.device)
            values.normal_(0.0, E4M3_SPREAD, generator=rng).clamp_(-E4M3_MAX, E4M3_MAX)
            yield begin, values


def random_token_map(config: ModelConfig, seed: int = 0) -> Tensor:
    """Return a made-up map of token ids to the compressed ids Engram hashes, int64 [vocab_size].

    A tokenizer would merge ids that spell alike; this one merges any, evenly.
    """
    rng = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(config.vocab_size, generator=rng)
    return shuffled % config.engram_compressed_vocab_size
