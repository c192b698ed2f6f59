"""Groups of ranks for tests: processes on this machine, and what each of them runs."""

import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file

from mdi_exec.model.batch import Batch, BatchItem
from mdi_exec.model.cache import CacheLayout, DeviceCache
from mdi_exec.ranks.exchange import StepRows
from tests.exec.conftest import GOLDEN, blocks_for

# One prompt a rank, as (q, k) of its steps: long chunks beside a single row, then decoding.
STEPS = (
    [(100, 100), (50, 150)],
    [(1, 1), (1, 2)],
    [(37, 37), (1, 38)],
    [(64, 64), (3, 67)],
)
# The same with bounded replay: ranks whose rows are all cut, some of them, none; all at once last.
KEEP = 128
CUT_STEPS = (
    [(140, 140), (160, 300), (10, 10)],
    [(10, 10), (10, 20), (5, 5)],
    [(100, 100), (190, 290), (1, 1)],
    [(250, 250), (40, 290), (7, 7)],
)
CUT_PROMPTS = ((300, 300), (20, 300), (290, 300), (290, 300))  # of the first two steps, the last


def drive(model, rank, announce=None):
    """Run a rank's steps; returns each one's logits. `announce` is called before every step."""
    ids = load_file(GOLDEN / "logits" / "p520.safetensors")["prompt_ids"]
    layout = CacheLayout(config=model.config, numerics=model.numerics)
    cache = DeviceCache(layout, num_blocks=10, num_slots=3, device=model.device)
    found = []
    for step, (q, k, prompt, keep) in enumerate(steps_of(rank)):
        if announce is not None:
            announce([step_rows(*steps_of(other)[step]) for other in range(model.exchange.size)])
        item = BatchItem(q, k, 2, blocks_for(512), q if prompt <= k else 0, prompt)
        batch = Batch.build([item], ids[k - q : k] + rank, model.device, replay_keep_tokens=keep)
        found.append(model.forward(batch, cache))
    return found


def steps_of(rank):
    cut = [(q, k, CUT_PROMPTS[rank][step == 2], KEEP)
           for step, (q, k) in enumerate(CUT_STEPS[rank])]  # fmt: skip
    return [(q, k, k, 0) for q, k in STEPS[rank]] + cut


def step_rows(q, k, prompt, keep) -> StepRows:
    kept_from = prompt - keep if keep else 0
    return StepRows(q, min(q, max(k - kept_from, 0)))


def run_ranks(size, job, folder: Path, *args, backend="gloo") -> list:
    """Run `job(*args)` on every rank of a new group; returns what each rank's call returned.

    With "nccl" each rank has a GPU of its own. `job` is a module's function. A rank that fails ends
    the others and raises here.
    """
    mp.spawn(_rank, (size, job, str(folder), args, backend), nprocs=size)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(size)]


def _rank(rank, size, job, folder, args, backend):
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank,
                            world_size=size)  # fmt: skip
    try:
        torch.save(job(*args), Path(folder) / f"rank{rank}.pt")
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        dist.destroy_process_group()
