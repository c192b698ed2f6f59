"""The laws hold on a sound run, and each is broken by the change it is there to catch."""

from dataclasses import replace

import pyarrow as pa
import pytest

from mdi_traces.check import Finding, check_run
from mdi_traces.io import read_table, write_parquet
from mdi_traces.laws import LAWS
from mdi_traces.run import Run, load_run

from .conftest import make_run


def test_a_sound_run_has_no_findings():
    assert check_run(make_run()) == []
    assert check_run(make_run(ranks=3)) == []
    assert check_run(make_run(config={})) == [], "pool sizes are then taken from the run"


BREAKS = [
    ("every_request_ends", "requests", 1, dict(requests={1: {"finish_reason": None}})),
    ("every_request_ends", "requests", 0, dict(requests={0: {"unfinished_reason": "end"}})),
    ("request_times_ascend", "requests", 1, dict(requests={1: {"t_first_token": 4}})),
    ("request_times_ascend", "requests", 0, dict(requests={0: {"t_finish": 489}})),
    ("request_times_ascend", "requests", 0, dict(requests={0: {"t_first_token": None}})),
    ("request_times_ascend", "requests", 2, dict(requests={2: {"t_submit": 6}})),
    ("step_times_ascend", "steps", 3, dict(steps={3: {"t_dev_end": 419}})),
    ("step_times_ascend", "steps", 0, dict(steps={0: {"t_sched": 111}})),
    ("schedule_times_ascend", "steps", 2, dict(steps={2: {"t_sched": 199}})),
    ("steps_have_no_gaps", "steps", 1, dict(steps={1: {"step": 2}})),
    ("steps_have_no_gaps", "steps", 4, dict(steps={4: {"step": 3}})),
    ("ranks_agree_on_phase", "steps", 2, dict(steps={7: {"kind": "idle_prefill"}}, ranks=2)),
    ("ranks_agree_on_phase", "steps", 2, dict(steps={7: {"kind": "idle_mixed"}}, ranks=2)),
    ("padding_only_adds", "steps", 2, dict(steps={2: {"n_tokens_padded": 1}})),
    ("memory_returns", "steps", 4, dict(left=(8, 4))),
    ("memory_returns", "steps", 4, dict(left=(9, 3))),
    ("memory_returns", "steps", 4, dict(left=(6, 4), config={})),
    ("items_belong", "items", 2, dict(items={2: {"req_id": "z"}})),
    ("items_belong", "items", 5, dict(items={5: {"step": 77}})),
    ("items_are_consistent", "items", 1, dict(items={1: {"cached": 3}})),
    ("items_are_consistent", "items", 0, dict(items={0: {"q": 0, "cached": 4}})),
    ("items_are_consistent", "items", 0, dict(items={0: {"emitted": 1}})),
    ("items_are_consistent", "items", 4, dict(items={4: {"emitted": 1}})),
    ("step_rows_match_items", "steps", 1, dict(steps={1: {"n_tokens": 3}})),
    ("step_rows_match_items", "steps", 3, dict(steps={3: {"n_seqs": 2}})),
    ("prompt_tokens_are_computed", "requests", 0, dict(requests={0: {"prompt_len": 7}})),
    ("prompt_tokens_are_computed", "requests", 1, dict(requests={1: {"cached_len": 0}})),
    ("prompt_tokens_are_computed", "requests", 0,
     dict(requests={0: {"n_recomputed_tokens": 2}})),
    ("hits_are_known", "requests", 0, dict(requests={0: {"hit_tokens": 2, "known_tokens": 1}})),
    ("output_tokens_are_emitted", "requests", 0, dict(requests={0: {"output_len": 2}})),
    ("output_tokens_are_emitted", "requests", 1, dict(items={2: {"emitted": 0}})),
]  # fmt: skip


@pytest.mark.parametrize(("law", "table", "row", "change"), BREAKS)
def test_each_law_names_its_first_broken_row(law, table, row, change):
    findings = [f for f in check_run(make_run(**change)) if f.law == law]
    assert [(f.table, f.row, f.skipped) for f in findings] == [(table, row, False)]


def test_every_law_is_broken_by_some_change():
    assert {law for law, *_ in BREAKS} | {"content_is_unchanged"} == set(LAWS)


def test_a_run_whose_values_changed_on_disk_is_told(tmp_path):
    make_run().save(tmp_path / "r")
    assert check_run(load_run(tmp_path / "r")) == []
    table, metadata = read_table(tmp_path / "r.steps.parquet", "steps")
    index = table.schema.get_field_index("n_tokens")
    other = pa.array([1] * len(table), pa.int32())
    table = table.set_column(index, table.schema.field(index), other)
    write_parquet(tmp_path / "r.steps.parquet", table, metadata)
    assert "content_is_unchanged" in {
        finding.law for finding in check_run(load_run(tmp_path / "r"))
    }


def test_a_request_recomputed_after_preemption():
    change = {0: {"n_recomputed_tokens": 2, "prompt_len": 4}}
    assert check_run(make_run(requests=change)) == []


def test_what_cannot_be_tested_is_skipped_by_name():
    run = make_run()
    bare = Run(run.steps_table, run.requests_table, run.metadata)
    findings = check_run(bare)
    assert [(f.law, f.skipped) for f in findings] == [
        (law, True) for law in (
            "items_belong", "items_are_consistent", "step_rows_match_items",
            "prompt_tokens_are_computed", "output_tokens_are_emitted",
        )
    ]  # fmt: skip
    assert str(findings[0]) == "items_belong: not tested: items: no items were recorded"


def test_memory_is_not_judged_without_its_end():
    unfinished = {1: {"finish_reason": None, "unfinished_reason": "time limit"}}
    (finding,) = check_run(make_run(requests=unfinished))
    assert (finding.law, finding.skipped) == ("memory_returns", True)
    assert "1 requests are unfinished" in finding.detail
    run = make_run()
    silent = Run(run.steps_table, run.requests_table, replace(run.metadata, config={}),
                 run.items_table)  # fmt: skip
    (finding,) = check_run(silent)
    assert (finding.law, finding.skipped) == ("memory_returns", True)
    assert "does not say what was free" in finding.detail


def test_findings_read_well():
    (finding,) = check_run(make_run(requests={0: {"output_len": 2}}))
    assert finding == Finding("output_tokens_are_emitted", "requests", 0, finding.detail)
    assert str(finding) == (
        "output_tokens_are_emitted: broken: requests row 0: output_len of request 'a' is 2, "
        "but the sum of emitted is 3"
    )


def test_an_empty_run_is_sound():
    run = make_run()
    empty = Run(run.steps_table.slice(0, 0), run.requests_table.slice(0, 0), run.metadata,
                run.items_table.slice(0, 0))  # fmt: skip
    assert check_run(empty) == []
