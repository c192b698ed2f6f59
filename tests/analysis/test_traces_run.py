"""The same numbers from a `Run` of mdi_traces, with the types its schema gives the columns."""

import pyarrow as pa
import pytest

from mdi_analysis import compare, export_perfetto, plot_throughput, summarize
from mdi_traces.run import Run, load_run
from mdi_traces.schema import ITEM_SCHEMA, REQUEST_SCHEMA, STEP_SCHEMA, Metadata

LABELS = {"run_id": "small", "source": "simulator", "vote": "none"}


def to_table(frame, schema) -> pa.Table:
    """Bring a hand-made frame to a full schema: absent columns are null, 0, or a label."""
    columns = []
    for column in schema:
        if column.name in frame:
            array = pa.array(frame[column.name].astype(object), from_pandas=column.nullable)
        elif column.nullable:
            array = pa.nulls(len(frame), column.type)
        else:
            array = pa.array([LABELS.get(column.name, 0)] * len(frame))
        if pa.types.is_dictionary(column.type) and not pa.types.is_dictionary(array.type):
            array = array.cast(pa.string()).dictionary_encode()
        columns.append(array.cast(column.type))
    return pa.table(columns, schema=schema)


@pytest.fixture
def recorded(run) -> Run:
    meta = run.metadata
    return Run(
        to_table(run.steps, STEP_SCHEMA),
        to_table(run.requests, REQUEST_SCHEMA),
        Metadata(table="steps", source=meta.source, clock=meta.clock, model=meta.model,
                 hardware=meta.hardware, seed=meta.seed, config=meta.config),
        to_table(run.items, ITEM_SCHEMA),
    )  # fmt: skip


def test_recorded_tables_give_the_same_summary(run, recorded):
    tables, frames = summarize(recorded).to_dict(), summarize(run).to_dict()
    assert tables["engine"].pop("vote_wait_share") is not None
    assert frames["engine"].pop("vote_wait_share") is None, "hand-made steps have no votes"
    assert tables == frames


def test_a_run_survives_its_files(recorded, tmp_path):
    recorded.save(tmp_path / "small")
    found = compare(recorded, load_run(tmp_path / "small"))
    assert found.plans.identical
    assert found.a == found.b


def test_recorded_tables_export_and_draw(run, recorded, tmp_path):
    first = export_perfetto(recorded, tmp_path / "a.json").read_bytes()
    assert first == export_perfetto(run, tmp_path / "b.json").read_bytes()
    plot_throughput(recorded).canvas.draw()
