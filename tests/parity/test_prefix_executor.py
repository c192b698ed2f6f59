"""Engines that reuse prefixes, recorded and retraced: the same hits, copies and plans.

The device is made up, so that hundreds of requests take seconds: prompts of a tree, further turns
of earlier requests, aborts and preemptions in pools that are short of blocks and of tails.
"""

import random

import pytest

pytest.importorskip("torch", reason="running models needs the exec extra")

from mdi_exec.engine.engine import LLMEngine
from mdi_exec.engine.recording import Recording
from mdi_exec.engine.sampling import SamplingParams
from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.shape import TINY
from mdi_shared.scheduler import Scheduler
from mdi_sim.retrace import replay_recorded
from mdi_traces.check import check_run
from tests.exec.engines import FakeRunner, is_empty
from tests.parity.test_executor import PLAN_COLUMNS

HITS = ("hit_tokens", "known_tokens", "n_recomputed_tokens", "n_preempt")
# A record holds no look at the world that led to no step: what is processed at one, before the
# engine falls asleep, is processed after the next arrival in a replay, with one more in the queue.
PLANS = (*(name for name in PLAN_COLUMNS if name != "n_waiting"), "n_restored", "n_saved")


def record(dice):
    """Serve requests of a tree and sessions at random times; return the record."""
    blocks = dice.choice([14, 20, 60])
    config = SchedulerConfig(
        block_size=4, num_blocks=blocks, max_num_seqs=4, max_model_len=int(3.2 * blocks) - 1,
        max_num_batched_tokens=dice.choice([8, 16, 64]), enable_zos=dice.random() < 0.7,
        prefill_attempt_interval=dice.choice([1, 3]), prefill_any_attempt_interval=5,
        enable_prefix_cache=True, prefix_tails=dice.choice([2, 5, 30]),
        prefix_eviction=dice.choice(["lru", "flops"]),
    )  # fmt: skip
    recording = Recording(TINY, hardware="none", options={})
    engine = LLMEngine(Scheduler(config), FakeRunner(8, dice.getrandbits(32)), vocab_size=8,
                       recording=recording)  # fmt: skip
    stems, said, to_come = [[2, 3] * 5, [4, 5] * 4, []], [], 40
    while to_come or engine.has_unfinished_requests():
        while to_come and dice.random() < 0.3:
            stem = dice.choice(said) if said and dice.random() < 0.4 else dice.choice(stems)
            prompt = [*stem, *[6] * dice.randint(1, 9)][: config.max_model_len - 2]
            params = SamplingParams(max_tokens=dice.randint(1, 12), ignore_eos=dice.random() < 0.5)
            engine.add_request(prompt, params)
            to_come -= 1
        if dice.random() < 0.05:
            engine.abort_request(str(dice.randrange(40)))
        for output in engine.step():
            if output.finished:
                said.append([*output.prompt_token_ids, *output.token_ids])
        engine.scheduler.check_integrity()
    engine.drain()
    assert is_empty(engine)
    return recording.run(engine.scheduler)


@pytest.mark.parametrize("part", range(4))
def test_a_recorded_run_with_hits_retraced_makes_the_same_plans(part):
    hits = missed = 0
    for seed in range(6 * part, 6 * part + 6):
        run = record(random.Random(seed))
        assert [finding for finding in check_run(run) if not finding.skipped] == []
        again = replay_recorded(run)
        for name in PLANS:
            assert again.steps_table[name].equals(run.steps_table[name]), f"{name}, seed {seed}"
        for name in HITS:
            assert again.requests_table[name].equals(run.requests_table[name]), f"{name}, {seed}"
        hits += run.requests["hit_tokens"].sum()
        missed += (run.requests["known_tokens"] - run.requests["hit_tokens"]).sum()
    assert hits > 0
    assert missed > 0
