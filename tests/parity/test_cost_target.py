"""Chunks chosen by a calibrated model: the real executor and the simulator make the same ones."""

import json

import pytest

pytest.importorskip("torch", reason="running models needs the exec extra")

from mdi_exec.engine.llm import LLM
from mdi_exec.engine.sampling import SamplingParams
from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.linear import PREFILL_TERMS, DecodeTerms, LinearCost, PrefillTerms
from mdi_shared.errors import ConfigError
from mdi_sim.retrace import recorded_description, recorded_requests, replay_recorded
from mdi_sim.simulate import simulate
from tests.exec.engines import CHECKPOINT

PROMPTS = (1_300, 700, 40, 1_000, 90)


@pytest.fixture
def model_file(tmp_path):
    """Write a model whose context costs as much as its rows; return the path."""

    def write(usable):
        terms = dict.fromkeys(PREFILL_TERMS, 0.0) | {"rows": 2_000.0, "cached_rows": 1_500.0}
        model = LinearCost(
            prefill=PrefillTerms(**terms),
            decode=DecodeTerms(const=1e6, rows=0.0, sum_k=0.0, n_seqs=0.0),
            fit={"prefill": {"usable_for_control": usable, "held_out_mape": 0.3}},
        )
        path = tmp_path / "model.json"
        path.write_text(json.dumps(model.to_json()))
        return path

    return write


def record(path, **options):
    """Serve a few long prompts that come at once; return the run and what the engine had to say."""
    llm = LLM(
        CHECKPOINT, max_model_len=1_400, num_blocks=64, max_num_seqs=8, record="unused",
        max_num_batched_tokens=1_024, chunk_policy="cost_target", cost_model=str(path), **options,
    )  # fmt: skip
    try:
        # At one time, however long this process is kept from adding the last.
        now_ns = llm.engine.now_ns()
        for index, length in enumerate(PROMPTS):
            params = SamplingParams(max_tokens=3, ignore_eos=True, seq_seed=index)
            prompt = [3 + i % 900 for i in range(length)]
            llm.engine.add_request(prompt, params, arrival_ns=now_ns)
        while llm.engine.has_unfinished_requests():
            llm.engine.step()
        llm.engine.drain()
        return llm.engine.recording.run(llm.engine.scheduler), llm.notes
    finally:
        llm.engine.close()


def chunks(run):
    """Return (request, tokens, context) of every prefill row, in order."""
    items = run.items
    prefill = items[items["step"].isin(run.steps["step"][run.steps["kind"] == "prefill"])]
    return list(zip(prefill["req_id"], prefill["q"], prefill["k"], strict=True))


def test_the_executor_and_the_simulator_choose_the_same_chunks(model_file):
    path = model_file(usable=True)
    run, notes = record(path, prefill_target_ms=2.0)
    assert notes == ()
    prefills = run.steps[run.steps["kind"] == "prefill"]
    assert set(prefills["target_ms"]) == {2.0}
    first = [q for name, q, _ in chunks(run) if name == chunks(run)[0][0]]
    assert len(first) > 2, "the first prompt was meant to be cut"
    assert first[0] > first[1], "chunks shrink as the context grows"
    simulated = simulate(
        recorded_requests(run),
        scheduler=SchedulerConfig.from_mapping(run.metadata.config["scheduler"]),
        cost=LinearCost.from_json(path),
        shape=recorded_description(run).shape,
    )
    assert chunks(simulated) == chunks(run)
    assert chunks(replay_recorded(run)) == chunks(run), "the record alone says how to chunk"


def test_a_model_too_uncertain_leaves_the_token_budget_in_both_worlds(model_file):
    path = model_file(usable=False)
    run, notes = record(path, prefill_target_ms=2.0)
    assert len(notes) == 1
    assert "token budget, 1,024" in notes[0]
    assert "is 30.0%" in notes[0]
    assert chunks(run)[0][1] == 1_024
    simulated = simulate(
        recorded_requests(run),
        scheduler=SchedulerConfig.from_mapping(run.metadata.config["scheduler"]),
        cost=LinearCost.from_json(path),
        shape=recorded_description(run).shape,
    )
    assert chunks(simulated) == chunks(run)


def test_a_cost_model_that_nothing_asks_is_refused():
    with pytest.raises(ConfigError, match=r"cost_model = 'm\.json': is used by chunk_policy"):
        LLM(CHECKPOINT, cost_model="m.json")


def test_a_missing_model_file_is_told_before_weights_are_loaded(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        LLM("no-such-checkpoint", chunk_policy="cost_target", prefill_target_ms=2.0,
            cost_model=str(tmp_path / "none.json"))  # fmt: skip
