"""Groups of ranks for tests: processes on this machine, joined by gloo."""

import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def run_ranks(size, job, folder: Path, *args) -> list:
    """Run `job(*args)` on every rank of a new group; returns what each rank's call returned.

    `job` is a module's function. A rank that fails ends the others and raises here.
    """
    mp.spawn(_rank, (size, job, str(folder), args), nprocs=size)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(size)]


def _rank(rank, size, job, folder, args):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank,
                            world_size=size)  # fmt: skip
    try:
        torch.save(job(*args), Path(folder) / f"rank{rank}.pt")
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        dist.destroy_process_group()
