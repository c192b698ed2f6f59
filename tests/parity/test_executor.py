"""The real executor against the simulator: a recorded run, retraced, makes the same plans.

Many requests with forced tokens on the tiny model, arriving while earlier ones run, some aborted,
in a pool small enough that some are preempted. Durations are whatever this machine takes; decisions
may not depend on more than the record holds.
"""

import random

import pytest

pytest.importorskip("torch", reason="running models needs the exec extra")

from mdi_exec.engine.llm import LLM
from mdi_exec.engine.sampling import SamplingParams
from mdi_sim.retrace import replay_recorded
from mdi_traces.check import check_run
from tests.exec.engines import CHECKPOINT

NUM_REQUESTS = 120
PLAN_COLUMNS = (
    "step", "kind", "n_seqs", "n_tokens", "n_tokens_padded", "sum_k", "n_chunked", "n_finished",
    "n_ignored", "n_preempted", "n_dropped", "free_blocks", "free_slots", "n_waiting", "n_running",
    "decode_step", "vote", "want",
)  # fmt: skip


def record(enable_zos, rng, num_drafts=0):
    """Serve requests that come in bursts while others run; return the run and its preemptions."""
    options = {
        "num_draft_tokens": num_drafts,
        "max_model_len": 500, "num_blocks": 10, "max_num_seqs": 48, "enable_zos": enable_zos,
        "max_num_batched_tokens": 300, "prefill_attempt_interval": 3,
        "prefill_any_attempt_interval": 5, "record": "unused",
    }  # fmt: skip
    llm = LLM(CHECKPOINT, **options)
    engine = llm.engine
    if num_drafts:
        let_drafts_be_right(engine, random.Random(5))
    try:
        sent = 0
        while sent < NUM_REQUESTS or engine.has_unfinished_requests():
            for _ in range(min(rng.choice([0, 8, 24, 40]), NUM_REQUESTS - sent)):
                length = rng.choice([2, 3, 5, 9, 30, 126, 127, 127])
                is_long = length > 100  # it runs until it outgrows its block: some are preempted
                params = SamplingParams(
                    max_tokens=4 if is_long else rng.randint(2, 6),
                    # Forced: who stops early is not the model's to say.
                    golden_token_ids=tuple(rng.randrange(3, 1000) for _ in range(6)),
                    stop_token_ids=() if is_long else tuple(range(sent % 10, 1024, 10)),
                )
                prompt = [rng.randrange(3, 1000) for _ in range(length)]
                name = engine.add_request(prompt, params)
                if rng.random() < 0.1:
                    engine.abort_request(name)
                sent += 1
            engine.step()
            if rng.random() < 0.2:
                engine.abort_request(str(rng.randrange(max(sent, 1))))
        engine.drain()
        return engine.recording.run(engine.scheduler), engine.scheduler.num_preempted
    finally:
        engine.close()


def let_drafts_be_right(engine, rng):
    """Have drafts be golden tokens now and then, which the model's own never are."""
    drafting = engine.runner._program.drafting
    propose = drafting.propose

    def proposed(batch, verified, rows):
        made = propose(batch, verified, rows)
        by_seed = {state.params.rng_seed: state for state in list(engine.book.live.values())}
        bases, seeds = batch.starts + verified.accepted, rows.seeds[batch.cu_q[:-1]]
        for slot, base, seed in zip(batch.slots, bases.tolist(), seeds.tolist(), strict=True):
            state = by_seed.get(seed % 2**64)
            for i in range(drafting.size):
                if state is not None and rng.random() < 0.7:
                    token = state.params.golden_token(base + 2 + i - state.prompt_len)
                    drafting.ids[slot, i] = max(token, 0)
        return made

    drafting.propose = proposed


@pytest.mark.parametrize(
    ("enable_zos", "num_drafts"),
    [(True, 0), (False, 0), (True, 2)],
    ids=["ZOS", "synchronous", "drafts"],
)
def test_a_recorded_run_retraced_makes_the_same_plans(enable_zos, num_drafts):
    run, num_preempted = record(enable_zos, random.Random(11), num_drafts)
    accepted = run.items["accepted"]
    assert set(accepted) == set(range(num_drafts + 1))
    assert len(run.requests) == NUM_REQUESTS
    assert num_preempted > 0, "the pool was meant to be too small"
    assert set(run.requests["finish_reason"]) == {"abort", "stop", "length"}
    assert (run.steps["n_chunked"] > 0).any(), "some prompt was meant to be cut"
    assert (run.steps["n_dropped"] > 0).any() or not enable_zos
    assert [finding for finding in check_run(run) if not finding.skipped] == []
    again = replay_recorded(run)
    for column in PLAN_COLUMNS:
        real = run.steps_table[column].to_pylist()
        assert again.steps_table[column].to_pylist() == real, column
    items = [name for name in run.items_table.column_names if name != "run_id"]
    assert again.items_table.select(items).equals(run.items_table.select(items))
    ends = run.requests[["req_id", "finish_reason", "output_len"]]
    assert again.requests[["req_id", "finish_reason", "output_len"]].equals(ends)
