"""The engine on a GPU: it never waits where it must not, and nothing that overlaps shows in tokens.

The golden prompts run through kernels (quantised numerics) and through references (float32), in
the ways of `tests/exec/test_engine_golden.py`.
"""

import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from mdi_exec.engine.device_clock import CudaClock
from mdi_exec.engine.llm import LLM
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.errors import NumericsError
from mdi_exec.model.staging import NUM_BUFFERS, Staging
from mdi_exec.numerics import Numerics
from mdi_traces import check_run, load_run
from tests.exec.engines import CHECKPOINT, GOLDEN_MODES, SMALL
from tests.exec.test_engine_golden import ALL_STEPS, FEW_STEPS, LENGTHS, WAYS, Run
from tests.exec.weights import GOLDEN_TINY
from tests.gpu.marks import gpu
from tests.gpu.strictness import unawaited

pytestmark = gpu

GOLDEN = GOLDEN_TINY.parent
FOLDERS = {Numerics.QUANTISED: "logits", Numerics.FLOAT32: "logits_f32"}
PROMPTS = [[5 + i, 17, 300, 42 + i] * (1 + 35 * (i % 3)) for i in range(7)]
PARAMS = [
    SamplingParams(max_tokens=9 + 3 * i, ignore_eos=True, seq_seed=i, temperature=0.9 * (i % 2))
    for i in range(7)
]
MIXED = [
    SamplingParams(max_tokens=6, ignore_eos=True, seq_seed=1, top_p=0.8, top_k=50),
    SamplingParams(max_tokens=9, ignore_eos=True, seq_seed=2, top_logprobs=3),
    *PARAMS[2:],
]


def serve(params=PARAMS, prompts=PROMPTS, *, on_llm=None, **options):
    """Serve prompts on the GPU; returns each one's tokens and logprobs."""
    with LLM(CHECKPOINT, device="cuda", **{**SMALL, **options}) as llm:
        if on_llm is not None:
            on_llm(llm)
        outputs = llm.generate(prompts, params)
    return [(output.token_ids, output.logprobs) for output in outputs]


def files(numerics):
    return {n: load_file(GOLDEN / FOLDERS[numerics] / f"p{n}.safetensors") for n in LENGTHS}


@pytest.fixture(scope="module")
def plain():
    """What one run without graphs and without overlap gives."""
    return serve(use_cuda_graphs=False, enable_zos=False)


# ---- waiting -----------------------------------------------------------------------------------


def forbid_waiting(llm):
    """Serve once, so that everything is compiled and allocated; then make waiting an error."""
    for params in (PARAMS, MIXED):
        llm.generate(PROMPTS, params)
    launch = llm.engine.runner.launch

    def strict(plan, requests):
        with unawaited():
            return launch(plan, requests)

    llm.engine.runner.launch = strict


@pytest.mark.parametrize("use_cuda_graphs", [True, False])
@pytest.mark.parametrize("params", [PARAMS, MIXED], ids=["plain", "mixed"])
def test_a_launch_never_waits_for_the_device(params, use_cuda_graphs):
    serve(params, on_llm=forbid_waiting, use_cuda_graphs=use_cuda_graphs)


@pytest.mark.parametrize("budget", [8192, 61])
def test_a_launch_with_bounded_replay_never_waits(budget):
    serve(on_llm=forbid_waiting, replay_keep_tokens=140, max_num_batched_tokens=budget)


def test_staging_copies_without_waiting():
    staging = Staging("cuda")
    staging.upload({"first": np.arange(5)})
    with unawaited():
        found = [staging.upload({"a": np.arange(i + 1), "b": np.full(3, i, np.int32)})
                 for i in range(5 * NUM_BUFFERS)]  # fmt: skip
    for i, tensors in enumerate(found):
        assert tensors["a"].tolist() == list(range(i + 1))
        assert tensors["b"].tolist() == [i] * 3


def test_the_clock_puts_device_work_where_the_host_saw_it():
    clock = CudaClock()
    before_ns = time.monotonic_ns()
    start = clock.mark()
    torch.cuda._sleep(200_000_000)  # cycles: a hundred milliseconds or so
    end = clock.mark()
    marked_ns = time.monotonic_ns() - before_ns
    clock.wait(end)
    after_ns = time.monotonic_ns()
    start_ns, end_ns = clock.nanoseconds(start), clock.nanoseconds(end)
    assert 20_000_000 < end_ns - start_ns < 1_000_000_000
    assert marked_ns < end_ns - start_ns, "marks do not wait"
    slack_ns = 2_000_000
    assert before_ns - slack_ns < start_ns < end_ns < after_ns + slack_ns


# ---- nothing shows -----------------------------------------------------------------------------


@pytest.mark.parametrize("enable_zos", [True, False])
@pytest.mark.parametrize("use_cuda_graphs", [True, False])
def test_graphs_and_overlap_change_no_bit(plain, enable_zos, use_cuda_graphs):
    assert serve(enable_zos=enable_zos, use_cuda_graphs=use_cuda_graphs) == plain


@pytest.mark.parametrize("budget", [8192, 200, 61])
def test_graphs_captured_beforehand_change_no_bit(plain, budget):
    """Prefill steps of all sizes run as graphs then, of one prompt, of several, and of chunks."""

    def warm_up(llm):
        llm.warm_up()
        assert llm.engine.runner.graphs is not None

    assert serve(on_llm=warm_up, max_num_batched_tokens=budget) == plain


def test_filters_and_alternatives_change_no_token():
    """Tokens are the same. Beside a filtered row a plain one is sampled by the reference, whose
    log-probabilities may differ in the last place from the kernel's."""
    expected = serve(MIXED, use_cuda_graphs=False, enable_zos=False)
    found = serve(MIXED)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, mine), (_, theirs) in zip(found, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a == pytest.approx(b, abs=1e-5)
    assert all(len(logprobs) >= 3 for logprobs in expected[1][1])


def test_company_changes_no_bit(plain):
    alone = [serve([params], [prompt])[0] for params, prompt in zip(PARAMS, PROMPTS, strict=True)]
    assert alone == plain
    assert serve(max_num_batched_tokens=61) == plain


def test_the_same_run_twice_gives_the_same_tokens():
    assert serve() == serve()


@pytest.mark.parametrize("use_cuda_graphs", [True, False])
def test_a_fault_is_located(use_cuda_graphs):
    with LLM(CHECKPOINT, device="cuda", **SMALL, use_cuda_graphs=use_cuda_graphs) as llm:
        llm.engine.add_request(PROMPTS[0], PARAMS[6], "first")
        for _ in range(4):
            llm.engine.step()
        with torch.inference_mode():
            llm.rank.model.layers[3].attn_norm.weight.fill_(torch.nan)
        with pytest.raises(NumericsError, match=r"'first'.*come out of layer 3"):
            llm.engine.drain()


def test_a_recorded_run_is_sound_and_measured(tmp_path):
    options = {**SMALL, "max_num_batched_tokens": 200}
    with LLM(CHECKPOINT, device="cuda", record=str(tmp_path / "run"), **options) as llm:
        llm.generate(PROMPTS, PARAMS)
    run = load_run(tmp_path / "run")
    assert not check_run(run)
    decodes = run.steps[run.steps["kind"] == "decode"]
    assert (decodes["graph_size"] >= decodes["n_seqs"]).all()
    assert (decodes["n_tokens_padded"] == decodes["graph_size"]).all()
    # While graphs are captured, the first steps of a size, device and host clocks drift apart.
    assert (decodes["sample_ms"] > 0).mean() > 0.9
    assert (decodes["fwd_ms"] > 0).all()
    assert (run.steps["gap_ms"][1:] >= 0).all()


# ---- golden prompts ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_batch():
    return {n: Run(n, files(n), steps=ALL_STEPS, device="cuda") for n in GOLDEN_MODES}


@pytest.mark.parametrize("numerics", GOLDEN_MODES, ids=lambda mode: mode.value)
def test_golden_prompts_in_one_batch(one_batch, numerics):
    one_batch[numerics].check_against_golden()


@pytest.mark.parametrize("use_cuda_graphs", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_golden_prompts_through_kernels(one_batch, way, use_cuda_graphs):
    run = Run(Numerics.QUANTISED, files(Numerics.QUANTISED), steps=FEW_STEPS, device="cuda",
              use_cuda_graphs=use_cuda_graphs, **WAYS[way])  # fmt: skip
    run.check_against_golden()
    run.check_same_bits(one_batch[Numerics.QUANTISED])


@pytest.mark.parametrize("way", ["chunks of 200", "chunks of 61 without ZOS"])
def test_golden_prompts_without_rounding(way):
    """Through references, whose library products promise no equal bits on a GPU."""
    run = Run(Numerics.FLOAT32, files(Numerics.FLOAT32), steps=2, device="cuda", **WAYS[way])
    run.check_against_golden()


@pytest.mark.parametrize("enable_zos", [True, False])
def test_golden_prompts_preempted(one_batch, enable_zos):
    few = {n: file for n, file in files(Numerics.QUANTISED).items() if 37 <= n <= 300}
    run = Run(Numerics.QUANTISED, few, steps=ALL_STEPS, enable_zos=enable_zos, num_blocks=6,
              max_model_len=400, max_num_batched_tokens=200, device="cuda")  # fmt: skip
    assert run.num_preempted >= 2
    run.check_against_golden()
    run.check_same_bits(one_batch[Numerics.QUANTISED])


def test_golden_prompts_with_bounded_replay():
    few = {n: load_file(GOLDEN / "replay" / f"p{n}.safetensors") for n in (129, 300, 520)}
    whole = Run(Numerics.QUANTISED, few, steps=12, replay_keep_tokens=140, device="cuda")
    chunked = Run(Numerics.QUANTISED, few, steps=12, replay_keep_tokens=140, enable_zos=False,
                  max_num_batched_tokens=61, device="cuda")  # fmt: skip
    whole.check_against_golden()
    chunked.check_against_golden()
    chunked.check_same_bits(whole)
