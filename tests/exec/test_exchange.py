"""Experts on several ranks: the same logits, bit for bit, as one rank that holds them all."""

import pytest
import torch
import torch.distributed as dist

from mdi_exec.model.transformer import Transformer
from mdi_exec.model.weights import ExpansionBudget, Weights
from mdi_exec.numerics import Numerics
from mdi_exec.ops.routing import group_rows, group_tokens
from mdi_exec.ranks.collectives import Collectives, pack, pad_rows, unpack
from mdi_exec.ranks.exchange import (
    KINDS,
    NO_EXCHANGE,
    ExpertShard,
    NoExchange,
    make_exchange,
)
from mdi_exec.weights.checkpoint import open_checkpoint
from mdi_shared.errors import ConfigError
from tests.exec.engines import CHECKPOINT, report
from tests.exec.ranks import drive, run_ranks


def all_ways(token_map, modes):
    """On one rank: logits by numerics and kind, and the bytes each kind sent."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    checkpoint = open_checkpoint(CHECKPOINT)
    weights = Weights(checkpoint, budget=ExpansionBudget(1e9), shard=ExpertShard(rank, size))
    logits, sent = {}, {}
    for numerics in modes:
        model = Transformer(
            checkpoint.config, weights, token_map=token_map, numerics=numerics,
            exchange=make_exchange(KINDS[0], group),
        )  # fmt: skip
        for kind in KINDS:
            model.exchange = make_exchange(kind, group)
            announce = model.exchange.begin_step if kind == "all_to_all" else None
            logits[numerics.value, kind] = drive(model, rank, announce)
            sent[numerics.value, kind] = model.exchange.sent_bytes
    return {"logits": logits, "sent": sent}


@pytest.fixture(scope="module")
def two_ranks(token_map, tmp_path_factory):
    """What two ranks found; starting processes takes longer than what they do."""
    return run_ranks(2, two_ranks_job, tmp_path_factory.mktemp("ranks"), token_map)


def two_ranks_job(token_map):
    return {**all_ways(token_map, list(Numerics)), "moved": move_bytes()}


def test_two_ranks_compute_what_one_does(two_ranks, small_runners):
    require_equal_logits(two_ranks, list(Numerics), small_runners)


def test_four_ranks_compute_what_one_does(small_runners, token_map, tmp_path):
    modes = [Numerics.FLOAT32]
    found = run_ranks(4, all_ways, tmp_path, token_map, modes)
    require_equal_logits(found, modes, small_runners)


def require_equal_logits(found, modes, runners):
    for rank, got in enumerate(found):
        for numerics in modes:
            wanted = drive(runners[numerics].model, rank)
            for kind in KINDS:
                for step, (here, there) in enumerate(
                    zip(got["logits"][numerics.value, kind], wanted, strict=True)
                ):
                    assert torch.equal(here, there), f"rank {rank}, {numerics}, {kind}, step {step}"
    for numerics in modes:
        sent = {kind: sum(got["sent"][numerics.value, kind] for got in found) for kind in KINDS}
        report(f"{len(found)} ranks, {numerics.value}: bytes sent {sent}")
        assert sent["all_to_all"] < sent["all_gather"]


def move_bytes():
    """On one rank: what each collective returns for rows that name their origin."""
    wire = Collectives(dist.group.WORLD)
    rank, size = wire.rank, wire.size
    gathered = wire.all_gather(torch.full((2, 3), rank, dtype=torch.uint8))
    parts = torch.zeros(size * 2, 1, dtype=torch.uint8)
    parts[:2] = 200 * (rank == 1)  # rank 1 alone has something for rank 0
    counts = torch.arange(size, dtype=torch.int32).unsqueeze(1) + 10 * rank
    sent, received = wire.swap_counts(counts)
    # Rank r sends r rows to each; rank 0 sends nothing.
    swapped = wire.all_to_all(torch.full((rank * size, 1), rank, dtype=torch.uint8),
                              [rank] * size, list(range(size)))  # fmt: skip
    return gathered, wire.reduce_scatter(parts), sent, received, swapped, wire.sent_bytes


def test_collectives_move_rows(two_ranks):
    for rank, found in enumerate(two_ranks):
        gathered, part, sent, received, swapped, sent_bytes = found["moved"]
        assert gathered[:, 0].tolist() == [0, 0, 1, 1]
        assert part.flatten().tolist() == ([200, 200] if rank == 0 else [0, 0])
        assert (sent, received) == ([[10 * rank, 10 * rank + 1]], [[rank, 10 + rank]])
        assert swapped.flatten().tolist() == [1]
        assert sent_bytes == 6 + 2 + 4 + rank


def test_packed_rows_come_back():
    parts = [
        torch.randn(3, 2).to(torch.bfloat16),
        torch.tensor([[1], [-1], [2**31 - 1]], dtype=torch.int32),
        torch.randn(3, 5).to(torch.float8_e4m3fn),
    ]  # fmt: skip
    for rows in (3, 1, 0):
        found = unpack(pack(*parts)[:rows], *parts)
        for here, there in zip(found, parts, strict=True):
            assert here.dtype == there.dtype
            assert torch.equal(here.to(torch.float32), there[:rows].to(torch.float32))
    ids = unpack(pad_rows(pack(parts[1]), 5), parts[1])[0]
    assert ids.flatten().tolist() == [1, -1, 2**31 - 1, -1, -1]


def test_rows_of_other_ranks_experts_are_in_no_tile():
    experts = torch.tensor([[0, 4], [2, 4], [4, 4], [0, 3]], dtype=torch.int32)  # 4: elsewhere
    x = torch.arange(4.0).view(4, 1)
    groups, rows = group_tokens(x, experts, 4, 16, some_elsewhere=True)
    assert rows.flatten().tolist() == [0, 3, 1, 3, 0, 1, 2, 2]
    assert all(part.dtype == torch.int32 for part in groups)
    assert groups.counts.tolist() == [2, 0, 1, 1]
    assert groups.offsets.tolist() == [0, 2, 2, 3, 4]
    assert groups.order.tolist() == [0, 6, 2, 7, 1, 3, 4, 5]
    assert groups.tile_expert.tolist() == [0, 2, 3, -1, -1][: len(groups.tile_expert)]
    everything = group_rows(experts.clamp(max=3), 4, 16)
    own, _ = group_tokens(x, experts.clamp(max=3), 4, 16, some_elsewhere=True)
    assert all(
        torch.equal(here[: len(there)], there) for here, there in zip(own, everything, strict=True)
    )


def test_one_rank_needs_no_group():
    assert make_exchange("all_gather", None) is NO_EXCHANGE
    assert isinstance(make_exchange("all_to_all", None), NoExchange)
    with pytest.raises(ConfigError, match=r"exchange.*'ring'.*all_gather, all_to_all"):
        make_exchange("ring", None)
