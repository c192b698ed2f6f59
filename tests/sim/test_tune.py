"""Tuning: a setting that must win wins, a gain within the model's error is none, and no luck."""

from dataclasses import dataclass, replace

import pyarrow as pa
import pytest

from mdi_analysis import SLO
from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.linear import PREFILL_TERMS, DecodeTerms, LinearCost, PrefillTerms
from mdi_shared.cost.shape import TINY
from mdi_shared.cost.step_cost import HostCost
from mdi_shared.cost.work import decode_work, prefill_work
from mdi_shared.describe_run import describe_run
from mdi_shared.errors import ConfigError, DeadlockError, MiniDeepInferError
from mdi_sim.search import tune as tune_module
from mdi_sim.search.model_error import ModelError, held_out_error, unfit_kinds
from mdi_sim.search.settings import changes_of, coarse_grid, neighbours
from mdi_sim.search.tuning import Gain, Measured, Range, Trial, Tuning
from mdi_traces.requests import build_requests
from mdi_traces.schema import Metadata
from minideepinfer.tuned import measure, tune

BASE = SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=32, max_model_len=8_192,
                       num_blocks=2_048)  # fmt: skip
WIDE = {name: (0, 10**12) for name in PREFILL_TERMS[1:]}


def model(*, step_ms=0.0, row_us=1.0, decode_ms=2.0, error=0.02, usable=True):
    """A step-time model with the held-out error of a fitted one."""
    terms = dict.fromkeys(PREFILL_TERMS, 0.0) | {"const": step_ms * 1e6, "rows": row_us * 1e3}
    part = {"held_out_mape": error, "usable_for_control": usable}
    return LinearCost(
        prefill=PrefillTerms(**terms),
        decode=DecodeTerms(const=decode_ms * 1e6, rows=0.0, sum_k=0.0, n_seqs=0.0),
        prefill_ranges=WIDE,
        decode_ranges={"rows": (1, 4), "sum_k": (0, 10**9), "n_seqs": (0, 10**9)},
        host=HostCost(),
        fit={"prefill": dict(part), "decode": dict(part)},
    )


def work(count=40, *, prompt=3_000, output=3, gap_ms=0):
    """Equal requests, `gap_ms` apart."""
    return build_requests(
        {
            "arrival_ns": pa.array([i * gap_ms * 1_000_000 for i in range(count)], pa.int64()),
            "prompt_len": pa.array([prompt] * count, pa.int32()),
            "output_len": pa.array([output] * count, pa.int32()),
        },
        Metadata(table="requests", source="generator"),
    )


@pytest.fixture(scope="module")
def dear_steps():
    """20 ms for each prefill step whatever its rows: long chunks must win."""
    return tune(work(), cost=model(step_ms=20.0), shape=TINY, scheduler=BASE)


def test_long_chunks_win_where_a_step_is_dear(dear_steps):
    changed = changes_of(BASE, dear_steps.best.config)
    chunk = changed.get("max_num_batched_tokens", 512)
    assert chunk >= 2_048
    assert dear_steps.is_beyond_error
    assert dear_steps.gain.metric == "tokens_s"
    assert dear_steps.gain.value > 0.5
    assert 0 < dear_steps.gain.low < dear_steps.gain.value < dear_steps.gain.high
    assert dear_steps.gain.alike[0] == pytest.approx(dear_steps.gain.alike[1], rel=0.05)


def test_the_best_has_no_better_neighbour_among_the_trials(dear_steps):
    tokens = [trial.measured.tokens_s for trial in dear_steps.trials]
    assert dear_steps.best.measured.tokens_s >= 0.999 * max(tokens)
    tried = {trial.config for trial in dear_steps.trials}
    moves = neighbours(BASE, dear_steps.best.config, 2**0.5)
    assert moves
    assert tried.issuperset(moves)
    assert len(tried) == len(dear_steps.trials) <= 64


def test_steps_outside_the_model_are_counted_in_a_note(dear_steps):
    assert any("steps of the best setting lie outside" in note for note in dear_steps.notes)


def test_an_interval_wins_that_lets_a_prompt_in_at_once():
    """70 decode steps of 5 ms between two attempts are too long for a bound of 100 ms."""
    found = tune(work(60, prompt=50, output=40, gap_ms=40), cost=model(decode_ms=5.0), shape=TINY,
                 scheduler=BASE, slo=SLO(ttft_ms=100.0), trials=40)  # fmt: skip
    assert found.best.config.prefill_attempt_interval <= 8
    assert set(changes_of(BASE, found.best.config)) == {"prefill_attempt_interval"}, "no more"
    assert found.gain.metric == "goodput"
    assert found.best.measured.goodput > 0.95
    assert found.default.measured.goodput < 0.6
    assert found.is_beyond_error


def test_a_gain_within_the_models_error_is_no_difference():
    """Time is proportional to rows: no chunk size is better, the rest is host time."""
    cost = model(row_us=50.0, decode_ms=3.0, error=0.05)
    found = tune(work(12), cost=cost, shape=TINY, scheduler=BASE, trials=20)
    assert 0 <= found.gain.value < 0.05
    assert found.is_beyond_error is False
    assert found.gain.low < 0 < found.gain.high


def test_a_model_without_a_stated_error_leaves_the_verdict_open():
    cost = replace(model(step_ms=20.0), fit={})
    found = tune(work(8), cost=cost, shape=TINY, scheduler=BASE, trials=6)
    assert found.gain.value > 0
    assert found.is_beyond_error is None
    assert found.best_range is None


def test_equal_runs_and_any_number_of_processes_find_the_same():
    pytest.importorskip("joblib")
    runs = [
        tune(work(8), cost=model(step_ms=5.0), shape=TINY, scheduler=BASE, trials=9, seed=seed,
             jobs=jobs)
        for seed, jobs in ((3, 1), (3, 2), (4, 1))
    ]  # fmt: skip
    assert runs[0] == runs[1]
    assert [t.config for t in runs[0].trials] != [t.config for t in runs[2].trials]


def test_an_interrupted_search_keeps_what_it_has():
    seen = []

    def interrupt_third(count):
        seen.append(count)
        if len(seen) == 3:
            raise KeyboardInterrupt

    found = tune(work(8), cost=model(step_ms=20.0), shape=TINY, scheduler=BASE,
                 on_trial=interrupt_third)  # fmt: skip
    assert found.interrupted
    assert len(found.trials) == 3
    assert found.best_range is None
    with pytest.raises(KeyboardInterrupt):
        tune(work(8), cost=Interrupting(), shape=TINY, scheduler=BASE)


class Interrupting:
    """Is interrupted in the very first trial."""

    host = HostCost()

    def device_ns(self, work):
        raise KeyboardInterrupt

    def describe(self):
        return {"kind": "interrupting"}


def test_a_model_unfit_for_control_gets_no_cost_targets_and_a_note():
    unfit = model(step_ms=20.0, error=0.3, usable=False)
    grid = coarse_grid(describe_run(scheduler=BASE, shape=TINY, cost=unfit), 1_000)
    assert {config.chunk_policy for config in grid} == {"token_budget"}
    fit_grid = coarse_grid(
        describe_run(scheduler=BASE, shape=TINY, cost=model(step_ms=20.0)), 1_000
    )
    assert {c.prefill_target_ms for c in fit_grid} == {None, 20.1, 20.3, 20.5}
    found = tune(work(6), cost=unfit, shape=TINY, scheduler=BASE, trials=4)
    assert unfit_kinds(unfit) == ("prefill", "decode")
    assert sum("too large to choose settings by" in note for note in found.notes) == 2


def test_settings_stay_within_what_the_default_allows():
    for config in coarse_grid(describe_run(scheduler=BASE, shape=TINY, cost=model()), 1_000):
        assert config.max_num_seqs <= BASE.max_num_seqs
        assert config.max_num_batched_tokens <= 4 * BASE.max_num_batched_tokens
        assert config.max_num_batched_tokens >= config.max_num_seqs
    top = replace(BASE, max_num_batched_tokens=4 * 512, prefill_attempt_interval=100)
    for config in neighbours(BASE, top, 2.0):
        assert config.max_num_seqs <= BASE.max_num_seqs
        assert config.max_num_batched_tokens <= 4 * 512
        assert config.prefill_attempt_interval <= 100
        assert len(changes_of(top, config)) == 1


def test_scaled_step_times():
    error, own = ModelError(0.25, 0.5), model(row_us=1.0, decode_ms=2.0)
    cost = error.scale(own, slower=True)
    prefill, decode = prefill_work(TINY, [(1_000, 1_000, 1_000)]), decode_work(TINY, [10])
    assert cost.device_ns(prefill) == 1_250_000
    assert cost.device_ns(decode) == 3_000_000
    assert error.scale(own, slower=False).device_ns(prefill) == 800_000
    assert held_out_error(replace(model(), fit={"prefill": {"held_out_mape": None}})) is None


@dataclass(frozen=True)
class Number:
    """Stands for a config in hand-made trials."""

    n: int


def measured(tokens_s, ttft, tpot, goodput=None):
    return Measured(tokens_s, goodput, 1, 1, ttft, tpot, 1, None)


def test_the_front_holds_what_no_other_beats_in_everything():
    values = [(10, 5, 5), (12, 6, 5), (9, 6, 6), (10, 5, 5), (8, 1, 9), (7, None, None)]
    trials = tuple(Trial(Number(i), measured(*each)) for i, each in enumerate(values))
    trials += (Trial(Number(9), None, "stuck"),)
    found = Tuning("throughput", trials, trials[1], None, None, False, ())
    assert [trial.config.n for trial in found.pareto()] == [1, 0, 4, 5]


def test_the_gain_takes_the_worst_ends_of_both_ranges():
    default, best = Trial(Number(0), measured(100, 1, 1)), Trial(Number(1), measured(110, 1, 1))
    ranges = [Range(measured(a, 1, 1), measured(b, 1, 1)) for a, b in ((90, 105), (100, 115))]
    found = Tuning("throughput", (default, best), best, *ranges, False, ())
    gain = found.gain
    assert (gain.value, gain.low, gain.high) == pytest.approx((0.1, 100 / 105 - 1, 115 / 90 - 1))
    assert gain.alike == pytest.approx((115 / 105 - 1, 100 / 90 - 1))
    assert found.is_beyond_error is False


def test_equal_goodput_is_decided_and_told_by_throughput():
    default = Trial(Number(0), measured(100, 1, 1, goodput=1.0))
    best = Trial(Number(1), measured(120, 1, 1, goodput=1.0))
    found = Tuning("goodput", (default, best), best, None, None, False, ())
    assert found.gain == Gain("tokens_s", pytest.approx(0.2))


def test_when_nothing_can_run_the_error_says_why(monkeypatch):
    def stuck(*_, **__):
        raise DeadlockError("nothing runs", [("A", 3)])

    monkeypatch.setattr(tune_module, "simulate", stuck)
    with pytest.raises(MiniDeepInferError, match=r"no setting could run; .*A"):
        tune(work(2), cost=model(), shape=TINY, trials=2)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"jobs": 0}, "jobs = 0: must be at least 1"),
        ({"trials": 0}, "trials = 0: must be at least 1"),
        ({"objective": "speed"}, "objective = 'speed': must be one of throughput, goodput"),
        ({"ranks": 0}, "ranks = 0"),
    ],
)
def test_bad_options_are_one_line(options, text):
    with pytest.raises(ConfigError, match=text):
        tune_module.tune(work(2), measure=measure, shape=TINY, cost=model(), **options)
