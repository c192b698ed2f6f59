"""Steps made up to be timed: a cache full of random rows, and batches of equal sequences on it."""

import torch

from mdi_exec.model.batch import BLOCK_TOKENS, Batch, BatchItem
from mdi_exec.model.cache import CacheLayout, DeviceCache
from mdi_exec.model.floors import StepShape
from mdi_exec.model.transformer import Transformer
from mdi_exec.ops.row_pool import RowPool

FILL_ROWS = 4096  # different rows a cache is filled with


def filled_cache(model: Transformer, step: StepShape) -> DeviceCache:
    """Return a cache for a step whose every row holds random values, encoded as the model would."""
    layout = CacheLayout(config=model.config, numerics=model.numerics)
    cache = DeviceCache(layout, num_blocks=1 + step.num_seqs * blocks_for(step.context),
                        num_slots=1 + step.num_seqs, device=model.device)  # fmt: skip
    dice = torch.Generator(model.device).manual_seed(0)
    for pool in (*cache.windows, *cache.entries.values(), *cache.keys.values()):
        _fill(pool, dice)
    for tail in cache.tails.values():
        tail.normal_(generator=dice)
    most = model.config.engram_compressed_vocab_size
    cache.engram_ids.random_(0, most, generator=dice)
    return cache


def _fill(pool: RowPool, dice: torch.Generator) -> None:
    values = torch.empty(FILL_ROWS, pool.format.width, device=pool.codes.device)
    rows = pool.encode(values.normal_(generator=dice).to(torch.bfloat16))
    for start in range(0, pool.codes.shape[0], FILL_ROWS):
        count = min(FILL_ROWS, pool.codes.shape[0] - start)
        pool.codes[start : start + count] = rows.codes[:count]
        pool.scales[start : start + count] = rows.scales[:count]


def blocks_for(tokens: int) -> int:
    """Blocks that a context of so many tokens takes."""
    return -(-tokens // BLOCK_TOKENS)


def random_batch(model: Transformer, step: StepShape, seed: int = 0) -> Batch:
    """Return a batch of equal sequences that own blocks 1, 2, .. and slots 1, 2, .. in turn."""
    each, dice = blocks_for(step.context), torch.Generator().manual_seed(seed)
    ids = torch.randint(0, model.config.vocab_size, (step.total_rows,), generator=dice,
                        dtype=torch.int32)  # fmt: skip
    items = [
        BatchItem(step.rows, step.context, 1 + i, range(1 + i * each, 1 + (i + 1) * each), 1)
        for i in range(step.num_seqs)
    ]
    return Batch.build(items, ids, model.device)
