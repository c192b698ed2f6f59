"""Every scheduling policy on the real engine: a recorded run, retraced, makes the same plans."""

import random
import zlib

import pytest

pytest.importorskip("torch", reason="running models needs the exec extra")

from pathlib import Path

import torch

from mdi_exec.engine.llm import LLM
from mdi_exec.engine.sampling import SamplingParams
from mdi_shared.errors import PolicyError
from mdi_shared.policies import POLICIES, Policy
from mdi_shared.request import Hints
from mdi_sim.retrace import replay_recorded
from tests.fuzz.policies import PARAMETERS
from tests.parity.test_executor import PLAN_COLUMNS

CHECKPOINT = Path(__file__).parents[1] / "golden" / "tiny"
NUM_REQUESTS = 8
OPTIONS = {
    "max_model_len": 200, "num_blocks": 4, "max_num_seqs": 8, "max_num_batched_tokens": 130,
    "prefill_attempt_interval": 2, "prefill_any_attempt_interval": 5, "numerics": "float32",
}  # fmt: skip
COMBINED = ("order=srpt:sigma=1+admit=future+victim=newest+max_wait_s=0.2", "fcfs")


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    torch.set_num_threads(1)
    with LLM(CHECKPOINT, **OPTIONS, record=str(tmp_path_factory.mktemp("first") / "run")) as llm:
        yield llm


def serve(llm, rng):
    """Serve requests of all lengths in bursts; return the recorded run."""
    engine = llm.engine
    sent = 0
    while sent < NUM_REQUESTS or engine.has_unfinished_requests():
        for _ in range(min(rng.choice([3, 5]), NUM_REQUESTS - sent)):
            draw = zlib.crc32(str(sent).encode())
            hints = Hints(
                predicted_len=1 + draw % 12 if draw % 3 else None, client="ab"[draw % 2],
                priority=draw % 3, deadline_ns=None if draw % 4 else 5_000_000,
                program=["p", "q", None][draw % 5 % 3],
            )  # fmt: skip
            prompt = [3 + i % 900 for i in range(rng.choice([2, 3, 9, 127]))]
            params = SamplingParams(
                max_tokens=rng.randint(2, 4), seq_seed=sent, ignore_eos=True, hints=hints
            )
            engine.add_request(prompt, params)
            sent += 1
        engine.step()
    engine.drain()
    return engine.recording.run(engine.scheduler)


def assert_same_plans(run, again):
    for column in PLAN_COLUMNS:
        real = run.steps_table[column].to_pylist()
        assert again.steps_table[column].to_pylist() == real, column
    items = [name for name in run.items_table.column_names if name != "run_id"]
    assert again.items_table.select(items).equals(run.items_table.select(items))


SPECS = [f"{name}:{PARAMETERS[name]}" if name in PARAMETERS else name for name in POLICIES]


@pytest.mark.parametrize("spec", [*SPECS, *COMBINED])
def test_a_recorded_run_retraced_makes_the_same_plans(llm, spec, tmp_path):
    llm.reopen(**OPTIONS, policy=spec, record=str(tmp_path / "run"))
    run = serve(llm, random.Random(5))
    assert run.metadata.config["policy"] == spec
    assert len(run.requests) == NUM_REQUESTS
    assert_same_plans(run, replay_recorded(run))


@pytest.mark.parametrize("spec", ["priority:evict=1", "srpt:evict=1", "mlfq:evict=1,quantum=40"])
def test_who_gives_way_to_a_more_urgent_one_goes_on_later(llm, spec, tmp_path):
    llm.reopen(**OPTIONS, policy=spec, record=str(tmp_path / "run"))
    engine, ended = llm.engine, []
    for i in range(3):  # they have all three blocks
        params = SamplingParams(max_tokens=20, seq_seed=i, ignore_eos=True)
        engine.add_request([5 + i] * 40, params)
    for _ in range(8):
        engine.step()
    urgent = Hints(priority=1, predicted_len=2)
    engine.add_request([3] * 30, SamplingParams(max_tokens=2, ignore_eos=True, hints=urgent))
    while engine.has_unfinished_requests():
        ended += [output.req_id for output in engine.step() if output.finished]
    engine.drain()
    run = engine.recording.run(engine.scheduler)
    assert ended[0] == "3"
    at_prefill = run.steps[run.steps["kind"] == "prefill"]
    assert at_prefill["n_preempted"].sum() == run.requests["n_preempt"].sum() == 1
    assert run.requests["output_len"].tolist() == [20, 20, 20, 2]
    assert_same_plans(run, replay_recorded(run))


class ShortestFirst(Policy):
    """A user's own."""

    def order(self, seq, view):
        return seq.request.prompt_len


def test_a_policy_of_ones_own_is_replayed_by_giving_it_again(llm, tmp_path):
    llm.reopen(**OPTIONS, policy=ShortestFirst(), record=str(tmp_path / "run"))
    run = serve(llm, random.Random(6))
    assert run.metadata.config["policy"] == "ShortestFirst"
    assert_same_plans(run, replay_recorded(run, policy=ShortestFirst()))


class Broken(Policy):
    """A user's own, with a mistake."""

    def order(self, seq, view):
        return 1 / (seq.request.prompt_len - 9)


def test_a_policy_that_raises_ends_the_engine_in_one_line(tmp_path):
    with LLM(CHECKPOINT, **OPTIONS, policy=Broken()) as llm:
        params = SamplingParams(max_tokens=2)
        with pytest.raises(PolicyError) as error:
            llm.generate([[5] * 3, [5] * 9], params)
    assert str(error.value) == (
        "policy Broken: order for request '1' raised ZeroDivisionError: division by zero"
    )
