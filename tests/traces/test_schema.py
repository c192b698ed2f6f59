"""The schema is what the documentation says, and metadata survive their JSON."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from mdi_shared.errors import TraceError
from mdi_traces.schema import (
    ADDED_COLUMNS,
    OUTPUT_COLUMNS,
    REQUEST_SCHEMA,
    SCHEMA_VERSION,
    SCHEMAS,
    STEP_SCHEMA,
    Metadata,
    columns_markdown,
    describe_columns,
)

DOC = Path(__file__).parents[2] / "docs" / "trace-format.md"


@pytest.mark.parametrize("table", list(SCHEMAS))
def test_documentation_shows_the_columns_as_they_are(table):
    assert columns_markdown(table) in DOC.read_text(), (
        f"docs/trace-format.md is out of date: paste columns_markdown({table!r}) there"
    )


@pytest.mark.parametrize("table", list(SCHEMAS))
def test_every_column_has_a_meaning_and_times_are_int64(table):
    for field in SCHEMAS[table]:
        assert field.metadata[b"meaning"]
        if field.metadata[b"unit"] == b"ns":
            assert field.type == pa.int64()
    assert [row[0] for row in describe_columns(table)] == SCHEMAS[table].names


def test_what_a_run_adds_is_nullable_and_the_rest_of_an_input_is_not():
    required = {f.name for f in REQUEST_SCHEMA if not f.nullable}
    assert required == {
        "req_id", "arrival_ns", "prompt_len", "max_tokens", "output_len", "cached_len"
    }  # fmt: skip
    assert required.isdisjoint(OUTPUT_COLUMNS)
    assert OUTPUT_COLUMNS[0] == "t_submit"
    assert {f.name for f in STEP_SCHEMA if f.nullable} == set(ADDED_COLUMNS["steps"])


def test_metadata_round_trip():
    metadata = Metadata(table="steps", source="runtime", clock="monotonic", model="tiny",
                        hardware="cpu", config={"b": 1, "a": [1, 2]}, seed=2**63,
                        licence="MIT", hash_block_size=512, notes=("one", "two"))  # fmt: skip
    assert Metadata.from_json(metadata.to_json(), "f") == metadata
    assert metadata.generator.startswith("mini-deepinfer ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": SCHEMA_VERSION + 1}, "newer than 4, the newest this version reads"),
        ({"schema_version": None}, "no schema_version"),
        ({"schema_version": 0}, "schema version 0"),
        ({"clock": "sundial"}, "clock = 'sundial'; allowed: virtual, monotonic, none"),
        ({"colour": 1}, "unknown keys"),
    ],
)
def test_metadata_errors_say_what_is_wrong(change, message):
    document = json.loads(Metadata(table="steps", source="import").to_json()) | change
    with pytest.raises(TraceError, match=message):
        Metadata.from_json(json.dumps(document), "f.parquet")


def test_metadata_that_is_not_json():
    with pytest.raises(TraceError, match=r"f.parquet: its metadata is not JSON"):
        Metadata.from_json(b"{", "f.parquet")
