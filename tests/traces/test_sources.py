"""Where a trace comes from: folders, several files, pipes, and what is none."""

import bz2
import gzip
import lzma
import os
import subprocess
import sys
import tarfile
import threading

import pytest

from mdi_shared.errors import ConfigError, TraceError
from mdi_traces.formats import files, load_requests

from .conftest import trace_of
from .samples import BURSTGPT_SESSIONS, MOONCAKE, OWN

FIRST, SECOND = MOONCAKE.splitlines(keepends=True)


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "shards"
    (folder / "day=2").mkdir(parents=True)
    (folder / "part-2.jsonl").write_text(FIRST)
    (folder / "part-10.jsonl.gz").write_bytes(gzip.compress(SECOND.encode()))
    (folder / "_SUCCESS").write_text("")
    (folder / ".part-2.jsonl.crc").write_bytes(b"\x00\x01")
    return folder


def arrivals(path, **options) -> list[int]:
    return load_requests(path, **options).table["arrival_ns"].to_pylist()


def test_a_folder_is_one_trace_in_natural_order(shards):
    assert arrivals(shards) == [0, 1_500_000_000]
    later = SECOND.replace("1500", "1600")
    (shards / "day=2" / "part-0.jsonl").write_text(later)
    with pytest.raises(TraceError, match=r"part-2\.jsonl, row 1, column 'arrival_ns': .*earlier"):
        load_requests(shards)
    assert arrivals(shards, sort=True) == [0, 1_500_000_000, 1_600_000_000]


def test_several_files_are_one_trace(shards):
    first, second = shards / "part-2.jsonl", shards / "part-10.jsonl.gz"
    assert arrivals([first, second]) == [0, 1_500_000_000]
    assert arrivals([second, first], sort=True) == [0, 1_500_000_000]
    assert arrivals([second, first], limit=1) == [0]
    second.write_bytes(b'{"timestamp": 9, "input_length": 5, "output_length": "x"}')
    with pytest.raises(TraceError, match=r"part-10\.jsonl\.gz, row 1, column 'output_length': 'x'"):
        load_requests([first, second])


def test_sessions_go_on_from_file_to_file(tmp_path):
    header, *rows = BURSTGPT_SESSIONS.splitlines()
    for index in range(2):
        (tmp_path / f"{index}.csv").write_text("\n".join([header, *rows[2 * index :][:2]]))
    whole = tmp_path / "whole"
    whole.write_text(BURSTGPT_SESSIONS)
    parts = [tmp_path / "0.csv", tmp_path / "1.csv"]
    assert load_requests(parts, closed_loop=True).table.equals(
        load_requests(whole, closed_loop=True).table
    )


def test_files_that_are_no_trace_together(tmp_path, shards):
    (tmp_path / "own").write_text(OWN)
    with pytest.raises(TraceError, match=r"own: is in format 'own', but .* is in 'mooncake'"):
        load_requests([shards, tmp_path / "own"])
    with pytest.raises(ConfigError, match="names no file"):
        load_requests([])
    with pytest.raises(TraceError, match="is a folder without files"):
        load_requests(shards / "day=2")


def test_files_of_ours_keep_their_metadata_when_they_agree(tmp_path):
    for name, first in (("a", 0), ("b", 1)):
        trace = trace_of(req_id=[name], arrival_ns=[first], prompt_len=[1], output_len=[1])
        trace.save(tmp_path / f"{name}.parquet")
    both = load_requests(tmp_path)
    assert both.table["req_id"].to_pylist() == ["a", "b"]
    assert both.metadata == trace.metadata


def test_standard_input_may_be_a_pipe_or_a_file(tmp_path):
    code = "import mdi_traces; print(len(mdi_traces.load_requests('/dev/stdin')))"
    path = tmp_path / "t.gz"
    path.write_bytes(gzip.compress(MOONCAKE.encode()))
    for stdin in ({"input": MOONCAKE.encode()}, {"input": path.read_bytes()},
                  {"stdin": path.open("rb")}):  # fmt: skip
        with stdin.get("stdin") or open(os.devnull):  # noqa: PTH123
            done = subprocess.run([sys.executable, "-c", code], capture_output=True, **stdin)
        assert (done.stdout, done.stderr) == (b"2\n", b"")


def test_a_named_pipe_is_waited_for_but_not_for_ever(tmp_path, monkeypatch):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=[MOONCAKE])
    writer.start()
    assert len(load_requests(pipe)) == 2
    writer.join()
    monkeypatch.setattr(files, "PIPE_WAIT_S", 0.05)
    with pytest.raises(TraceError, match=r"nothing came through the pipe for 0\.05 s"):
        load_requests(pipe)


def test_what_is_no_file(tmp_path):
    for path in (tmp_path / "no", "a\0b", ""):
        with pytest.raises(TraceError) as caught:
            load_requests(path)
        assert "\n" not in str(caught.value)
    for device in ("/dev/zero", "/dev/null"):
        with pytest.raises(TraceError, match="is a device, not a file"):
            load_requests(device)
    with pytest.raises(TraceError, match="File name too long"):
        load_requests("a" * 5000)


def test_packings_that_are_not_read_are_named(tmp_path):
    path = tmp_path / "t"
    for pack, name in ((bz2.compress, "bzip2"), (lzma.compress, "xz")):
        path.write_bytes(pack(MOONCAKE.encode()))
        with pytest.raises(TraceError, match=f"is packed with {name}, which is not read"):
            load_requests(path)
    with tarfile.open(tmp_path / "t.tar.gz", "w:gz") as archive:
        archive.add(path)
    with pytest.raises(TraceError, match="is a tar archive, which is not read"):
        load_requests(tmp_path / "t.tar.gz")


def test_a_file_packed_over_and_over_is_not_unpacked_for_ever(tmp_path):
    raw = MOONCAKE.encode()
    for _ in range(5):
        raw = gzip.compress(raw)
    (tmp_path / "t").write_bytes(raw)
    with pytest.raises(TraceError, match="is packed more than 3 times"):
        load_requests(tmp_path / "t")


@pytest.mark.parametrize("keep", [20, -9])
def test_packed_files_that_are_cut_off(keep, tmp_path):
    (tmp_path / "t").write_bytes(gzip.compress(MOONCAKE.encode())[:keep])
    with pytest.raises(TraceError, match="cannot be read: Truncated compressed stream"):
        load_requests(tmp_path / "t")
