"""Traces as they come: packed, piped, in folders, and the requests of a run of our own."""

import gzip
import json
import os
import threading
from pathlib import Path

import pytest

MOONCAKE = "".join(
    f'{{"timestamp": {ms}, "input_length": 60, "output_length": 5, "hash_ids": [1]}}\n'
    for ms in (1_756_300_000_123, 1_756_300_000_223)
)


def test_a_folder_of_packed_shards_is_simulated(mdi):
    Path("shards").mkdir()
    for index, line in enumerate(MOONCAKE.splitlines()):
        Path(f"shards/part-{index}.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    done = mdi("simulate", "shards", "--model", "tiny", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["summary"]["requests"]["total"] == 2
    assert "request_rules" in mdi("check", "shards").out


def test_a_pipe_is_simulated(mdi):
    mdi("--version")  # the folder of the test's own is the current one from here on
    os.mkfifo("pipe")
    writer = threading.Thread(target=Path("pipe").write_text, args=[MOONCAKE])
    writer.start()
    done = mdi("simulate", "pipe", "--model", "tiny", "--json")
    writer.join()
    assert done.code == 0, done.err
    assert json.loads(done.out)["summary"]["requests"]["total"] == 2


def test_the_requests_of_a_closed_loop_run_are_simulated_again(mdi):
    assert mdi("generate-workload", "chat-sessions", "chat.parquet", "-n", 40).code == 0
    assert mdi("simulate", "chat.parquet", "--model", "tiny", "--out", "first").code == 0
    Path("first.requests.parquet").rename("again.parquet")
    done = mdi("simulate", "again.parquet", "--model", "tiny", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["summary"]["requests"]["total"] == 40


@pytest.mark.parametrize("verb", ["show", "check", "simulate"])
def test_paths_that_cannot_be_looked_at_are_one_line(verb, mdi):
    for path in ("a" * 5000, "no/such", "a\0b"):
        done = mdi(verb, path)
        assert done.code == 2
        assert done.err.startswith("error: ")
        assert done.err.count("\n") == 1
