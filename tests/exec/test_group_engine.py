"""Engines in a group, on made-up devices: random arrivals, aborts and stalls on 2 to 4 ranks.

The ranks never run different kinds of step, nobody waits longer than the ANY interval for the
group's attention, everything ends and all memory is back; an error on one rank ends all.
"""

import random
import time

import pytest

pytest.importorskip("torch", reason="running models needs the exec extra")

from mdi_exec.engine.engine import LLMEngine
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.errors import EngineStoppedError, GroupError
from mdi_shared.config import SchedulerConfig
from mdi_shared.scheduler import Scheduler
from mdi_shared.vote import ANY
from tests.exec.engines import FakeRunner, is_empty
from tests.exec.groups import LONGEST_S, results_of, run_ranks

AMPLE = {"block_size": 4, "num_blocks": 2_000, "max_num_seqs": 64, "max_model_len": 64,
         "max_num_batched_tokens": 4_000}  # fmt: skip
TIGHT = {"block_size": 4, "num_blocks": 22, "max_num_seqs": 6, "max_model_len": 48,
         "max_num_batched_tokens": 16}  # fmt: skip


class Watched(FakeRunner):
    """Keeps plans, and when each sequence was submitted and first scheduled (step numbers)."""

    def __init__(self, seed):
        super().__init__(seed=seed)
        self.plans, self.first = [], {}

    def launch(self, plan, requests):
        self.plans.append(plan)
        for seq_id in plan.seq_ids:
            self.first.setdefault(seq_id, plan.step)
        return super().launch(plan, requests)


def grouped_engine(group, seed, options):
    config = SchedulerConfig(**options)
    runner = Watched(seed)
    return LLMEngine(Scheduler(config), runner, vocab_size=8, group=group), runner


def serve_randomly(group, seed, options):
    """Serve requests that come and go at random; return plans, waits in steps, and endings."""
    dice = random.Random(f"{seed} {group.rank}")
    engine, runner = grouped_engine(group, seed, options)
    engine.expect_requests()
    left = dice.choice([0, 3, 8, 15])  # some ranks have nothing to do at all
    submitted, ended = {}, {}
    while engine.has_unfinished_requests():
        while left and dice.random() < 0.3:
            prompt = [dice.randrange(8) for _ in range(dice.randint(1, 20))]
            params = SamplingParams(max_tokens=dice.randint(1, 24), seq_seed=left)
            submitted[len(submitted)] = engine.scheduler.step
            name = engine.add_request(prompt, params)
            left -= 1
            if dice.random() < 0.15:
                engine.abort_request(name)
        if submitted and dice.random() < 0.1:
            engine.abort_request(str(dice.randrange(len(submitted))))
        if dice.random() < 0.02:
            time.sleep(dice.random() * 0.01)
        engine.more_to_come = left > 0
        ended.update((o.req_id, o.finish_reason) for o in engine.step() if o.finished)
    assert is_empty(engine)
    engine.scheduler.check_integrity()
    assert set(ended) == {str(number) for number in submitted}
    waits = [runner.first[s] - submitted[s] for s in runner.first]
    engine.close()
    return runner.plans, waits, ended


def random_case(seed, base):
    dice = random.Random(seed)
    options = {
        **base, "enable_zos": dice.random() < 0.5,
        "prefill_attempt_interval": dice.choice([1, 2, 5]),
        "prefill_any_attempt_interval": dice.choice([3, 7, 12]),
    }  # fmt: skip
    return dice.randint(2, 4), options


def kinds_by_step(ranks):
    return [{plan.step: plan.is_prefill for plan in plans} for plans, _, _ in ranks]


@pytest.mark.parametrize("seed", range(60))
def test_kinds_never_diverge_and_nobody_starves(seed):
    size, options = random_case(seed, AMPLE)
    ranks = results_of(size, lambda group: serve_randomly(group, seed, options))
    first, *others = kinds_by_step(ranks)
    assert all(kinds == first for kinds in others)
    plans = [plans for plans, _, _ in ranks]
    for step in zip(*plans, strict=True):
        if step[0].vote == ANY and any(plan.want for plan in step):
            assert all(plan.is_prefill for plan in step), "a wish at an ANY point was overheard"
    longest = options["prefill_any_attempt_interval"] + 1
    for _, waits, _ in ranks:
        assert all(wait <= longest for wait in waits), f"waited {max(waits)} steps of {longest}"


@pytest.mark.parametrize("seed", range(60, 100))
def test_ranks_short_of_memory_stay_together_too(seed):
    size, options = random_case(seed, TIGHT)
    ranks = results_of(size, lambda group: serve_randomly(group, seed, options))
    first, *others = kinds_by_step(ranks)
    assert all(kinds == first for kinds in others)


def test_the_random_cases_hold_what_they_are_for():
    """Some preempt, some abort, some rank idles through steps of both kinds."""
    kinds, reasons, preempted = set(), set(), 0
    for seed in (20, 21, 22, 23):
        size, options = random_case(seed, TIGHT)
        for plans, _, ended in results_of(
            size, lambda group, seed=seed, options=options: serve_randomly(group, seed, options)
        ):
            kinds |= {plan.kind for plan in plans}
            reasons |= set(ended.values())
            preempted += sum(len(plan.preempted) for plan in plans)
    assert kinds == {"prefill", "decode", "idle_prefill", "idle_decode"}
    assert {"abort", "length", "stop"} <= reasons
    assert preempted > 0


@pytest.mark.parametrize("where", ["device", "caller"])
def test_an_error_on_one_rank_ends_all_with_that_error(where):
    """On a device, or in the code that uses the engine: the others stop, and quote it."""

    def work(group):
        engine, runner = grouped_engine(group, 0, AMPLE)
        if group.rank == 1 and where == "device":
            runner.fail_at = 4
        engine.expect_requests()
        engine.add_request([1, 2, 3], SamplingParams(max_tokens=40, ignore_eos=True, seq_seed=1))
        try:
            while engine.has_unfinished_requests():
                engine.step()
                if group.rank == 1 and where == "caller" and runner.num_steps == 4:
                    raise RuntimeError("the device is gone")
        finally:
            if not group.is_open and engine.is_stopped:
                with pytest.raises(EngineStoppedError, match="the device is gone"):
                    engine.step()

    start = time.monotonic()
    errors = run_ranks(3, work)
    assert time.monotonic() - start < LONGEST_S, "nobody waits for a rank that has gone"
    assert type(errors[1]) is RuntimeError
    for other in (errors[0], errors[2]):
        assert isinstance(other, GroupError)
        assert "rank 1: the device is gone" in str(other)


def test_a_group_of_one_votes_alone():
    def work(group):
        return serve_randomly(group, 1, AMPLE)

    ((plans, _, _),) = results_of(1, work)
    assert {plan.kind for plan in plans} <= {"prefill", "decode", "idle_decode"}
