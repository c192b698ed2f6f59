"""Shared by the executor's tests: golden tensors, the tiny model, and a runner over its caches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mdi_exec.model.batch import BLOCK_TOKENS, Batch, BatchItem
from mdi_exec.model.cache import CacheLayout, DeviceCache
from mdi_exec.model.config import ModelConfig
from mdi_exec.model.config_reader import read_config, read_config_file
from mdi_exec.model.transformer import Transformer
from mdi_exec.model.weights import Weights
from mdi_exec.numerics import Numerics
from mdi_exec.ops.gemm import ROW_TILE
from tests.exec.engines import CHECKPOINT
from tests.exec.weights import GOLDEN_TINY

# The flat config of the released model (docs/model.md, "Dimensions").
FLAT_V41_FLASH = {
    "vocab_size": 129280, "dim": 5120, "n_layers": 40, "n_mtp_layers": 3, "norm_eps": 1e-20,
    "n_heads": 64, "head_dim": 512, "rope_head_dim": 64, "q_lora_rank": 1280, "o_groups": 8,
    "o_lora_rank": 1024, "window_size": 128,
    "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3,
    "kv_source_layers": [2, 8, 14, 20], "index_source_layers": [2, 8, 14, 20, 24, 28, 32, 36],
    "index_n_heads": 32, "index_head_dim": 128, "index_topk": 512, "candidate_source_layer": 20,
    "candidate_topk_blocks": 2048, "candidate_block_size": 8, "rope_theta": 10000,
    "compress_rope_theta": 160000, "rope_factor": 16, "original_seq_len": 65536, "beta_fast": 32,
    "beta_slow": 1, "n_routed_experts": 384, "n_activated_experts": 6, "n_shared_experts": 1,
    "moe_inter_dim": 2304, "score_func": "sqrtsoftplus", "route_scale": 1.5, "swiglu_limit": 10.0,
    "gate_temp": 1.0, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6,
    "engram_layer_ids": [1, 14], "engram_num_embeddings": [384006168, 384016682],
    "engram_max_ngram_size": 4, "engram_vocab_size": 16000000, "engram_n_heads": 8,
    "engram_head_dim": 256, "engram_pad_id": 2, "engram_compressed_vocab_size": 99092,
    "dspark_block_size": 5, "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [37, 38, 39], "dspark_markov_rank": 256,
    "dspark_n_routed_experts": 128, "dspark_n_activated_experts": 3, "dtype": "fp8",
    "expert_dtype": "fp4",
}  # fmt: skip

GOLDEN = GOLDEN_TINY.parent


class FileTensors:
    """A checkpoint of one file, as `Weights` wants it."""

    def __init__(self, path: Path) -> None:
        self.tensors = load_file(path)

    def get(self, name: str) -> Tensor:
        return self.tensors[name]


# Products of fewer rows are summed in another order by the library that made the golden data.
FEW_ROWS = 4


@dataclass(frozen=True)
class Runner:
    """The tiny model in one mode, driven the way a server would, one call per step.

    `few_rows_apart` is for golden data alone: steps of 1 to 3 rows are multiplied as what they are,
    as the released reference does, not in tiles as the engine does, where a row must not depend on
    how many others there are.
    """

    model: Transformer
    few_rows_apart: bool = False

    def forward(self, batch: Batch, cache: DeviceCache) -> Tensor:
        """Run one step."""
        tile = ROW_TILE["cpu"]
        if self.few_rows_apart and batch.num_rows < FEW_ROWS:
            ROW_TILE["cpu"] = batch.num_rows
        try:
            return self.model.forward(batch, cache)
        finally:
            ROW_TILE["cpu"] = tile

    def cache(self, *, max_backtrack: int = 0) -> DeviceCache:
        """An empty cache of 24 blocks and 8 slots."""
        layout = CacheLayout(config=self.model.config, numerics=self.model.numerics,
                             max_backtrack=max_backtrack)  # fmt: skip
        return DeviceCache(layout, num_blocks=24, num_slots=8, device="cpu")

    def prefill(
        self,
        cache: DeviceCache,
        ids: Tensor,
        chunks: Sequence[int] | None = None,
        *,
        slot: int = 1,
        table: Sequence[int] | None = None,
        keep: int = 0,
        given_len: int = 0,
    ) -> Tensor:
        """Logits of all rows (with `keep`: of the last row) of a prompt run in `chunks`."""
        outs, k = [], 0
        for q in chunks or [len(ids)]:
            k += q
            wanted = q if not keep else int(k == len(ids))
            item = BatchItem(q, k, slot, table or blocks_for(len(ids)), wanted, len(ids),
                             given_len)  # fmt: skip
            batch = Batch.build([item], ids[k - q : k], replay_keep_tokens=keep)
            outs.append(self.forward(batch, cache))
        assert k == len(ids), "the chunks must cover the prompt"
        return torch.cat(outs)

    def decode(
        self, cache: DeviceCache, start: int, forced: Tensor, *, keep: int = 0, prompt_len: int = 0
    ) -> Tensor:
        """Logits after each forced token, from context length `start` on (slot 1)."""
        outs = []
        table = blocks_for(start + len(forced))
        for i in range(len(forced)):
            item = BatchItem(1, start + i + 1, 1, table, 1, prompt_len)
            batch = Batch.build([item], forced[i : i + 1], replay_keep_tokens=keep)
            outs.append(self.forward(batch, cache))
        return torch.cat(outs)


def blocks_for(tokens: int) -> list[int]:
    return list(range(1, -(-tokens // BLOCK_TOKENS) + 1))


@pytest.fixture(scope="session")
def golden() -> Callable[[str], dict[str, Tensor]]:
    """Load a golden file by its path below tests/golden, without the suffix."""
    return lambda name: load_file(GOLDEN / f"{name}.safetensors")


@pytest.fixture(scope="session")
def golden_path() -> Path:
    return GOLDEN


@pytest.fixture(scope="session")
def flat_config() -> dict[str, object]:
    return FLAT_V41_FLASH


@pytest.fixture(scope="session")
def released(flat_config) -> ModelConfig:
    """The released model's dimensions."""
    return read_config(flat_config)


@pytest.fixture(scope="session")
def tiny_config() -> ModelConfig:
    return read_config_file(GOLDEN_TINY / "config.json")


@pytest.fixture(scope="session")
def tiny_tensors() -> FileTensors:
    return FileTensors(GOLDEN_TINY / "model.safetensors")


@pytest.fixture(scope="session")
def token_map(golden) -> Tensor:
    return golden("layers/engram_hash")["token_map"]


def runners_of(folder: Path, token_map: Tensor) -> dict[Numerics, Runner]:
    config = read_config_file(folder / "config.json")
    weights = Weights(FileTensors(folder / "model.safetensors"))
    return {
        numerics: Runner(Transformer(config, weights, token_map=token_map, numerics=numerics))
        for numerics in Numerics
    }


@pytest.fixture(scope="session")
def runners(token_map) -> dict[Numerics, Runner]:
    """The golden model's."""
    return runners_of(GOLDEN_TINY, token_map)


@pytest.fixture(scope="session")
def small_runners(token_map) -> dict[Numerics, Runner]:
    """Those of the model for tests without golden tensors."""
    return runners_of(CHECKPOINT, token_map)


@pytest.fixture(scope="session")
def sums_like_golden(golden, tiny_tensors) -> bool:
    """Say whether this machine's library sums float32 products as the golden data's did.

    Asked of torch alone, on stored streams and their projections. Where it does not, rounded logits
    differ by last bits that no rule of ours decides, and layers magnify them.
    """
    stored = golden("layers/quantised")
    rows = stored["rows"].long()
    for layer in ("00", "02", "06", "08"):
        streams = stored[f"p.L{layer}.h_in"].flatten(1).float()
        projection = tiny_tensors.get(f"layers.{int(layer)}.hc_attn_fn")
        rstd = torch.rsqrt(streams.square().mean(dim=1, keepdim=True) + 1e-20)
        found, raw = streams @ projection.t() * rstd, stored[f"p.L{layer}.hc_attn.raw"]
        if not torch.equal(found, raw if len(raw) == len(found) else raw[rows]):
            return False
    return True


@pytest.fixture
def exact(runners) -> Runner:
    """The model without any rounding."""
    return runners[Numerics.FLOAT32]


@pytest.fixture
def rounded(runners) -> Runner:
    """The model with the released rounding."""
    return runners[Numerics.QUANTISED]
