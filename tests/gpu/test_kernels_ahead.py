"""What a served model really compiles is what was foretold without running it."""

from mdi_exec.engine.kernels_ahead import Reach, reachable_kernels
from mdi_exec.engine.llm import LLM
from mdi_exec.engine.sampling import SamplingParams
from tests.exec.engines import CHECKPOINT, SMALL
from tests.gpu.marks import gpu

pytestmark = gpu


def test_no_kernel_is_compiled_that_was_not_foretold(monkeypatch):
    from mdi_exec.ops.kernels import jit  # needs the kernel compiler

    met = []

    def note(architecture, sample):
        met.append(sample)
        return compile_for(architecture, sample)

    compile_for = jit.compile_for
    monkeypatch.setattr(jit, "compile_for", note)
    jit._compiled.cache_clear()
    prompts = [[5 + i, 17, 300, 42 + i] * (1 + 30 * i) for i in range(4)]
    with LLM(CHECKPOINT, device="cuda", **SMALL, compile_ahead=False) as llm:
        llm.generate(prompts, SamplingParams(max_tokens=6, ignore_eos=True, temperature=0.5))
        llm.warm_up()
        reach = Reach.of(
            llm.engine.runner.cache_layout, llm.scheduler_config, llm.options.expanded_weights_bytes
        )  # fmt: skip
    assert met
    assert set(met) <= set(reachable_kernels(reach, jit.current_architecture()))
