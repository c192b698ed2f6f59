"""Random weights of the released format, drawn on the device that will use them.

A slice of the released model is tens of GB: written to files and read back it would take minutes
that drawing on a GPU does not. The laws are those of `random_weights.py`, the numbers are not: they
are the same for the same seed, name and kind of device. Read next: `model_source.py`.
"""

import hashlib

import torch
from torch import Tensor

from mdi_exec.checkpoint_names import TensorSpec, expected_tensors
from mdi_exec.model.config import ModelConfig, require
from mdi_exec.ops.quantise import E4M3_MAX, E8M0_BIAS
from mdi_exec.random_weights import E4M3_SPREAD, law_of, scale_law, spread_of

PIECE_ELEMENTS = 2**26  # 256 MiB of float32: bounds what is drawn at once

_DTYPES = {
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
        out = torch.empty(spec.shape, dtype=_DTYPES[spec.dtype], device=self.device)
        self._fill(out, name, spec)
        return out

    def _spec(self, name: str) -> TensorSpec:
        require(name in self.tensors, "tensor", name, "is none of those the config asks for")
        return self.tensors[name]

    def _fill(self, out: Tensor, name: str, spec: TensorSpec) -> None:
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=7).digest()
        dice = self._generator.manual_seed(int.from_bytes(digest, "little"))
        if spec.dtype == "I8":  # two FP4 codes: any byte will do
            out.view(torch.uint8).random_(0, 256, generator=dice)
        elif spec.dtype == "F8_E8M0":
            weight_name = f"{name.removesuffix('.scale')}.weight"
            exponent, share_of_upper = scale_law(weight_name, self.tensors[weight_name])
            codes = out.view(torch.uint8).bernoulli_(share_of_upper, generator=dice)
            codes += exponent + E8M0_BIAS
        elif spec.dtype == "F8_E4M3":
            for piece in torch.split(out.view(-1), PIECE_ELEMENTS):
                values = torch.empty(piece.shape, device=self.device)
                values.normal_(0.0, E4M3_SPREAD, generator=dice).clamp_(-E4M3_MAX, E4M3_MAX)
                piece.copy_(values)
        else:
            out.normal_(law_of(name).mean, spread_of(name, spec), generator=dice)


def random_token_map(config: ModelConfig, seed: int = 0) -> Tensor:
    """Return a made-up map of token ids to the compressed ids Engram hashes, int64 [vocab_size].

    A tokenizer would merge ids that spell alike; this one merges any, evenly.
    """
    dice = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(config.vocab_size, generator=dice)
    return shuffled % config.engram_compressed_vocab_size
