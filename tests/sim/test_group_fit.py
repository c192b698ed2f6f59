"""What a group adds: simulated when a model says so, and found again from a group's step times."""

from dataclasses import replace

import numpy as np
import pytest

from mdi_shared.cost.group import FITTED, GroupCost, GroupTerms, assumed_group_cost
from mdi_shared.cost.hardware import H200
from mdi_shared.cost.linear import LinearCost
from mdi_shared.cost.roofline import Efficiencies, RooflineCost
from mdi_shared.cost.shape import V41_FLASH
from mdi_shared.cost.work import prefill_work
from mdi_shared.errors import ConfigError, TraceError
from mdi_sim.fit.calibrate import calibrate
from mdi_sim.fit.group import (
    calibrate_group,
    fit_group_terms,
    gather_group_steps,
    predict_group,
)
from mdi_sim.simulate import simulate
from mdi_traces.columns import ints
from tests.sim.recorded import CONFIG, TRUTH, requests, with_columns

ADDED = GroupCost(
    ranks=2,
    prefill=GroupTerms(const=3e6, own=0.8, rows=2_500.0),
    decode=GroupTerms(const=1.5e6, own=0.9, rows=1e5),
    basis={"kind": FITTED},
)
BASE = replace(TRUTH, fit={"hardware": None, "model": V41_FLASH.name})


def group_run(*, sigma=0.0, cost=None, ranks=2, seed=0):
    """Simulate ranks whose steps take what ADDED says, each group step off by a random factor."""
    cost = replace(BASE, group=ADDED) if cost is None else cost
    run = simulate(requests(seed=seed), scheduler=CONFIG, cost=cost, ranks=ranks)
    steps = run.steps_table
    dice = np.random.default_rng(seed)
    factor = np.exp(sigma * dice.standard_normal(1 + int(ints(steps["step"]).max())))
    start = ints(steps["t_dev_start"])
    took = (ints(steps["t_dev_end"]) - start) * factor[ints(steps["step"])]
    return type(run)(with_columns(steps, t_dev_end=start + took.astype(np.int64)),
                     run.requests_table, run.metadata, run.items_table)  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    prefix = tmp_path_factory.mktemp("runs") / "group"
    group_run(sigma=0.02).save(prefix)
    return prefix


def test_a_group_step_takes_what_its_terms_say():
    steps = gather_group_steps([group_run().steps_table], "prefill", BASE, 2)
    expected = 3e6 + 0.8 * steps.own_ns + 2_500.0 * steps.rows
    assert steps.ns == pytest.approx(expected, abs=2)
    assert len(np.unique(steps.rows)) > 5


def test_without_terms_it_takes_what_the_slowest_rank_does():
    steps = gather_group_steps([group_run(cost=BASE).steps_table], "decode", BASE, 2)
    assert steps.ns == pytest.approx(steps.own_ns, abs=2)


def test_a_group_of_one_exchanges_nothing():
    trace = requests(20)
    told = replace(BASE, group=ADDED)
    alone, again = (simulate(trace, scheduler=CONFIG, cost=cost).steps for cost in (BASE, told))
    assert again["t_dev_end"].equals(alone["t_dev_end"])


def test_known_terms_are_found_again():
    tables = [group_run(seed=seed).steps_table for seed in range(2)]
    for kind in ("prefill", "decode"):
        steps, truth = gather_group_steps(tables, kind, BASE, 2), getattr(ADDED, kind)
        terms, dropped = fit_group_terms(steps)
        assert terms.const == pytest.approx(truth.const, rel=0.02)
        assert terms.own == pytest.approx(truth.own, rel=0.02)
        assert terms.rows == pytest.approx(truth.rows, rel=0.02)
        assert dropped == {}


def test_errors_on_held_out_shapes_are_those_of_the_noise(saved):
    """Noise blurs how a time splits into terms more than the time they give together."""
    group = calibrate_group([saved], BASE).group
    assert group.ranks == 2
    steps = gather_group_steps([group_run(seed=5).steps_table], "prefill", BASE, 2)
    assert predict_group(group.prefill, steps) == pytest.approx(steps.ns, rel=0.02)
    for kind in ("prefill", "decode"):
        # The mean absolute value of a normal variable of standard deviation 2 % is 1.6 %.
        assert group.basis[kind]["held_out"]["mape"] == pytest.approx(0.016, abs=0.005)


def test_the_file_gives_the_group_back(saved):
    cost = calibrate_group([saved], BASE)
    again = LinearCost.from_json(cost.to_json())
    assert again.group == cost.group
    assert again == cost
    assert "group" not in BASE.to_json()


def test_own_time_that_never_varies_counts_as_it_is():
    steps = gather_group_steps([group_run().steps_table], "prefill", BASE, 2)
    flat = replace(steps, own_ns=np.full(len(steps), 5e6), ns=6e6 + 5e6 + 3_000.0 * steps.rows)
    terms, dropped = fit_group_terms(flat)
    assert terms.own == 1.0
    assert terms.rows == pytest.approx(3_000.0, rel=0.02)
    assert set(dropped) == {"own"}


def test_an_assumed_exchange_is_the_rooflines():
    found = assumed_group_cost(H200, V41_FLASH, 4)
    work = prefill_work(V41_FLASH, [(4_096, 4_096, 4_096)])  # every row in every layer
    link = RooflineCost(H200, V41_FLASH, ep=4).explain(work)["exchange"].ns
    fixed = V41_FLASH.num_hidden_layers * Efficiencies().overhead_ns_per_layer
    assert found.device_ns([0] * 4, [work] * 4) == pytest.approx(link + fixed, rel=1e-4)
    with pytest.raises(ConfigError, match=r"ep = 5: must divide"):
        assumed_group_cost(H200, V41_FLASH, 5)


def test_runs_that_do_not_fit_are_refused(saved, tmp_path):
    with pytest.raises(TraceError, match=r"several ranks.*--base"):
        calibrate([saved])
    simulate(requests(10), cost=BASE).save(tmp_path / "one")
    with pytest.raises(TraceError, match="is of one rank"):
        calibrate_group([tmp_path / "one"], BASE)
    with pytest.raises(ConfigError, match=r"model = 'v41-flash'.*differs from 'tiny'"):
        calibrate_group([saved], replace(BASE, fit={"model": "tiny"}))
    three = replace(BASE, group=replace(ADDED, ranks=3))
    group_run(cost=three, ranks=3).save(tmp_path / "three")
    with pytest.raises(ConfigError, match=r"ranks = 3: of three differs from 2 of group"):
        calibrate_group([saved, tmp_path / "three"], BASE)


@pytest.mark.parametrize(("change", "message"), [
    ({"ranks": 1}, r"group.ranks = 1: must be at least 2"),
    ({"prefill": {"const": -1.0, "own": 1.0, "rows": 0.0}}, r"group.const = -1.0"),
    ({"decode": {"const": 0.0, "own": 1.0}}, r"group.decode.rows = None: is missing"),
    ({"basis": {}}, r"group.basis.kind = None: must be 'fitted' or 'assumed'"),
])  # fmt: skip
def test_a_file_edited_into_nonsense_is_refused(change, message):
    data = {**BASE.to_json(), "group": {**ADDED.to_json(), **change}}
    with pytest.raises(ConfigError, match=message):
        LinearCost.from_json(data)
