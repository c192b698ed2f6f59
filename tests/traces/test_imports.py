"""What importing costs: pandas only when a frame is asked for."""

import subprocess
import sys

import pytest

import mdi_traces

WITHOUT_PANDAS = """
import sys, pathlib, tempfile
import mdi_traces
for name in mdi_traces.__all__:
    getattr(mdi_traces, name)
folder = pathlib.Path(tempfile.mkdtemp())
for ending in ("parquet", "jsonl", "csv"):
    trace = mdi_traces.generate_workload("chat-sessions", num_requests=30, seed=1)
    trace.scaled(2.0).save(folder / f"t.{ending}")
    mdi_traces.load_requests(folder / f"t.{ending}", sort=True)
azure = "TIMESTAMP,ContextTokens,GeneratedTokens\\n2023-11-16 18:17:03,1,1\\n"
(folder / "azure").write_text(azure)
(folder / "mooncake").write_text('{"timestamp": 0, "input_length": 1, "output_length": 1}')
mdi_traces.load_requests(folder / "azure")
mdi_traces.load_requests(folder / "mooncake")
assert "pandas" not in sys.modules, "pandas was imported"
"""


def test_traces_are_made_read_and_written_without_pandas():
    done = subprocess.run([sys.executable, "-c", WITHOUT_PANDAS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_package_names_what_it_has():
    for name in mdi_traces.__all__:
        assert getattr(mdi_traces, name) is not None
    assert dir(mdi_traces) == sorted(mdi_traces.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = mdi_traces.nope
