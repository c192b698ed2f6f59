"""The work of decode steps from the contexts of their sequences, in numpy.

The same numbers as `mdi_shared.cost.work.DecodeWork` gives one step at a time.
"""

from typing import Any

import numpy as np

from mdi_shared.cost.flops import coefficients
from mdi_shared.cost.shape import ModelShape
from mdi_traces.columns import Ints


def decode_columns(shape: ModelShape, k: Ints, counts: Ints) -> dict[str, Ints]:
    """Return columns of `StepWork` for steps of one row per sequence.

    `k` are the contexts, step after step, `counts` how many each step has: at least one.
    """
    starts = np.cumsum(counts) - counts

    def capped(values: Ints, cap: int) -> Ints:
        return np.add.reduceat(np.minimum(values, cap), starts)

    sum_k = np.add.reduceat(k, starts)
    block = shape.candidate_block_size
    blocks = capped((k + block - 1) // block, shape.candidate_topk_blocks)
    index_r2 = shape.num_index_r2_layers * np.add.reduceat(k // 2, starts)
    index_r1 = shape.num_index_r1_layers * sum_k + shape.num_candidate_layers * block * blocks
    core = shape.num_core_r2_layers * capped(k // 2, shape.index_topk)
    core += shape.num_core_r1_layers * capped(k, shape.index_topk)
    window = shape.num_hidden_layers * capped(k, shape.sliding_window)
    keys = (shape.num_kv_source_r2_layers + shape.num_kv_source_r1_layers) * counts
    c: Any = coefficients(shape)  # its sums are as good for arrays
    attn, total = c.flops(counts, counts, keys, core + window, index_r2 + index_r1)
    return {
        "n_seqs": counts, "rows": counts, "consumer_rows": counts, "logit_rows": counts,
        "sum_k": sum_k, "sum_qk": sum_k,
        "max_k": np.maximum.reduceat(k, starts), "min_k": np.minimum.reduceat(k, starts),
        "key_rows": keys, "idx_pairs_r2": index_r2, "idx_pairs_r1": index_r1,
        "core_pairs": core, "swa_pairs": window,
        "flops_attn": attn, "flops_total": total + c.logit_row * counts,
    }  # fmt: skip
