"""A run is three files that belong together."""

import pyarrow as pa
import pytest

from mdi_analysis import summarize
from mdi_shared.cost.shape import TINY
from mdi_shared.errors import TraceError
from mdi_sim.simulate import simulate
from mdi_traces import generate_workload, io, spread, tables
from mdi_traces import run as run_module
from mdi_traces.requests import RequestTrace, put_column
from mdi_traces.run import Run, load_run

from .conftest import make_run


@pytest.mark.parametrize(
    "ending", ["", ".parquet", ".items.parquet", ".steps.parquet", ".requests.parquet"]
)
def test_save_and_load_by_any_name(ending, tmp_path):
    run = make_run()
    written = run.save(tmp_path / "r.parquet")
    assert [p.name for p in written] == [
        "r.items.parquet", "r.steps.parquet", "r.requests.parquet"
    ]  # fmt: skip
    again = load_run(tmp_path / f"r{ending}")
    assert again.steps_table.equals(run.steps_table)
    assert again.requests_table.equals(run.requests_table)
    assert again.items_table.equals(run.items_table)
    assert again.metadata == run.metadata


@pytest.mark.parametrize("ending", ["items", "steps", "requests"])
def test_files_of_two_runs_with_equal_options_do_not_mix(ending, tmp_path):
    """As a kill between the renames of a save would leave them."""
    make_run().save(tmp_path / "r")
    make_run(requests={1: {"t_finish": 2**40}}).save(tmp_path / "other")
    assert load_run(tmp_path / "r").metadata == load_run(tmp_path / "other").metadata
    (tmp_path / f"other.{ending}.parquet").replace(tmp_path / f"r.{ending}.parquet")
    with pytest.raises(TraceError, match=r"r\.\w+\.parquet.*belong to different runs"):
        load_run(tmp_path / "r")


def test_a_run_saved_again_has_equal_bytes(tmp_path):
    make_run().save(tmp_path / "r")
    load_run(tmp_path / "r").save(tmp_path / "again")
    for ending in ("items", "steps", "requests"):
        first, second = (tmp_path / f"{name}.{ending}.parquet" for name in ("r", "again"))
        assert first.read_bytes() == second.read_bytes()


def test_without_items_an_older_items_file_goes_away(tmp_path):
    make_run().save(tmp_path / "r")
    make_run().save(tmp_path / "r", items=False)
    again = load_run(tmp_path / "r")
    assert again.items is None
    assert sorted(p.name for p in tmp_path.iterdir()) == ["r.requests.parquet", "r.steps.parquet"]


def test_items_are_made_once_and_only_when_asked_for():
    base, calls = make_run(), []

    def items() -> list[pa.Table]:
        calls.append(1)
        return [base.items_table.slice(0, 2), base.items_table.slice(2)]

    run = Run(base.steps_table, base.requests_table, base.metadata, items)
    assert not calls
    assert len(run.items) == len(run.items_table) == 6
    assert calls == [1]


def test_a_run_is_saved_in_pieces_as_it_is_as_a_whole(tmp_path, monkeypatch):
    """Nothing is held as a whole, and neither the tables nor the files show how they were cut."""
    monkeypatch.setattr(io, "_GROUP_ROWS", 300)
    work = generate_workload("azure-conv", num_requests=8, seed=1)
    whole = simulate(work, shape=TINY, ranks=2, scheduler={"prefill_attempt_interval": 1})
    assert len(list(whole.step_pieces())) == 2
    assert whole.steps_table["step"].num_chunks == 1
    whole.save(tmp_path / "whole")
    monkeypatch.setattr(tables, "_PIECE_STEPS", 100)
    monkeypatch.setattr(spread, "PORTION", 100)
    cut = simulate(work, shape=TINY, ranks=2, scheduler={"prefill_attempt_interval": 1})
    cut.save(tmp_path / "cut")
    assert not {"steps_table", "items_table"} & set(cut.__dict__)
    assert len(list(cut.step_pieces())) > 20
    for kind in ("steps", "items", "requests"):
        one, other = (tmp_path / f"{name}.{kind}.parquet" for name in ("whole", "cut"))
        assert one.read_bytes() == other.read_bytes()
    again = load_run(tmp_path / "cut")
    assert again.steps.equals(whole.steps)
    assert again.content == cut.content_hash() == whole.content_hash()


def test_frames_keep_integers_exact():
    run = make_run(requests={1: {"t_finish": 2**53 + 1}})
    assert run.requests["t_finish"].tolist() == [490, 2**53 + 1, 200]
    assert run.requests["t_first_token"].isna().tolist() == [False, False, True]
    assert str(run.steps["step"].dtype) == "int64"
    assert run.steps is run.steps
    assert list(run.steps["kind"]) == ["prefill", "prefill", "decode", "decode", "flush"]


def test_incomplete_runs(tmp_path, monkeypatch):
    with pytest.raises(TraceError, match=r"no\.requests\.parquet: not found"):
        load_run(tmp_path / "no")
    write = run_module.write_parquet

    def killed(path, table, metadata, **options):
        if metadata.table == "requests":
            raise KeyboardInterrupt
        write(path, table, metadata, **options)

    monkeypatch.setattr(run_module, "write_parquet", killed)
    with pytest.raises(KeyboardInterrupt):
        make_run().save(tmp_path / "r")
    with pytest.raises(TraceError, match="not written to the end"):
        load_run(tmp_path / "r.steps.parquet")


def test_files_of_different_runs_do_not_mix(tmp_path):
    make_run().save(tmp_path / "one")
    make_run(config={"other": 1}).save(tmp_path / "two")
    (tmp_path / "two.steps.parquet").replace(tmp_path / "one.steps.parquet")
    with pytest.raises(TraceError, match="different runs"):
        load_run(tmp_path / "one")


def test_a_run_without_a_step_has_an_empty_item_table(tmp_path):
    """Whoever arrives after the end of the run has no items; they are made from no pieces."""
    work = generate_workload("azure-conv", num_requests=3, seed=1)
    later = put_column(work.table, "arrival_ns", pa.array([10**10] * 3, pa.int64()))
    run = simulate(RequestTrace(later, work.metadata), shape=TINY, until_s=1.0)
    assert (sum(map(len, run.item_pieces())), len(run.items_table)) == (0, 0)
    run.save(tmp_path / "r")
    assert load_run(tmp_path / "r").items_table.num_rows == 0
    assert summarize(run).latency.itl_ms.n == 0
