"""Random weights of the released format, drawn on the device that will use them.

A slice of the released model is tens of GB: written to files and read back it would take minutes
that drawing on a GPU does not. The laws are those of `weights/random.py`, the numbers are not: they
are the same for the same seed, name and kind of device. Read next: `weights/source.py`.
"""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from mdi_exec.model.config import ModelConfig, require
from mdi_exec.ops.quantise import E4M3_MAX, E8M0_BIAS
from mdi_exec.weights.names import TensorSpec, expected_tensors
from mdi_exec.weights.random import E4M3_SPREAD, law_of, scale_law, spread_of

PIECE_ELEMENTS = 2**26  # 256 MiB of float32: bounds what is drawn at once

DTYPES = {
    "F32": torch.float32, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu, "I8": torch.int8,
}  # fmt: skip


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
        for begin, values in self._e4m3_pieces(spec, self._dice(name)):
            low, high = max(begin, first), min(begin + len(values), end)
            if low < high:
                flat[low - first : high - first].copy_(values[low - begin : high - begin])
        return out

    def _spec(self, name: str) -> TensorSpec:
        require(name in self.tensors, "tensor", name, "is none of those the config asks for")
        return self.tensors[name]

    def _fill(self, out: Tensor, name: str, spec: TensorSpec) -> None:
        dice = self._dice(name)
        if spec.dtype == "I8":  # two FP4 codes: any byte will do
            out.view(torch.uint8).random_(0, 256, generator=dice)
        elif spec.dtype == "F8_E8M0":
            weight_name = f"{name.removesuffix('.scale')}.weight"
            exponent, share_of_upper = scale_law(weight_name, self.tensors[weight_name])
            codes = out.view(torch.uint8).bernoulli_(share_of_upper, generator=dice)
            codes += exponent + E8M0_BIAS
        elif spec.dtype == "F8_E4M3":
            for begin, values in self._e4m3_pieces(spec, dice):
                out.view(-1)[begin : begin + len(values)].copy_(values)
        else:
            out.normal_(law_of(name).mean, spread_of(name, spec), generator=dice)

    def _dice(self, name: str) -> torch.Generator:
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=7).digest()
        return self._generator.manual_seed(int.from_bytes(digest, "little"))

    def _e4m3_pieces(self, spec: TensorSpec, dice: torch.Generator) -> Iterator[tuple[int, Tensor]]:
        """Draw a tensor's values piece by piece: the first one's flat index, and float32 values."""
        for begin in range(0, spec.num_elements, PIECE_ELEMENTS):
            size = min(PIECE_ELEMENTS, spec.num_elements - begin)
            values = torch.empty(size, device=self.device)
            values.normal_(0.0, E4M3_SPREAD, generator=dice).clamp_(-E4M3_MAX, E4M3_MAX)
            yield begin, values


def random_token_map(config: ModelConfig, seed: int = 0) -> Tensor:
    """Return a made-up map of token ids to the compressed ids Engram hashes, int64 [vocab_size].

    A tokenizer would merge ids that spell alike; this one merges any, evenly.
    """
    dice = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(config.vocab_size, generator=dice)
    return shuffled % config.engram_compressed_vocab_size
