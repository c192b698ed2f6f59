"""Ranks as real processes: workers of an LLM, and processes started as torchrun starts them."""

import json
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="running models needs the exec extra")

import torch

from mdi_exec.engine.llm import LLM
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.errors import GroupError
from mdi_exec.ranks.parallel import RankAddress, join_group
from mdi_shared.errors import ConfigError
from tests.exec.engines import CHECKPOINT, SMALL

OPTIONS = {**SMALL, "prefill_attempt_interval": 2, "prefill_any_attempt_interval": 3}
PROMPTS = [[3 + i] * length for i, length in enumerate((30, 5, 9))]
MODULE = ["-m", "minideepinfer", "generate", str(CHECKPOINT), "--max-tokens", "3", "--json",
          "--ignore-eos", *[f"--ids={','.join(map(str, ids))}" for ids in PROMPTS],
          *[f"--set={name}={value}" for name, value in OPTIONS.items()]]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_ranks(port, *extra):
    """Start two ranks with an environment like torchrun's, each with options of its own."""
    started = []
    for rank, options in enumerate(extra):
        env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
               "MASTER_PORT": str(port), "PYTHONPATH": os.pathsep.join(sys.path)}  # fmt: skip
        started.append(
            subprocess.Popen(
                [sys.executable, *MODULE, *options], env=env, text=True,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )
        )  # fmt: skip
    return started


def pids_of_workers():
    """Process ids of the ranks this process has started, in rank order."""
    return [child.pid for child in sorted(multiprocessing.active_children(), key=lambda c: c.name)]


def ends_of(processes, prefix="error: "):
    """Return (exit code, standard output, standard error's lines with a prefix) of each."""
    ends = []
    for process in processes:
        out, err = process.communicate(timeout=60)
        errors = [line for line in err.splitlines() if line.startswith(prefix)]
        assert "Traceback" not in err
        ends.append((process.returncode, out, errors))
    return ends


def test_workers_and_launched_ranks_give_the_tokens_of_one_process():
    launched = start_ranks(free_port(), [], [])
    params = [SamplingParams(max_tokens=3, ignore_eos=True, seq_seed=i) for i in range(3)]
    said = []
    with LLM(CHECKPOINT, **OPTIONS, on_estimate=said.append) as llm:
        assert not said, "one process on a CPU says nothing"
        alone = [output.token_ids for output in llm.generate(PROMPTS, params)]
    with LLM(CHECKPOINT, **OPTIONS, data_parallel_size=2, on_estimate=said.append) as llm:
        outputs = llm.generate(PROMPTS, params)
        assert [output.token_ids for output in outputs] == alone
        streamed = {o.req_id: o.token_ids for o in llm.stream(PROMPTS, params)}
        assert list(streamed.values()) != []
        assert sorted(streamed.values()) == sorted(alone)
        workers = pids_of_workers()
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    (code, out, line), (other_code, other_out, other_line) = ends_of(launched, "rank ")
    assert (code, other_code, other_out) == (0, 0, "")
    assert line + other_line == sorted(said), "each rank says once what it will take"
    for rank, told in enumerate(sorted(said)):
        assert re.fullmatch(rf"rank {rank} of 2: \d\.\d\d GB \(weights .*\); experts .*", told)
    assert [tuple(one["token_ids"]) for one in json.loads(out)["outputs"]] == alone


def test_a_killed_worker_ends_the_others_with_an_error(tmp_path):
    llm = LLM(CHECKPOINT, **OPTIONS, data_parallel_size=2, record=str(tmp_path / "run"))
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    try:
        stream = llm.stream([[5, 6], [7, 8]], params)
        for _ in range(4):
            next(stream)
        start = time.monotonic()
        workers = pids_of_workers()
        os.kill(workers[1], signal.SIGKILL)
        with pytest.raises(GroupError, match="rank 1 was killed by SIGKILL"):
            list(stream)
        assert time.monotonic() - start < 30
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    finally:
        llm.close()
    assert (tmp_path / "run.rank0.steps.parquet").exists(), "what rank 0 recorded is lost"


def test_launched_ranks_that_disagree_both_say_so():
    ends = ends_of(start_ranks(free_port(), [], ["--set=lookahead=1"]))
    for code, _, errors in ends:
        assert code == 2
        assert len(errors) == 1
        assert "lookahead = 0: ranks must agree, but rank 1 has 1" in errors[0]


def test_a_port_in_use_is_one_line_on_every_rank():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        leader, other = (RankAddress(r, 2, "127.0.0.1", port, leads=r == 0) for r in (0, 1))
        with pytest.raises(ConfigError, match=f"group_port = {port}: cannot be had"):
            LLM(CHECKPOINT, **OPTIONS, data_parallel_size=2, group_port=port)
        with pytest.raises(ConfigError, match=f"group_port = {port}: cannot be had"):
            join_group(leader)
        with pytest.raises(ConfigError, match=f"MASTER_PORT = {port}: no group of ranks"):
            join_group(other, start_s=1.0)


def test_an_error_while_a_worker_loads_is_the_callers():
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(CHECKPOINT, **{**OPTIONS, "max_model_len": 1 << 20}, data_parallel_size=2)
