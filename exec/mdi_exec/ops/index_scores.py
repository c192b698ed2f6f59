"""How much each compressed entry matters to a query: the indexer's scores.

`I_j = sum over heads of relu(q_h . k_j) * w_h`. Bfloat16 inputs round at each step, as the released
reference does (architecture spec, §6.4); float32 inputs round nowhere.
"""

import torch
from torch import Tensor

from mdi_exec.ops.backend import select
from mdi_exec.ops.row_pool import RowPool

# Scores kept in float32 inside select a few other entries than rounded ones do.
TOPK_MIN_OVERLAP = 0.97
TOPK_MEAN_OVERLAP = 0.998


def index_scores_ref(q: Tensor, head_weights: Tensor, keys: RowPool, rows: Tensor) -> Tensor:
    gathered = keys.gather(rows).to(torch.float32)
    dots = torch.bmm(q.to(torch.float32), gathered.transpose(1, 2)).to(q.dtype)
    return (torch.relu(dots) * head_weights.unsqueeze(-1)).sum(dim=1)


def index_scores(q: Tensor, head_weights: Tensor, keys: RowPool, rows: Tensor) -> Tensor:
    """Score the entries whose keys stand in pool rows `rows` [T, M] for each query.

    q [T, H, d] and head_weights [T, H] in the activation dtype. Returns [T, M] in that dtype;
    the score of row -1 means nothing and must be masked by the caller.
    """
    return select(q, ref=index_scores_ref)(q, head_weights, keys, rows)
