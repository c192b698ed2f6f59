"""Engram: a gated lookup of hashed 2-, 3- and 4-grams, added to the streams (docs/model.md, 1).

The compressed vocabulary comes from the tokenizer as a tensor; here are the hash's constants
(`engram_hashes`), the table, and the ids carried from step to step.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mdi_exec.model.config import LayerPlan, ModelConfig, require
from mdi_exec.model.linear import QLinear
from mdi_exec.model.step_context import StepContext
from mdi_exec.model.weights import Weights
from mdi_exec.numerics import Numerics
from mdi_exec.ops.engram import BLOCKED, engram_add, engram_rows, ids_before
from mdi_exec.ops.quantise import Quantised, dequantise, quantise_activation
from mdi_exec.ops.row_pool import RowPool, window_format
from mdi_exec.ranks.collectives import pack, unpack
from mdi_exec.ranks.exchange import NO_EXCHANGE, ExpertExchange

MULTIPLIER_SEED = 10_007
MAX_PRODUCT = 2**63 - 1


@dataclass(frozen=True, slots=True)
class EngramHash:
    """Hash constants of one Engram layer, int64: multipliers [N], primes and offsets [N-1, heads].

    N is the longest n-gram; primes are size-major, offsets their exclusive running sum.
    """

    multipliers: Tensor
    primes: Tensor
    offsets: Tensor

    @property
    def num_rows(self) -> int:
        """Rows the layer's table needs."""
        return int(self.primes.sum())


def engram_hashes(config: ModelConfig) -> list[EngramHash]:
    """Return every Engram layer's hash constants.

    Primes are unique over all layers: each (layer, size) starts again at engram_vocab_size and
    takes the next ones nobody has taken. Raises `ConfigError` when the config's table sizes are
    not the sums of the primes.
    """
    sizes, heads = config.engram_max_ngram_size - 1, config.engram_n_heads
    taken: set[int] = set()
    hashes = []
    for index, layer in enumerate(config.engram_layer_ids):
        primes = []
        for _ in range(sizes):
            candidate = config.engram_vocab_size - 1
            for _ in range(heads):
                candidate = _next_prime(candidate, taken)
                taken.add(candidate)
                primes.append(candidate)
        found = EngramHash(
            torch.from_numpy(_multipliers(layer, config)),
            torch.tensor(primes).view(sizes, heads),
            torch.tensor([sum(primes[:i]) for i in range(len(primes))]).view(sizes, heads),
        )
        require(found.num_rows == config.engram_num_embeddings[index],
                f"engram_num_embeddings[{index}]", config.engram_num_embeddings[index],
                f"must be {found.num_rows}, the sum of the layer's primes")  # fmt: skip
        hashes.append(found)
    return hashes


def _multipliers(layer: int, config: ModelConfig) -> np.typing.NDArray[np.int64]:
    """Odd factors, small enough that id times factor stays below 2^63."""
    most = max(1, MAX_PRODUCT // config.engram_compressed_vocab_size // 2)
    generator = np.random.default_rng(MULTIPLIER_SEED * layer)
    drawn = generator.integers(0, most, size=config.engram_max_ngram_size, dtype=np.int64)
    return 2 * drawn + 1


def _next_prime(after: int, taken: set[int]) -> int:
    candidate = after + 1
    while candidate in taken or not _is_prime(candidate):
        candidate += 1
    return candidate


def _is_prime(number: int) -> bool:
    if number < 4 or number % 2 == 0:
        return number in (2, 3)
    return all(number % d for d in range(3, int(number**0.5) + 1, 2))


class EngramIds:
    """The compressed ids at each row's position and the ones before it, carried across steps."""

    def __init__(self, config: ModelConfig, token_map: Tensor, device: torch.device) -> None:
        vocab_size = config.vocab_size
        require(tuple(token_map.shape) == (vocab_size,), "token_map", tuple(token_map.shape),
                f"must map vocab_size = {vocab_size} ids")  # fmt: skip
        self.token_map = token_map.to(device, torch.int64)
        self.pad_id = int(token_map[config.engram_pad_token_id])
        self.depth = config.engram_max_ngram_size

    def __call__(self, ctx: StepContext) -> Tensor:
        """Return ids [T, N] at shifts 0 .. N-1 back, -1 = blocked; updates the slots' history."""
        batch, length = ctx.batch, ctx.cache.layout.history_rows
        ids = self.token_map[batch.token_ids]
        if batch.is_image is not None:
            ids = ids.masked_fill(batch.is_image, BLOCKED)
        history = ctx.cache.engram_ids
        seen = ids_before(ids, history.view(-1, length), ctx.tables, self.depth)
        history[ctx.target(length)] = ids.to(torch.int32)
        return seen


class Engram:
    """One Engram layer: table, projection and gate. `table_device` may differ from the model's.

    In a group of ranks the table is this rank's part; the rest is asked of the others.
    """

    def __init__(
        self, config: ModelConfig, plan: LayerPlan, weights: Weights, hashes: EngramHash,
        table_device: torch.device | str,
    ) -> None:  # fmt: skip
        width, head_dim = config.hidden_size, config.engram_head_dim
        table = weights.sub("embed", table_device)
        self.table = Quantised(
            table.own_rows("weight", hashes.num_rows, head_dim),
            table.own_rows("scale", hashes.num_rows, head_dim // 32),
        )
        self.pool = RowPool.of(self.table, window_format(head_dim, Numerics.QUANTISED))
        self.rows_per_rank = weights.shard.rows_per_rank(hashes.num_rows)
        self.multipliers = hashes.multipliers.to(weights.device)
        self.primes = hashes.primes.to(weights.device)
        self.offsets = hashes.offsets.to(weights.device)
        columns = hashes.primes.numel() * head_dim
        self.wkv = QLinear(weights, "wkv", (config.hc_mult + 1) * width, columns)
        self.q_weight = weights.tensor("q_weight", config.hc_mult, width)
        self.k_weight = weights.tensor("k_weight", config.hc_mult, width)

    def table_rows(self, ids: Tensor, pad_id: int) -> Tensor:
        """Return the table rows [T, columns] of compressed ids [T, N]."""
        return engram_rows(ids, pad_id, self.multipliers, self.primes, self.offsets)

    def look_up(
        self, rows: Tensor, dtype: torch.dtype, exchange: ExpertExchange = NO_EXCHANGE
    ) -> Tensor:
        """Return one key per stream and the shared value, [T, (n+1)D], for rows [T, columns]."""
        if exchange.size == 1:
            found = self.pool.gather(rows.to(self.table.codes.device)).flatten(1)
            found = found.to(rows.device, dtype)
        else:
            answers = exchange.look_up(rows, self.rows_per_rank, self._read_bytes)
            stored = Quantised(*unpack(answers, *self.table))
            found = torch.unflatten(dequantise(stored, dtype), 0, rows.shape).flatten(1)
        return self.wkv(quantise_activation(found))

    def _read_bytes(self, rows: Tensor) -> Tensor:
        """Return the codes and scales of own rows [n] as bytes, uint8 [n, B]."""
        return pack(*self.table.rows(rows.to(self.table.codes.device))).to(rows.device)

    def __call__(
        self, streams: Tensor, ids: Tensor, pad_id: int, exchange: ExpertExchange = NO_EXCHANGE
    ) -> Tensor:
        """Add to streams [T, n, D] what the n-grams of ids [T, N] look up."""
        looked_up = self.look_up(self.table_rows(ids, pad_id), streams.dtype, exchange)
        is_open = ids[:, 0] != BLOCKED
        return engram_add(streams, looked_up, self.q_weight, self.k_weight, is_open)
