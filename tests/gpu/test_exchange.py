"""Experts on several GPUs, through NCCL: the same logits, bit for bit, as on one GPU."""

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mdi_exec.model.transformer import Transformer
from mdi_exec.model.weights import ExpansionBudget, Weights
from mdi_exec.ranks.exchange import KINDS, ExpertShard, make_exchange
from mdi_exec.weights.checkpoint import open_checkpoint
from tests.exec.conftest import GOLDEN
from tests.exec.engines import CHECKPOINT
from tests.exec.ranks import drive, run_ranks

GPUS = 2


def one_rank(token_map):
    """On one GPU: every rank's logits."""
    model = tiny_model(token_map, ExpertShard())
    return [[logits.cpu() for logits in drive(model, rank)] for rank in range(GPUS)]


def all_kinds(token_map):
    """On one GPU of several: its rank's logits by kind of exchange."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows_group = dist.new_group(backend="gloo")
    exchanges = {
        kind: make_exchange(kind, dist.group.WORLD, rows_group=rows_group) for kind in KINDS
    }
    model = tiny_model(token_map, ExpertShard(rank, size), exchanges[KINDS[0]])
    found = {}
    for kind, exchange in exchanges.items():
        model.exchange = exchange
        drive(model, rank)  # compiles
        found[kind] = [logits.cpu() for logits in drive(model, rank)]
    return found


def tiny_model(token_map, shard, *exchange):
    checkpoint = open_checkpoint(CHECKPOINT)
    weights = Weights(checkpoint, "cuda", budget=ExpansionBudget(1e9, True), shard=shard)
    options = {"exchange": exchange[0]} if exchange else {}
    return Transformer(checkpoint.config, weights, token_map=token_map, **options)


@pytest.mark.skipif(
    torch.cuda.device_count() < GPUS,
    reason=f"needs {GPUS} CUDA GPUs; docs/gpu-testing.md has the command",
)
def test_gpus_compute_what_one_does(tmp_path):
    token_map = load_file(GOLDEN / "layers" / "engram_hash.safetensors")["token_map"]
    (tmp_path / "one").mkdir()
    (wanted,) = run_ranks(1, one_rank, tmp_path / "one", token_map, backend="nccl")
    for rank, found in enumerate(run_ranks(GPUS, all_kinds, tmp_path, token_map, backend="nccl")):
        for kind in KINDS:
            for step, (here, there) in enumerate(zip(found[kind], wanted[rank], strict=True)):
                assert torch.equal(here, there), f"rank {rank}, {kind}, step {step}"
