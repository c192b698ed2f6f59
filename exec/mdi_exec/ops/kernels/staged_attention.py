"""Sparse attention over keys that lie decoded in memory: for steps whose rows share many keys.

Results are bit for bit those of `sparse_attention.py`, which decodes keys for each query anew. A
block of three warpgroups serves queries one after another. The first scores key blocks and makes
probabilities of the scores; the second sums the left half of the values, the third the right half,
and both copy keys. The second sums while the first scores the next block, the third while the first
makes probabilities: the tensor cores shall always have work. Three key blocks are in use in turn,
and a query's heads pass through the same ring. Read next: `staged_block.py`, `staged_scores.py`,
`staged_sums.py`.
"""

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.kernels.attention_block import HEAD_TILE, THREADS, WARPGROUP
from mdi_exec.ops.kernels.attention_source import POWER_SOURCE
from mdi_exec.ops.kernels.jit import Sample, by_hand, compiled, multiprocessors
from mdi_exec.ops.kernels.staged_block import Plan, block_barriers, shared_memory
from mdi_exec.ops.kernels.staged_scores import score_blocks
from mdi_exec.ops.kernels.staged_source import STAGED_SOURCE
from mdi_exec.ops.kernels.staged_sums import sum_values


@by_hand("bounds", "barriers")
def staged_attention_program(heads, width, num_keys):
    """out [rows, heads, width]; see `attend_staged` for the inputs."""
    rows, pool_rows = T.dynamic("rows"), T.dynamic("pool_rows")

    @T.prim_func
    def kernel(
        q: T.Tensor((rows, heads, width), "bfloat16"),
        keys: T.Tensor((pool_rows, width), "bfloat16"),
        key_rows: T.Tensor((rows, num_keys), "int32"),
        sink: T.Tensor((heads,), "float32"),
        out: T.Tensor((rows, heads, width), "bfloat16"),
        workers: T.int32,
    ):
        with T.Kernel(workers, threads=THREADS) as worker:
            tiles = rows * -(-heads // HEAD_TILE)
            items = T.alloc_var("int32", init=(tiles - worker + workers - 1) // workers)
            plan = Plan(heads, width, num_keys, worker, workers, items)
            shared = shared_memory(plan)
            barriers = block_barriers()
            T.import_source(POWER_SOURCE + STAGED_SOURCE)
            tx = T.get_thread_binding()
            for i in T.unroll(-(-heads // THREADS)):
                if i * THREADS + tx < heads:
                    shared.sink[i * THREADS + tx] = sink[i * THREADS + tx]
            T.sync_threads()
            if tx < WARPGROUP:
                T.set_max_nreg(184, 1)
                score_blocks(key_rows, tx, plan, shared, barriers)
            elif tx < 2 * WARPGROUP:
                T.set_max_nreg(160, 0)
                sum_values(q, keys, key_rows, out, tx - WARPGROUP, 0, plan, shared, barriers)
            else:
                T.set_max_nreg(160, 0)
                sum_values(q, keys, key_rows, out, tx - 2 * WARPGROUP, 1, plan, shared, barriers)

    return kernel


def attend_staged(q: Tensor, keys: Tensor, key_rows: Tensor, sink: Tensor) -> Tensor:
    rows, heads, width = q.shape
    out = torch.empty_like(q)
    if rows:
        run = compiled(staged_attention_program, heads, width, key_rows.shape[1])
        tiles = rows * -(-heads // HEAD_TILE)
        run(q, keys, key_rows, sink, out, min(tiles, multiprocessors(q.device)))
    return out


SAMPLES = tuple(
    Sample(staged_attention_program, sizes, ("sm_90a",))
    for sizes in ((64, 512, 640), (64, 512, 128), (8, 64, 160), (8, 64, 128))
)
