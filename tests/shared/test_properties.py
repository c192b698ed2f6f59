"""Random workloads: the invariants hold at every step, everything ends, nothing is lost.

`script.ScriptedRank` checks the scheduler's integrity after every turn; the tests here look at
what the run did as a whole.
"""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from mdi_shared.errors import DeadlockError
from tests.shared.script import ScriptedRank, ended, play_group_ranks, request, toy

MOST_STEPS = 3_000
WORKLOADS = settings(max_examples=700, deadline=None, derandomize=True)


@st.composite
def configs(draw, *, drafts=True, strict=False):
    block_size = draw(st.sampled_from([4, 8]))
    max_num_seqs = draw(st.integers(1, 5))
    chunked = draw(st.booleans())
    max_model_len = draw(st.sampled_from([12, 24, 40]))
    nextn = draw(st.integers(0, 3)) if drafts else 0
    cp = draw(st.sampled_from([1, 1, 2, 3]))
    rows = max(max_num_seqs * (1 + nextn), 1 if cp == 1 else 2 * cp, block_size)
    budget = draw(st.integers(rows, max(rows, 24))) if chunked else max(max_model_len, rows)
    return toy(
        block_size=block_size,
        num_blocks=draw(st.integers(3, 24)),
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=budget,
        chunked_prefill=chunked,
        context_parallel_size=cp,
        num_draft_tokens=nextn,
        enable_zos=draw(st.booleans()),
        prefill_attempt_interval=draw(st.integers(1, 6)),
        prefill_any_attempt_interval=draw(st.integers(1, 8)),
        stop_preempted_request=draw(st.booleans()),
        strict_upstream=strict,
    )


@st.composite
def scripts(draw, prefix="r", aborts=True):
    """Requests and aborts by step, and the output lengths at which some requests stop."""
    script, stops = {}, {}
    for i in range(draw(st.integers(0, 8))):
        name = f"{prefix}{i}"
        step = draw(st.integers(1, 30))
        prompt = draw(st.integers(1, 44))
        checkpoints = tuple(sorted(draw(st.sets(st.integers(1, prompt), max_size=2))))
        cached = draw(st.integers(0, prompt - 1)) if draw(st.booleans()) else 0
        script.setdefault(step, []).append(
            request(
                name, prompt, max_tokens=draw(st.integers(1, 20)), cached_len=cached,
                chunk_checkpoints=checkpoints,
            )
        )  # fmt: skip
        if draw(st.booleans()):
            stops[name] = draw(st.integers(1, 20))
        if aborts and draw(st.integers(0, 3)) == 0:
            script.setdefault(step + draw(st.integers(1, 20)), []).append(name)
    return script, stops


accept_counts = st.dictionaries(
    st.tuples(st.sampled_from([f"r{i}" for i in range(8)]), st.integers(1, 60)),
    st.integers(1, 3),
    max_size=40,
)


def check_outputs(rank, script, stops):
    """Check each request's output length against how it ended."""
    requests = {e.req_id: e for entries in script.values() for e in entries if hasattr(e, "req_id")}
    for name, reason in ended(rank).items():
        wanted, got = requests[name], rank.output_len.get(name, 0)
        room = rank.scheduler.config.max_model_len + 1 - wanted.prompt_len
        most = min(wanted.max_tokens, max(room, 0))
        if reason == "length":
            assert got == most
        elif reason == "stop":
            assert got == stops[name]
        else:
            assert got <= most
        if reason == "prompt_length_exceeded" and got == 0:
            config = rank.scheduler.config
            blocks = -(-wanted.prompt_len // config.block_size)
            assert wanted.prompt_len > config.prompt_limit or blocks >= config.num_blocks


def run(config, script, *, stops=None, accepted=None, repeat=1):
    rank = ScriptedRank(
        config, {k: list(v) for k, v in script.items()}, stops=stops, accepted=accepted,
        repeat=repeat,
    )  # fmt: skip
    rank.advance(MOST_STEPS)
    rank._close_turn()
    return rank


@WORKLOADS
@given(configs(), scripts(), accept_counts)
def test_every_workload_ends_and_returns_its_memory(config, workload, accepted):
    script, stops = workload
    check_outputs(run(config, script, stops=stops, accepted=accepted), script, stops)


@WORKLOADS
@given(configs(strict=True), scripts(), accept_counts)
def test_strict_mode_ends_or_names_its_deadlock(config, workload, accepted):
    script, stops = workload
    try:
        rank = run(config, script, stops=stops, accepted=accepted)
    except DeadlockError as error:
        deadlock = error
    else:
        deadlock = None
    if deadlock is not None:
        assert all(blocks > 0 for _, blocks in (*deadlock.holders, *deadlock.leaked))
        return
    check_outputs(rank, script, stops)


@st.composite
def groups(draw):
    config = draw(configs())
    size = draw(st.integers(2, 4))
    return [config] * size, [draw(scripts(prefix=f"rank{r}_")) for r in range(size)]


@settings(max_examples=400, deadline=None, derandomize=True)
@given(groups())
def test_a_group_keeps_its_step_kinds_together_and_ends(group):
    configs_, workloads = group
    ranks = play_group_ranks(
        configs_,
        [{k: list(v) for k, v in script.items()} for script, _ in workloads],
        MOST_STEPS,
        stops=[stops for _, stops in workloads],
    )
    for rank, (script, stops) in zip(ranks, workloads, strict=True):
        check_outputs(rank, script, stops)
    kinds = [[turn.plan.is_prefill for turn in rank.turns] for rank in ranks]
    assert all(k == kinds[0] for k in kinds), "ranks ran different kinds of step"
    counters = [[turn.plan.decode_step for turn in rank.turns] for rank in ranks]
    assert all(c == counters[0] for c in counters)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(groups())
def test_nobody_starves_beyond_the_any_point(group):
    """A head that fits is admitted by the ANY point, whatever the other ranks want.

    Without chunking each of its checkpoints (two at most here) costs it one attempt more.
    """
    configs_, workloads = group
    ranks = play_group_ranks(
        configs_,
        [{k: list(v) for k, v in script.items()} for script, _ in workloads],
        MOST_STEPS,
        stops=[stops for _, stops in workloads],
    )
    any_interval = configs_[0].prefill_any_attempt_interval
    for rank in ranks:
        idle, waited_for = 0, ""
        for before, turn in zip(rank.turns, rank.turns[1:], strict=False):
            stuck = before.waiting and not before.running and not turn.plan.items
            head = before.waiting.partition(",")[0]
            idle = idle + 1 if stuck and head == waited_for else int(bool(stuck))
            waited_for = head
            assert idle <= 3 * any_interval + 1, f"{before.waiting} waits with nothing running"


@WORKLOADS
@given(configs(drafts=False), scripts(), st.integers(2, 40))
def test_repeated_steps_are_the_single_steps(config, workload, repeat):
    """Advancing decode steps together changes neither a plan nor the pool's order."""
    script, stops = workload
    single = run(config, script, stops=stops)
    many = run(config, script, stops=stops, repeat=repeat)
    assert expanded(many) == expanded(single)
    assert many.output_len == single.output_len
    check_outputs(many, script, stops)
    for pool in ("blocks", "slots"):
        one, other = (getattr(r.scheduler.queues, pool) for r in (single, many))
        assert one.allocate(one.num_free) == other.allocate(other.num_free)


def expanded(rank):
    """The plan log, repeated steps written out."""
    log = []
    for turn in rank.turns:
        for j in range(turn.taken):
            plan = turn.plan
            log.append(
                (
                    plan.step + j,
                    plan.kind,
                    [(i.seq_id, i.q, i.k + j, i.slot) for i in plan.items],
                    plan.decode_step + j if not plan.is_prefill else plan.decode_step,
                    (plan.finished, plan.ignored, plan.preempted) if j == 0 else ((), (), ()),
                )
            )
    return log


def test_repeats_happen_at_all():
    """The property above would hold vacuously if nothing were ever repeated."""
    script = {1: [request("A", 10, max_tokens=40), request("B", 4, max_tokens=30)]}
    config = toy(max_model_len=60, num_blocks=60, prefill_attempt_interval=50)
    rank = run(config, script, repeat=99)
    assert max(turn.taken for turn in rank.turns) > 20
    assert len(rank.turns) < 10


@pytest.mark.parametrize("zos", [False, True])
def test_same_tokens_with_and_without_zos(zos):
    script = {i: [request(f"r{i}", 5 * i, max_tokens=9)] for i in range(1, 5)}
    rank = run(toy(enable_zos=zos), script)
    assert rank.output_len == dict.fromkeys(rank.names.values(), 9)
