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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="running models needs the exec extra")

from torch._C._distributed_c10d import PrefixStore

from mdi_exec.engine.llm import LLM
from mdi_exec.engine.rank_worker import _Outbox
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.errors import GroupError
from mdi_exec.ranks.meeting import LOOPBACK, RankAddress, join_group, lead_store
from mdi_shared.errors import ConfigError, MiniDeepInferError
from mdi_sim.retrace import replay_recorded
from mdi_traces.run import load_run
from minideepinfer.commands import last_words
from tests.exec.engines import CHECKPOINT, SMALL
from tests.exec.groups import llm_results

PROMPTS = [[3 + i] * length for i, length in enumerate((30, 5, 9))]
MODULE = ["-m", "minideepinfer", "generate", str(CHECKPOINT), "--max-tokens", "3", "--json",
          "--ignore-eos", *[f"--ids={','.join(map(str, ids))}" for ids in PROMPTS],
          *[f"--set={name}={value}" for name, value in SMALL.items()]]  # fmt: skip


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
        out, err = process.communicate(timeout=300)
        errors = [line for line in err.splitlines() if line.startswith(prefix)]
        assert "Traceback" not in err
        ends.append((process.returncode, out, errors))
    return ends


def test_workers_and_launched_ranks_give_the_tokens_of_one_process():
    launched = start_ranks(free_port(), [], [])
    params = [SamplingParams(max_tokens=3, ignore_eos=True, seq_seed=i) for i in range(3)]
    said = []
    with LLM(CHECKPOINT, **SMALL, on_estimate=said.append) as llm:
        assert not said, "one process on a CPU says nothing"
        alone = [output.token_ids for output in llm.generate(PROMPTS, params)]
    with LLM(CHECKPOINT, **SMALL, data_parallel_size=2, on_estimate=said.append) as llm:
        outputs = llm.generate(PROMPTS, params)
        assert [output.token_ids for output in outputs] == alone
        streamed = {o.req_id: o.token_ids for o in llm.stream(PROMPTS, params)}
        assert list(streamed.values()) != []
        assert sorted(streamed.values()) == sorted(alone)
        check_stop_and_close(llm, outputs[0])
        workers = pids_of_workers()
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    (code, out, line), (other_code, other_out, other_line) = ends_of(launched, "rank ")
    assert (code, other_code, other_out) == (0, 0, "")
    assert line + other_line == sorted(said), "each rank says once what it will take"
    for rank, told in enumerate(sorted(said)):
        assert re.fullmatch(rf"rank {rank} of 2: \d\.\d\d GB \(weights .*\); experts .*", told)
    assert [tuple(one["token_ids"]) for one in json.loads(out)["outputs"]] == alone


def test_a_front_places_by_what_its_ranks_say(tmp_path):
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    options = {**SMALL, "data_parallel_size": 2, "placement": "jsq", "record": tmp_path / "run"}
    with LLM(CHECKPOINT, **options) as llm:
        for prompt in PROMPTS:  # all ranks are empty each time
            llm.generate([prompt], params)
        llm.generate(PROMPTS[:2] * 2, params)  # at once: what was sent counts
        assert [view.outstanding for view in llm.engine.rank_views] == [0, 0]
        blocks = llm.scheduler_config.num_blocks - 1
        assert [view.free_blocks for view in llm.engine.rank_views] == [blocks] * 2
    run = load_run(tmp_path / "run")
    assert run.metadata.config["placement"] == "jsq"
    ranks = dict(zip(run.requests["req_id"], run.requests["rank"], strict=True))
    assert [ranks[str(i)] for i in range(7)] == [0, 0, 0, 0, 1, 0, 1]
    again = replay_recorded(run)
    assert again.steps_table["kind"].equals(run.steps_table["kind"])
    assert again.items_table.drop_columns("run_id").equals(run.items_table.drop_columns("run_id"))


def test_ranks_that_torchrun_has_started_are_not_watched():
    # A group of threads looks to an LLM as torchrun's does.
    with pytest.raises(ConfigError) as error:
        llm_results(2, lambda: LLM(CHECKPOINT, **SMALL, placement="jsq"))
    says = "watches the ranks, which only an LLM that starts them can, not under torchrun"
    assert str(error.value) == f"placement = 'jsq': {says}"


def check_stop_and_close(llm, output):
    """A stop string ends its request in its rank; a closed stream aborts there, too."""
    stop = output.text[1:]
    params = [SamplingParams(max_tokens=3, ignore_eos=True, seq_seed=0, stop=stop)] * 2
    both = llm.generate([PROMPTS[0]] * 2, params)  # one on each rank
    assert [(o.text, o.finish_reason) for o in both] == [(output.text[:1], "stop")] * 2
    with llm.stream(PROMPTS, SamplingParams(max_tokens=500, ignore_eos=True)) as stream:
        next(stream)
    assert not llm.engine.has_unfinished_requests()


def test_a_killed_worker_ends_the_others_with_an_error(tmp_path):
    llm = LLM(CHECKPOINT, **SMALL, data_parallel_size=2, record=str(tmp_path / "run"))
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
        assert time.monotonic() - start < 120, "the group's own limit is 600 s"
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    finally:
        llm.close()
    assert (tmp_path / "run.rank0.steps.parquet").exists(), "what rank 0 recorded is lost"


def test_a_stopped_worker_ends_the_group_within_its_timeout():
    """It hangs and does not die: nobody's connection closes."""
    llm = LLM(CHECKPOINT, **SMALL, data_parallel_size=2, group_timeout_s=8.0)
    params = SamplingParams(max_tokens=500, ignore_eos=True)
    try:
        stream = llm.stream([[5, 6], [7, 8]], params)
        for _ in range(4):
            next(stream)
        workers = pids_of_workers()
        os.kill(workers[1], signal.SIGSTOP)
        start = time.monotonic()
        last = []
        with pytest.raises(GroupError, match="rank 1 was not heard of for 8 s"):
            last.extend(stream)
        assert time.monotonic() - start < 120
        reasons = [output.finish_reason for output in last if output.finished]
        assert reasons == ["error"] * 2
        assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    finally:
        llm.close()


def test_a_front_that_does_not_listen_holds_no_rank_up():
    mine, theirs = multiprocessing.Pipe()
    outbox = _Outbox(theirs)
    for number in range(30):
        outbox.put((number, bytes(1_000_000)))  # more than any pipe takes in
    assert [mine.recv()[0] for _ in range(30)] == list(range(30))
    outbox.close()


def test_nobody_but_the_machine_itself_reaches_the_store():
    store = lead_store(LOOPBACK, 0)
    table = Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
    places = [line.split()[1:4] for line in table.splitlines()]
    listening = [
        own for own, _, state in places if state == "0A" and own.endswith(f":{store.port:04X}")
    ]
    assert listening == [f"0100007F:{store.port:04X}"]


def test_ranks_with_another_token_do_not_meet():
    store = lead_store(LOOPBACK, 0)
    address = RankAddress(1, 2, LOOPBACK, store.port, token="guessed")
    PrefixStore("minideepinfer-0-secret", store).set("rank0", "here")
    with pytest.raises(ConfigError) as error:
        join_group(address, start_s=1.0)
    assert str(error.value) == (
        "WORLD_SIZE = 2: rank 0 has not come within 1 s (group_start_timeout_s)"
    )


def test_ranks_of_several_machines_need_a_token(monkeypatch):
    for name, value in (("WORLD_SIZE", "4"), ("RANK", "0"), ("MASTER_PORT", "29500"),
                        ("LOCAL_WORLD_SIZE", "2"), ("MASTER_ADDR", "10.0.0.7")):  # fmt: skip
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="MDI_GROUP_TOKEN = '': ranks on several machines need"):
        RankAddress.from_environment()
    monkeypatch.setenv("MDI_GROUP_TOKEN", "a" * 16)
    assert not RankAddress.from_environment().is_local


def test_one_of_the_launched_ranks_that_disagree_says_so():
    ends = ends_of(start_ranks(free_port(), [], ["--set=lookahead=1"]))
    assert [code for code, _, _ in ends] == [2, 2]
    (error,) = [error for _, _, errors in ends for error in errors]
    assert "lookahead = 0: ranks must agree, but rank 1 has 1" in error


def test_a_port_in_use_is_one_line_on_every_rank():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        leader, other = (RankAddress(r, 2, "127.0.0.1", port, leads=r == 0) for r in (0, 1))
        with pytest.raises(ConfigError, match=f"group_port = {port}: cannot be had"):
            LLM(CHECKPOINT, **SMALL, data_parallel_size=2, group_port=port)
        with pytest.raises(ConfigError, match=f"group_port = {port}: cannot be had"):
            join_group(leader)
        with pytest.raises(
            ConfigError, match=rf"rank 0, .* looked for it .* = 127.0.0.1:{port} \(who listens"
        ):
            join_group(other, start_s=1.0)


def test_a_lone_rank_says_that_nobody_is_there():
    address = RankAddress(1, 2, LOOPBACK, free_port())
    with pytest.raises(ConfigError) as error:
        join_group(address, start_s=0.3)
    assert str(error.value) == (
        "WORLD_SIZE = 2: rank 0, where all ranks meet, has not come within 0.3 s "
        "(group_start_timeout_s): rank 1 looked for it at MASTER_ADDR:MASTER_PORT = 127.0.0.1:"
        f"{address.port} (Connection refused)"
    )


def joined(*addresses):
    """Let ranks join, each on a thread; return what each is refused with."""

    def join(address):
        try:
            join_group(address, start_s=1.0)
        except MiniDeepInferError as error:
            return error

    with ThreadPoolExecutor() as threads:
        return list(threads.map(join, addresses))


def test_one_rank_says_which_others_are_missing():
    store = lead_store(LOOPBACK, 0)
    errors = joined(*(RankAddress(rank, 4, LOOPBACK, store.port) for rank in (0, 2)))
    own, quoted = sorted(errors, key=lambda error: isinstance(error, GroupError))
    said = "WORLD_SIZE = 4: ranks 1, 3 have not come within 1 s (group_start_timeout_s)"
    assert str(own) == said
    assert quoted.is_quoted
    assert quoted.reason.endswith(said)


def test_ranks_for_groups_of_other_sizes_do_not_meet():
    store = lead_store(LOOPBACK, 0)
    PrefixStore("minideepinfer-0-", store).set("rank1", "3 somebody")
    (error,) = joined(RankAddress(0, 2, LOOPBACK, store.port))
    assert str(error) == "WORLD_SIZE = 2: ranks must agree, but rank 1 has 3 where rank 0 has this"


def test_a_rank_is_there_once():
    store = lead_store(LOOPBACK, 0)
    PrefixStore("minideepinfer-0-", store).set("rank1", "2 somebody")
    (error,) = joined(RankAddress(1, 2, LOOPBACK, store.port))
    assert str(error) == "RANK = 1: another process of this group has it, too"


def test_under_torchrun_one_rank_tells_an_error_and_the_others_leave(monkeypatch, capsys):
    """torchrun's store is ours here; what the ranks do is done by one process after the other."""
    store = lead_store(LOOPBACK, 0)
    for name, value in (("WORLD_SIZE", "2"), ("MASTER_PORT", str(store.port)),
                        ("TORCHELASTIC_USE_AGENT_STORE", "True")):  # fmt: skip
        monkeypatch.setenv(name, value)
    left = []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(last_words, "_LEAVE_S", 0.01)
    own, quoted = ConfigError("a", 1, "b"), GroupError("d", True)
    for rank, line, error in (("0", "error: a", own), ("1", "error: a", own),
                              ("1", "error: b", own), ("1", "error: c", quoted)):  # fmt: skip
        monkeypatch.setenv("RANK", rank)
        last_words.tell_once(line, error)
    assert capsys.readouterr().err == "error: a\nerror: b\n"
    assert left == [0, 0]


def test_an_error_while_a_worker_loads_is_the_callers():
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(CHECKPOINT, **{**SMALL, "max_model_len": 1 << 20}, data_parallel_size=2)
