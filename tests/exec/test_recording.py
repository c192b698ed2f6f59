"""What a recorded run says of its host and device, step by step."""

import numpy as np
import pytest
import torch

from mdi_exec.engine.llm import LLM
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.engine.step_program import StepProgram
from mdi_traces import check_run, load_run
from tests.exec.engines import CHECKPOINT, SMALL

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(params=[True, False], ids=["ZOS", "without ZOS"])
def steps(request, tmp_path):
    options = {**SMALL, "enable_zos": request.param, "max_num_batched_tokens": 40}
    with LLM(CHECKPOINT, record=str(tmp_path / "run"), **options) as llm:
        llm.generate([[5] * 50, [17, 3], [8]], PARAMS)
    run = load_run(tmp_path / "run")
    assert not check_run(run)
    return run.steps


def test_host_times_are_measured(steps):
    busy = steps[steps["n_seqs"] > 0]
    assert len(busy) > 6
    for name in ("cpu_prep_ms", "cpu_launch_ms", "cpu_sched_ms", "cpu_proc_ms"):
        assert (busy[name] >= 0).all(), name
    whole_ms = (steps["t_dev_end"].max() - steps["t_sched"].min()) / 1e6
    assert busy["cpu_launch_ms"].sum() <= whole_ms
    assert (busy["cpu_prep_ms"] > 0).all()
    in_ms = steps["t_launch"] - steps["t_sched"]
    assert (busy["cpu_sched_ms"] + busy["cpu_prep_ms"] <= in_ms[busy.index] / 1e6 + 1e-3).all()


def test_ingress_is_that_of_the_newest_request(steps):
    """All three come before the first step; no other step has an arrival."""
    assert steps["ingress_ms"][0] > 0
    assert steps["ingress_ms"][1:].isna().all()


def test_device_time_is_forward_and_sampling_and_gaps_lie_between(steps):
    np.testing.assert_allclose(steps["fwd_ms"] + steps["sample_ms"], steps["gpu_ms"], rtol=1e-4)
    busy = steps[steps["n_seqs"] > 0]
    assert (busy["sample_ms"] > 0).all()
    assert (busy["fwd_ms"] > 0).all()
    assert np.isnan(steps["gap_ms"][0])
    between = (steps["t_dev_start"][1:].to_numpy() - steps["t_dev_end"][:-1].to_numpy()) / 1e6
    np.testing.assert_allclose(steps["gap_ms"][1:], between, atol=1e-3)
    assert (between >= 0).all()
    assert (steps["graph_size"] == 0).all(), "a CPU has no graphs"


def test_imbalance_is_the_busiest_expert_over_the_mean(small_runners):
    runner = next(iter(small_runners.values()))
    program = StepProgram(runner.model, runner.cache(), None, max_rows=1, measures_experts=True)
    counts = [torch.tensor([4, 0, 0, 0]), torch.tensor([1, 1, 1, 1]), torch.tensor([2, 2, 0, 0])]
    assert program._imbalance([c.to(torch.int32) for c in counts]).item() == pytest.approx(7 / 3)
    assert torch.isnan(program._imbalance([])).all()
