"""Groups of ranks against the simulator: their record, retraced, makes the same plans on each.

Many groups on made-up devices, whose engines, schedulers and recorders are the real ones, and one
of four ranks that run the tiny model.
"""

import random
import time

import pytest

pytest.importorskip("torch", reason="running models needs the exec extra")

from mdi_exec.engine.engine import LLMEngine
from mdi_exec.engine.llm import LLM
from mdi_exec.engine.recording import Recording
from mdi_exec.engine.sampling import SamplingParams
from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.shape import TINY
from mdi_shared.scheduler import Scheduler
from mdi_sim.retrace import replay_recorded
from mdi_traces.check import check_run
from tests.exec.engines import CHECKPOINT, FakeRunner
from tests.exec.groups import llm_results, results_of
from tests.parity.test_executor import PLAN_COLUMNS

REAL = {"max_model_len": 500, "num_blocks": 5, "max_num_seqs": 16, "max_num_batched_tokens": 200}
MADE_UP = {"block_size": 4, "num_blocks": 22, "max_num_seqs": 6, "max_model_len": 48,
           "max_num_batched_tokens": 16}  # fmt: skip
INTERVALS = {"prefill_attempt_interval": 2, "prefill_any_attempt_interval": 3}


def serve(engine, left, lengths, most_tokens, first=()):
    """Serve one rank's requests, which come in bursts; return the run (rank 0) and preemptions.

    `first` are (prompt tokens, output tokens) that come before all others and stop nowhere else.
    All tokens are forced: when a request ends is not the model's to say.
    """
    rank, vocab_size = engine.group.rank, engine.vocab_size
    rng = random.Random(f"{rank} {left}")
    engine.expect_requests()
    for i, (prompt_len, output_len) in enumerate(first):
        params = SamplingParams(max_tokens=output_len, ignore_eos=True, seq_seed=i)
        engine.add_request([5] * prompt_len, params, f"{rank}-first{i}")
    while engine.has_unfinished_requests():
        for _ in range(min(rng.choice([0, 0, 4, 8]), left)):
            stops = tuple(range(left % 20, vocab_size, 20))
            forced = tuple(rng.randrange(2, vocab_size) for _ in range(most_tokens))
            params = SamplingParams(
                max_tokens=rng.randint(2, most_tokens), golden_token_ids=forced,
                stop_token_ids=stops,
            )  # fmt: skip
            prompt = [rng.randrange(3, vocab_size) for _ in range(rng.choice(lengths))]
            engine.add_request(prompt, params, f"{rank}-{left}")
            if rng.random() < 0.1:
                engine.abort_request(f"{rank}-{left}")
            left -= 1
        if rng.random() < 0.05:
            time.sleep(0.001)
        engine.more_to_come = left > 0
        engine.step()
        if rng.random() < 0.1:
            engine.abort_request(f"{rank}-{rng.randint(left, left + 5)}")
    run, num_preempted = engine.recorded_run(), engine.scheduler.num_preempted
    engine.close()
    return run, num_preempted


def require_same_plans(run):
    assert [finding for finding in check_run(run) if not finding.skipped] == []
    again = replay_recorded(run)
    for column in ("rank", *PLAN_COLUMNS):
        real = run.steps_table[column].to_pylist()
        assert again.steps_table[column].to_pylist() == real, column
    items = [name for name in run.items_table.column_names if name != "run_id"]
    assert again.items_table.select(items).equals(run.items_table.select(items))
    ends = ["req_id", "rank", "finish_reason", "output_len"]
    assert again.requests[ends].equals(run.requests[ends])


def serve_made_up(group, seed):
    rng = random.Random(seed)
    config = SchedulerConfig(**MADE_UP, **INTERVALS, enable_zos=rng.random() < 0.5)
    recording = Recording(TINY, hardware="made up", options={}, rank=group.rank)
    engine = LLMEngine(Scheduler(config), FakeRunner(seed=seed), vocab_size=8, group=group,
                       recording=recording)  # fmt: skip
    left = [rng.randrange(20) for _ in range(group.size)]
    return serve(engine, max(left[group.rank], group.rank == 0), [2, 5, 11, 20], 24)


@pytest.mark.parametrize("seed", range(15))
def test_a_record_of_made_up_devices_retraced_makes_the_same_plans(seed):
    ranks = results_of(2 + seed % 3, lambda group: serve_made_up(group, seed))
    require_same_plans(ranks[0][0])


def test_a_record_of_four_real_ranks_retraced_makes_the_same_plans():
    def work():
        llm = LLM(CHECKPOINT, **REAL, **INTERVALS, record="unused")
        left = (4, 3, 1, 0)[llm.rank.group.rank]
        if llm.rank.group.rank:
            return serve(llm.rank.engine, left, [2, 9], 5)
        # Of four blocks three prompts take one each and two soon want a second: one must give way.
        return serve(llm.rank.engine, left, [126, 127], 5, first=[(127, 8)] * 4)

    (run, preempted), *others = llm_results(4, work)
    assert preempted > 0, "rank 0 was meant to be short of memory"
    assert all(run is None for run, _ in others)
    assert {"prefill", "decode", "idle_prefill", "idle_decode"} == set(run.steps["kind"])
    require_same_plans(run)
