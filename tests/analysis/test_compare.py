"""Comparison: identical plans, the first difference, paired and unpaired step times."""

import io
import json

import pandas as pd
import pytest
from rich.console import Console

from mdi_analysis import SLO, compare, compare_plans
from mdi_shared.errors import ConfigError

MS = 1_000_000


def slower(run, factor):
    start = run.steps["t_dev_start"]
    end = start + (run.steps["t_dev_end"] - start) * factor
    return run.but(steps=run.steps.assign(t_dev_end=end))


def test_a_run_equals_itself(run):
    found = compare(run, run)
    assert found.plans.identical
    assert str(found.plans) == "identical for 5 steps (compared: step rows and items)"
    assert found.latency["ttft_ms"]["mean"].relative == 0
    assert found.kinds["prefill"].paired
    assert (found.kinds["prefill"].error.n, found.kinds["prefill"].error.max) == (2, 0)


def test_paired_steps_give_the_error_of_each(run):
    found = compare(run, slower(run, 1.5)).kinds["decode"]
    assert (found.count.a, found.count.b, found.count.relative) == (3, 3, 0)
    assert (found.device_total_ms.a, found.device_total_ms.b) == (6, 9)
    assert found.error.p50 == pytest.approx(0.5)
    assert found.bias == pytest.approx(0.5)


def test_step_times_and_host_times_are_compared_by_percentile(run):
    late = run.steps.assign(
        t_dev_start=run.steps["t_dev_start"] + MS // 2, t_launch=run.steps["t_launch"] + MS // 4
    )
    found = compare(run, run.but(steps=late))
    decode = found.kinds["decode"].device_ms["mean"]
    assert (decode.a, decode.b) == (2, 1.5)
    gap = found.host["gap_ms"]["p50"]  # before steps 1 to 4: 2 ms each
    assert (gap.a, gap.b) == (2, 2.5)
    plan = found.host["plan_ms"]["p90"]
    assert (plan.a, plan.b) == (1, 1.25)
    assert found.host["visible_ms"]["p50"].a == 1
    assert found.host["turn_ms"]["p50"].a == 4


def test_relative_difference_has_a_sign(run):
    faster = run.requests.assign(t_first_token=run.requests["t_first_token"] - 2 * MS)
    pair = compare(run, run.but(requests=faster)).latency["ttft_ms"]["mean"]
    assert (pair.a, pair.b) == (18.5, 16.5)
    assert pair.relative == pytest.approx(-2 / 18.5)


def test_row_order_does_not_matter(run, two_ranks):
    assert compare_plans(run, run.but(steps=run.steps.iloc[::-1])).identical
    turned = two_ranks.but(steps=two_ranks.steps.iloc[::-1])
    assert compare_plans(two_ranks, turned).identical_steps == 10


def test_times_are_no_decisions(run):
    late = run.but(steps=run.steps.assign(t_done=run.steps["t_done"] + 5, free_blocks=1))
    assert compare_plans(run, late).identical


def test_kind_differs_first(run):
    kinds = ["prefill", "prefill", "decode", "prefill", "decode"]
    found = compare_plans(run, run.but(steps=run.steps.assign(kind=kinds)))
    assert (found.identical_steps, found.difference.step, found.difference.rank) == (3, 3, 0)
    assert (found.difference.what, found.difference.a, found.difference.b) == (
        "kind", "decode", "prefill",
    )  # fmt: skip


def test_items_differ_where_step_rows_agree(run):
    items = run.items.astype({"req_id": str})
    items.loc[2, "req_id"] = "r9"
    found = compare_plans(run, run.but(items=items))
    assert (found.identical_steps, found.difference.step, found.difference.what) == (1, 1, "items")
    assert found.difference.a == "r1 q=56 k=56 last chunk"
    assert found.difference.b == "r9 q=56 k=56 last chunk"
    assert "differs in items: r1 q=56" in str(found)


def test_order_inside_a_step_is_a_decision(run):
    swapped = run.items.iloc[[0, 2, 1, *range(3, 9)]]
    assert compare_plans(run, run.but(items=swapped)).difference.step == 1


def test_without_items_step_rows_decide_and_the_answer_says_so(run):
    found = compare_plans(run, run.but(items=None))
    assert found.identical
    assert found.basis == "step rows"
    steps = run.steps.assign(n_tokens=[128, 127, 2, 2, 2])
    found = compare_plans(run, run.but(steps=steps, items=None)).difference
    assert (found.step, found.what, found.a, found.b) == (1, "n_tokens", "128", "127")


def test_missing_end_is_a_difference(run):
    short = run.but(steps=run.steps.iloc[:4], items=run.items.iloc[:7])
    found = compare_plans(run, short)
    assert (found.identical_steps, found.difference.step) == (4, 4)
    assert (found.difference.a, found.difference.b) == ("there", "missing")
    assert compare_plans(short, run).difference.b == "there"


def test_missing_rank_is_a_difference(run, two_ranks):
    found = compare_plans(two_ranks, run).difference
    assert (found.step, found.rank, found.a, found.b) == (0, 1, "there", "missing")


def test_differing_plans_compare_distributions(run):
    more = pd.concat([run.steps, run.steps.iloc[4:].assign(step=5)], ignore_index=True)
    found = compare(run, slower(run.but(steps=more, items=None), 2.0)).kinds["decode"]
    assert not found.paired
    assert (found.count.a, found.count.b) == (3, 4)
    assert found.error.n == 99
    assert found.error.p50 == pytest.approx(1.0)


def test_kind_of_one_run_only(run):
    kinds = ["prefill", "prefill", "decode", "decode", "flush"]
    found = compare(run, run.but(steps=run.steps.assign(kind=kinds), items=None)).kinds["flush"]
    assert (found.count.a, found.count.b, found.count.relative) == (0, 1, None)
    assert (found.error.n, found.bias) == (0, None)


def test_empty_runs_compare(run, nothing):
    assert compare(nothing, nothing).plans.identical
    found = compare(run, nothing)
    assert found.latency["ttft_ms"]["mean"].b is None
    assert found.rates["requests_s"].relative is None
    assert found.plans.identical_steps == 0


def test_dict_is_json_and_table_names_both_runs(run, nothing):
    data = compare(run, nothing).to_dict()
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert data["plans"]["identical"] is False
    console = Console(file=io.StringIO(), width=80)
    console.print(compare(run, slower(run, 1.1), names=("recorded", "model [x]")).table())
    shown = console.file.getvalue()
    assert "recorded" in shown
    assert "model [x]" in shown
    assert "+10.0%" in shown
    assert "…" not in shown


def test_goodput_is_compared_under_an_slo(run):
    late = run.but(requests=run.requests.assign(t_first_token=run.requests["t_last_token"]))
    rates = compare(run, late, slo=SLO(ttft_ms=22)).rates
    assert (rates["goodput_share"].a, rates["goodput_share"].b) == (0.5, 0)
    assert "goodput_share" not in compare(run, late).rates


def test_names_must_differ(run):
    with pytest.raises(ConfigError, match=r"names = .*: must be two different names"):
        compare(run, run, names=("a", "a"))
