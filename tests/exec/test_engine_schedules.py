"""The engine's bookkeeping on a made-up device: aborts at every stage, and many random schedules.

Whatever happens to its requests, an engine answers each exactly once and ends with every block
and slot back in the pool.
"""

import random
from collections import Counter
from threading import Thread

import pytest

from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.errors import EngineStoppedError
from mdi_shared.errors import ConfigError, DeadlockError
from tests.exec.engines import fake_engine, is_empty

LONG = SamplingParams(max_tokens=30, ignore_eos=True)


def run_to_the_end(engine):
    """Step until idle; returns the final outputs by request."""
    done = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                assert output.req_id not in done, f"{output.req_id} ended twice"
                done[output.req_id] = output
        engine.scheduler.check_integrity()
    engine.drain()
    return done


def prompt(length):
    return [2 + i % 6 for i in range(length)]


# ---- abort, stage by stage ---------------------------------------------------------------------


def before_its_first_poll(engine):
    return engine.add_request(prompt(5), LONG)


def waiting_behind_others(engine):
    for _ in range(4):
        engine.add_request(prompt(3), LONG)
    name = engine.add_request(prompt(5), LONG)
    for _ in range(3):
        engine.step()
    assert len(engine.scheduler.queues.waiting) == 1
    return name


def between_two_chunks(engine):
    name = engine.add_request(prompt(40), LONG)
    engine.step()
    (seq,) = engine.scheduler.queues.waiting
    assert 0 < seq.cached < 40
    return name


def in_flight(engine):
    name = engine.add_request(prompt(5), LONG)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.num_in_flight == 1
    return name


def decoding(engine):
    name = engine.add_request(prompt(5), LONG)
    for _ in range(6):
        engine.step()
    assert engine.scheduler.num_in_flight == int(engine.scheduler.config.enable_zos)
    return name


STAGES = (before_its_first_poll, waiting_behind_others, between_two_chunks, decoding)
# Without ZOS nothing is in flight between two turns.
CASES = [*((stage, zos) for stage in STAGES for zos in (True, False)), (in_flight, True)]


@pytest.mark.parametrize(("stage", "enable_zos"), CASES)
def test_abort_frees_everything_at_every_stage(stage, enable_zos):
    engine = fake_engine(enable_zos=enable_zos)
    name = stage(engine)
    engine.abort_request(name)
    done = run_to_the_end(engine)
    assert done[name].finish_reason == "abort"
    assert all(out.finish_reason == "length" for key, out in done.items() if key != name)
    assert is_empty(engine)
    again = engine.add_request(prompt(5), LONG)
    assert len(run_to_the_end(engine)[again].token_ids) == 30
    assert is_empty(engine)


def test_no_token_follows_an_abort():
    engine = fake_engine()
    name = decoding(engine)
    shown = engine.step()[-1].token_ids
    engine.abort_request(name)
    (last,) = [out for _ in range(3) for out in engine.step()]
    assert (last.finish_reason, last.token_ids, last.new_token_ids) == ("abort", shown, ())


def test_aborting_the_unknown_and_the_finished_is_harmless():
    engine = fake_engine()
    engine.abort_request("nobody")
    name = engine.add_request(prompt(3), SamplingParams(max_tokens=1))
    assert len(run_to_the_end(engine)) == 1
    engine.abort_request(name)
    assert engine.step() == []
    assert is_empty(engine)


def test_aborting_twice_answers_once():
    engine = fake_engine()
    name = decoding(engine)
    engine.abort_request(name)
    engine.abort_request(name)
    assert run_to_the_end(engine)[name].finish_reason == "abort"


def test_an_id_can_be_used_again_once_its_request_has_ended():
    engine = fake_engine()
    for _ in range(2):
        engine.add_request(prompt(3), SamplingParams(max_tokens=1), "again")
        with pytest.raises(ConfigError, match="req_id = 'again': is in use"):
            engine.add_request(prompt(3), LONG, "again")
        assert list(run_to_the_end(engine)) == ["again"]
    assert is_empty(engine)


# ---- schedules at random -----------------------------------------------------------------------


def random_engine(dice, drafts):
    blocks, seats = dice.choice([12, 18, 40]), dice.randint(1, 5)
    phases = [] if drafts else ["mixed", "phase=mixed:budget=5"]  # which have no drafts
    return fake_engine(
        seed=dice.getrandbits(32),
        num_blocks=blocks,
        max_model_len=int(0.8 * 4 * blocks) - (1 + 4 * drafts),
        max_num_seqs=seats,
        num_draft_tokens=drafts,
        max_num_batched_tokens=max(dice.choice([5, 8, 16]), seats * (1 + drafts)),
        enable_zos=dice.random() < 0.7,
        stop_preempted_request=dice.random() < 0.2,
        prefill_attempt_interval=dice.choice([1, 3, 70]),
        prefill_any_attempt_interval=dice.choice([1, 5, 100]),
        policy=dice.choice([*phases, "fcfs", "fcfs", "prefill_first"]),
    )


def random_request(dice, engine):
    limit = engine.scheduler.config.max_model_len
    params = SamplingParams(
        max_tokens=dice.randint(1, 25),
        ignore_eos=dice.random() < 0.7,
        stop_token_ids=(3,) if dice.random() < 0.1 else (),
    )
    too_long = dice.random() < 0.03
    return engine.add_request(prompt(limit + 1 if too_long else dice.randint(1, limit)), params)


def run_random_schedule(seed, drafts=0):
    """Serve some requests, arriving and aborted at random turns; returns how they ended."""
    dice = random.Random(seed)
    engine = random_engine(dice, drafts)
    names, done, to_come = [], {}, dice.randint(1, 9)
    while to_come or engine.has_unfinished_requests():
        while to_come and dice.random() < 0.4:
            names.append(random_request(dice, engine))
            to_come -= 1
        if names and dice.random() < 0.04:
            engine.abort_request(dice.choice(names))
        for output in engine.step():
            assert output.req_id not in done, f"{output.req_id} has ended already"
            assert len(output.token_ids) == len(output.logprobs), output
            if output.finished:
                done[output.req_id] = output
        engine.scheduler.check_integrity()
    engine.drain()
    assert is_empty(engine), f"seed {seed}"
    assert sorted(done) == sorted(names), f"seed {seed}: each request is answered once"
    ends = Counter(output.finish_reason for output in done.values())
    return ends, engine.scheduler.num_preempted


@pytest.mark.parametrize("part", range(10))
def test_a_thousand_random_schedules_leave_the_pool_empty(part):
    ends, num_preempted = Counter(), 0
    for seed in range(100 * part, 100 * part + 100):
        ended, preempted = run_random_schedule(seed)
        ends += ended
        num_preempted += preempted
    assert num_preempted > 20
    assert set(ends) == {"stop", "length", "abort", "prompt_length_exceeded",
                         "insufficient_system_resource"}  # fmt: skip


def test_schedules_with_drafts_leave_the_pool_empty_too():
    found = [run_random_schedule(seed, drafts=1 + seed % 3) for seed in range(200)]
    assert sum(preempted for _, preempted in found) > 20
    ends = sum((ended for ended, _ in found), Counter())
    assert set(ends) >= {"stop", "length", "abort", "prompt_length_exceeded"}


def test_the_same_seed_makes_the_same_schedule():
    assert run_random_schedule(3) == run_random_schedule(3)


# ---- what callers and devices may do to it -----------------------------------------------------


def test_requests_may_come_from_many_threads():
    engine, params = fake_engine(), SamplingParams(max_tokens=3, ignore_eos=True)

    def send(sender):
        for i in range(50):
            engine.add_request(prompt(1 + i % 7), params, f"{sender}-{i}")
            if i % 10 == 9:
                engine.abort_request(f"{sender}-{i - 5}")

    senders = [Thread(target=send, args=(n,)) for n in range(3)]
    for sender in senders:
        sender.start()
    done = {}
    while any(sender.is_alive() for sender in senders) or engine.has_unfinished_requests():
        done.update((out.req_id, out) for out in engine.step() if out.finished)
    engine.drain()
    assert len(done) == 150
    assert {out.finish_reason for out in done.values()} <= {"length", "abort"}
    assert is_empty(engine)


def test_a_callers_mistake_leaves_the_engine_usable():
    engine = fake_engine()
    name = engine.add_request(prompt(5), LONG)
    for bad in ([], [8], [-1], [True], [2.0]):
        with pytest.raises(ConfigError, match="prompt_token_ids"):
            engine.add_request(bad, LONG)
        engine.step()
    assert list(run_to_the_end(engine)) == [name]
    assert is_empty(engine)


def test_an_idle_engine_does_nothing():
    engine = fake_engine()
    assert [engine.step() for _ in range(3)] == [[], [], []]
    engine.drain()
    assert engine.runner.num_steps == 0


def test_a_failing_device_stops_the_engine():
    engine = fake_engine()
    name = engine.add_request(prompt(5), LONG)
    engine.runner.fail_at = 4
    shown = [*engine.step(), *engine.step(), *engine.step(), *engine.step()]
    with pytest.raises(RuntimeError, match="the device is gone"):
        engine.step()
    assert engine.runner.is_closed
    assert [out.req_id for out in shown] == [name] * len(shown)
    assert len(shown[-1].token_ids) == len(shown) == 3, "what was shown before stays valid"
    with pytest.raises(EngineStoppedError, match="stopped: the device is gone"):
        engine.add_request(prompt(5), LONG)
    engine.close()


def test_a_deadlock_is_an_error_and_closes_the_engine():
    """Upstream's leak: an aborted half-run prompt keeps its blocks, and nobody else gets any."""
    engine = fake_engine(strict_upstream=True, num_blocks=24, max_num_seqs=1)
    engine.abort_request(between_two_chunks(engine))
    engine.add_request(prompt(60), LONG)
    with pytest.raises(DeadlockError):
        run_to_the_end(engine)
    assert engine.runner.is_closed
