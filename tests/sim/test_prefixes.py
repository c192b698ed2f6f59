"""Prefix reuse in simulated runs: what is hit, what it takes, and that all drivers decide alike."""

import random
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from pandas.testing import assert_frame_equal

from mdi_shared.cost.hardware import H200
from mdi_shared.cost.roofline import RooflineCost
from mdi_shared.cost.shape import V41_FLASH
from mdi_shared.cost.step_cost import ConstantCost
from mdi_shared.cost.tails import LAUNCHES_NS, copies_ns, state_bytes, tail_bytes
from mdi_sim.retrace import replay_recorded
from mdi_sim.simulate import simulate
from mdi_traces.check import check_run
from mdi_traces.columns import int_lists, ints, numbers
from mdi_traces.generate import generate_workload
from mdi_traces.requests import build_requests
from mdi_traces.schema import Metadata

COST = ConstantCost(prefill_ns=4_000_000, decode_ns=1_000_000)
ON = {"enable_prefix_cache": True, "prefix_tails": 5_000, "num_blocks": 20_000,
      "max_model_len": 20_000}  # fmt: skip


def tree(count, gap_ns, seed=3):
    """Prompts that follow a random tree of blocks of 512 tokens, and end in a partial one."""
    dice, paths, ids, prompts = random.Random(seed), [[]], [], []
    for number in range(count):
        path = list(dice.choice(paths))
        path = path[: dice.randint(0, len(path))] + [
            8 * number + depth for depth in range(dice.randint(0, 4))
        ]
        paths.append(path)
        ids.append([*path, 2**41 + number])
        prompts.append(512 * len(path) + dice.randint(1, 511))
    columns = {
        "arrival_ns": numbers(np.arange(count) * gap_ns, pa.int64()),
        "prompt_len": numbers(np.array(prompts), pa.int32()),
        "output_len": numbers(np.array([dice.randint(1, 9) for _ in prompts]), pa.int32()),
        "hash_ids": int_lists(ids),
    }
    return build_requests(columns, Metadata(table="requests", source="import", hash_block_size=512))


def hits(run):
    return ints(run.requests_table["hit_tokens"]).tolist()


def test_an_unlimited_cache_hits_what_an_independent_count_says():
    """One after the other, a request finds the deepest cut at which one before it has left a tail.

    Those are the ends of prompts, in full blocks, and where a prompt has left what was known.
    """
    trace = tree(150, gap_ns=10**9)
    run = simulate(trace, scheduler=ON, cost=COST)
    known, tails, expected = set(), set(), []
    for ids, prompt in zip(
        trace.table["hash_ids"].to_pylist(), ints(trace.table["prompt_len"]).tolist(), strict=True
    ):
        path = [tuple(ids[: depth + 1]) for depth in range(prompt // 512)]
        seen = 0
        while seen < len(path) and path[seen] in known:
            seen += 1
        usable = max((depth + 1 for depth in range(seen) if path[depth] in tails), default=0)
        expected.append((512 * usable, 512 * seen))
        known |= set(path)
        tails |= {path[seen - 1]} if seen > usable else set()
        tails |= {path[-1]} if path else set()
    assert sum(hit > 0 for hit, _ in expected) > 30
    assert list(zip(hits(run), ints(run.requests_table["known_tokens"]).tolist(), strict=True)) == (
        expected
    )
    assert [finding for finding in check_run(run) if not finding.skipped] == []


@pytest.mark.parametrize("options", [{}, {"num_blocks": 120, "prefix_tails": 6}], ids=["", "tight"])
def test_steps_in_one_go_and_a_replay_decide_alike(options):
    trace = tree(120, gap_ns=20_000_000)
    options = {**ON, "max_model_len": 8_000, **options}
    run = simulate(trace, scheduler=options, cost=COST)
    single = simulate(trace, scheduler=options, cost=COST, fast_forward=False)
    assert sum(hits(run)) > 0
    assert_frame_equal(run.steps, single.steps)
    assert_frame_equal(run.requests, single.requests)
    again = replay_recorded(run)
    names = ("kind", "n_tokens", "n_seqs", "free_blocks", "n_restored", "n_saved")
    assert again.steps_table.select(names).equals(run.steps_table.select(names))
    assert hits(again) == hits(run)


def test_turns_of_a_session_hit_what_was_said_before():
    trace = generate_workload("chat-sessions", num_requests=300, seed=1)
    run = simulate(trace, scheduler={**ON, "max_model_len": 60_000}, cost=COST)
    turns, hit = trace.frame(), np.array(hits(run))
    said = turns.groupby("session_id").apply(
        lambda turn: (turn.prompt_len + turn.output_len).shift()
    )
    said = said.reset_index(0, drop=True).reindex(turns.index).fillna(0).to_numpy().astype(int)
    assert (hit <= said).all()
    assert hit.sum() > 0.9 * (said // 128 * 128).sum() > 0


def test_without_ids_and_sessions_nothing_changes():
    trace = generate_workload("azure-conv", num_requests=60, seed=1)
    off = {name: value for name, value in ON.items() if "prefix" not in name}
    on, plain = (simulate(trace, scheduler=each, cost=COST) for each in (ON, off))
    copies = ["n_restored", "n_saved"]
    assert (on.steps["n_restored"] == 0).all()
    assert sum(hits(on)) == 0
    assert plain.steps[copies].isna().all(axis=None)
    assert_frame_equal(on.steps.drop(columns=copies), plain.steps.drop(columns=copies))


# ---- what it takes -------------------------------------------------------------------------------


def test_a_tail_of_the_released_model_takes_half_under_bounded_replay():
    whole = replace(V41_FLASH, replay_keep_tokens=0)
    half = replace(V41_FLASH, replay_keep_tokens=140)
    assert tail_bytes(whole) == 40 * 67_584
    assert tail_bytes(half) == 20 * 67_584
    assert state_bytes(whole, 10, 0) == 10 * whole.state_bytes_per_slot
    assert state_bytes(whole, 10, 3) == state_bytes(whole, 10, 0) + 13 * 40 * 67_584


def test_copies_add_to_the_step_they_come_before():
    shape = replace(V41_FLASH, replay_keep_tokens=0)
    cost = RooflineCost(H200, shape, ep=8)
    moved_ns = 2 * tail_bytes(shape) / (H200.hbm_bytes_per_s * cost.efficiencies.memory) * 1e9
    assert copies_ns(shape, cost, 2) == pytest.approx(2 * (LAUNCHES_NS + moved_ns), abs=2)
    assert copies_ns(shape, COST, 2) == 0
    trace = tree(8, gap_ns=10**9)
    run = simulate(trace, scheduler=ON, cost=cost, shape=shape, ranks=1)
    steps = run.steps.query("n_saved + n_restored > 0")
    assert len(steps)
    idle = steps.query("n_seqs == 0")
    if len(idle):
        took = (idle["t_dev_end"] - idle["t_dev_start"]).to_numpy()
        count = (idle["n_saved"] + idle["n_restored"]).to_numpy()
        assert (took == [copies_ns(shape, cost, int(each)) for each in count]).all()
