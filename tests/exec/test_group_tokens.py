"""The same tokens on 1, 2 and 4 ranks, whatever else is different; and one record of all ranks."""

import pytest

pytest.importorskip("torch", reason="running models needs the exec extra")


from mdi_exec.engine.llm import LLM
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.engine.serve_trace import TraceClient
from mdi_exec.errors import GroupError
from mdi_shared.errors import ConfigError
from mdi_sim.retrace import replay_recorded
from mdi_traces.check import check_run
from mdi_traces.generate import generate_workload
from mdi_traces.requests import cut_lengths
from mdi_traces.run import load_run
from tests.exec.engines import CHECKPOINT, SMALL
from tests.exec.groups import llm_results, run_ranks

# On two ranks, rank 0 gets the long ones, which outgrow their first block together.
PROMPTS = [[3 + i] * length for i, length in enumerate((126, 5, 127, 9, 125, 1, 126, 2))]
PARAMS = [SamplingParams(max_tokens=4, ignore_eos=True, seq_seed=i, temperature=0.9, top_logprobs=2)
          for i in range(len(PROMPTS))]  # fmt: skip
PRESSED = {"num_blocks": 6, "max_model_len": 600}


def generate(**options):
    with LLM(CHECKPOINT, **{**SMALL, **options}) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        return [(o.token_ids, o.logprobs, o.finish_reason) for o in outputs], llm.engine


@pytest.fixture(scope="module")
def alone():
    return {numerics: generate(numerics=numerics)[0] for numerics in ("float32", "quantised")}


@pytest.mark.parametrize(
    ("size", "numerics", "options"),
    [
        (
            2,
            "float32",
            {"enable_zos": False, "max_num_batched_tokens": 50, "exchange": "all_to_all"},
        ),
        (2, "float32", PRESSED),
        (2, "float32", {"max_num_batched_tokens": 50, "policy": "mixed"}),
        (2, "quantised", {**PRESSED, "enable_zos": False, "exchange": "all_to_all"}),
        (4, "float32", {"max_num_batched_tokens": 50}),
        (
            4,
            "float32",
            {"enable_zos": False, "max_num_batched_tokens": 50, "exchange": "all_to_all"},
        ),
        (4, "quantised", {"placement": "least_kv"}),
        (4, "quantised", {"exchange": "all_to_all"}),
    ],
    ids=str,
)
def test_tokens_do_not_depend_on_the_number_of_ranks(size, numerics, options, alone):
    ranks = llm_results(size, lambda: generate(numerics=numerics, **options))
    for outputs, _ in ranks:  # every rank knows all outputs
        assert outputs == alone[numerics]
    preempted = [engine.scheduler.num_preempted for _, engine in ranks]
    assert (preempted[0] > 0) == ("num_blocks" in options)
    assert not any(preempted[1:]), "only one rank was meant to be short of memory"


def test_one_record_of_all_ranks_is_sound_and_retraces(tmp_path):
    work = generate_workload("azure-conv", num_requests=10, seed=4, rate=40.0)
    work = cut_lengths(work, max_prompt=40, max_output=4)

    def serve():
        with LLM(CHECKPOINT, **SMALL, record=str(tmp_path / "run")) as llm:
            TraceClient(llm.engine, work).run()

    llm_results(2, serve)
    run = load_run(tmp_path / "run")
    assert not [finding for finding in check_run(run) if not finding.skipped]
    assert set(run.requests["rank"]) == {0, 1}
    assert set(run.requests["finish_reason"]) == {"length"}
    assert (run.steps["wait_ms"] > 0).any()
    again = replay_recorded(run)
    assert again.steps_table["kind"].equals(run.steps_table["kind"])


def test_an_error_in_the_callers_code_ends_all_and_keeps_what_was_recorded(tmp_path):
    def serve():
        with LLM(CHECKPOINT, **SMALL, record=str(tmp_path / "run")) as llm:
            llm.engine.expect_requests()
            llm.engine.add_request([5, 6, 7], SamplingParams(max_tokens=50, ignore_eos=True))
            while llm.engine.has_unfinished_requests():
                llm.engine.step()
                if llm.rank.group.rank == 1 and llm.engine.scheduler.step == 6:
                    raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        llm_results(2, serve)
    for rank in (0, 1):
        kept = load_run(tmp_path / f"run.rank{rank}")
        assert len(kept.steps) >= 4
        assert kept.requests["unfinished_reason"].tolist() == ["the engine was closed"]


def test_ranks_that_disagree_say_so_on_every_rank():
    sizes = iter([16, 15])

    def make():
        LLM(CHECKPOINT, **{**SMALL, "max_num_seqs": next(sizes)})

    with pytest.raises(ConfigError, match=r"max_num_seqs = 1[56]: ranks must agree"):
        llm_results(2, make)


def test_require_equal_names_the_rank_that_differs():
    errors = run_ranks(3, lambda group: group.require_equal({"a": 1, "b": group.rank == 2}))
    told = [str(error) for error in errors]
    assert all("b = False: ranks must agree, but rank 2 has True" in line for line in told)
    assert any(not isinstance(error, GroupError) for error in errors)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data_parallel_size": 3}, "must divide the model's 16 routed experts"),
        ({"data_parallel_size": 0}, "must be at least 1"),
        ({"data_parallel_size": 2, "expert_parallel_size": 4}, "must equal the number of ranks"),
        ({"expert_parallel_size": 2}, "must equal the number of ranks"),
        ({"placement": "least_luck"}, "is not a placement; known: round_robin, random"),
        ({"group_port": 70_000}, "must be from 0 to 65535"),
        ({"group_timeout_s": 0}, "must be above 0 and at most 1,000,000 s"),
    ],
)
def test_options_of_a_group_are_checked_before_anything_starts(options, message):
    with pytest.raises(ConfigError, match=message):
        LLM(CHECKPOINT, **SMALL, **options)


def test_without_a_listener_each_rank_logs_what_it_will_take(caplog):
    caplog.set_level("INFO", logger="mdi_exec.engine.llm")
    llm_results(2, lambda: LLM(CHECKPOINT, **SMALL).close())
    lines = sorted(record.getMessage() for record in caplog.records)
    assert [line[:14] for line in lines] == ["rank 0 of 2: 1", "rank 1 of 2: 1"]
