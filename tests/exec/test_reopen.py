"""One loaded model behind one engine after another."""

import weakref

import pytest

pytest.importorskip("torch", reason="running models needs the exec extra")


from mdi_exec.engine.llm import LLM
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.errors import EngineStoppedError
from mdi_shared.errors import ConfigError
from mdi_traces.run import load_run
from tests.exec.engines import CHECKPOINT, SMALL, is_empty
from tests.exec.groups import llm_results

PROMPTS = [[5] * 140, [17, 3], [8]]
PARAMS = [SamplingParams(max_tokens=4, ignore_eos=True, seq_seed=i) for i in range(len(PROMPTS))]


def tokens(llm):
    return [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]


def test_other_options_on_the_same_weights_give_the_same_tokens(tmp_path):
    with LLM(CHECKPOINT, **SMALL, record=str(tmp_path / "one")) as llm:
        model, first = llm.rank.model, tokens(llm)
        llm.engine.add_request([9] * 20, SamplingParams(max_tokens=50), "left")
        llm.engine.step()
        llm.reopen(**{**SMALL, "num_blocks": 9}, enable_zos=False, max_num_batched_tokens=64,
                   record=str(tmp_path / "two"))  # fmt: skip
        assert llm.rank.model is model
        assert (llm.scheduler_config.num_blocks, llm.options.record) == (9, str(tmp_path / "two"))
        assert llm.engine.scheduler.config is llm.scheduler_config
        assert tokens(llm) == first
        assert is_empty(llm.engine)
        llm.reopen(**SMALL)
        assert llm.options.record is None, "an option that is not given has its default again"
        assert llm.scheduler_config.enable_zos
        assert tokens(llm) == first
    one, two = (load_run(tmp_path / name) for name in ("one", "two"))
    assert one.metadata.config["scheduler"]["num_blocks"] == SMALL["num_blocks"]
    assert list(one.requests["finish_reason"].isna()) == [False] * len(PROMPTS) + [True]
    assert two.metadata.config["scheduler"]["num_blocks"] == 9
    assert len(two.requests) == len(PROMPTS)
    assert (one.steps["n_tokens"].max(), two.steps["n_tokens"].max()) == (143, 64)


def test_the_old_cache_is_freed_even_if_somebody_holds_its_engine():
    with LLM(CHECKPOINT, **SMALL) as llm:
        engine = llm.engine
        memory = [weakref.ref(t) for t in engine.runner._program.cache.tails.values()]
        assert memory
        llm.reopen(**SMALL)
        assert not any(ref() is not None for ref in memory)
        with pytest.raises(EngineStoppedError, match="it was closed"):
            engine.add_request([5], PARAMS[0])
        assert len(tokens(llm)) == len(PROMPTS)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"device": "cuda"}, "device = 'cuda': the model was loaded with 'cpu'"),
        ({"numerics": "float32"}, "numerics = 'float32': the model was loaded with 'quantised'"),
        ({"expanded_weights_memory_gb": 2.0}, "expanded_weights_memory_gb = 2.0: the model was"),
        ({"data_parallel_size": 2}, "data_parallel_size = 2: the model was loaded with 1"),
        ({"max_seqs": 2}, "max_seqs = 2: unknown option"),
        ({"num_blocks": 3}, "num_blocks"),
        ({"max_model_len": 1 << 20}, "max_model_len"),
        ({"cost_model": "none.json"}, "cost_model"),
    ],
    ids=str,
)
def test_a_refused_option_leaves_the_engine_as_it_was(llm, options, said):
    engine, before = llm.engine, llm.options
    with pytest.raises(ConfigError) as refused:
        llm.reopen(**{**SMALL, **options})
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert (llm.engine, llm.options) == (engine, before)
    assert llm.generate([[5]], PARAMS[0])[0].finish_reason == "length"


@pytest.fixture(scope="module")
def llm():
    with LLM(CHECKPOINT, **SMALL) as loaded:
        yield loaded


def test_what_is_given_again_may_be_given(llm):
    llm.reopen(**SMALL, device="cpu", numerics="quantised")
    assert len(tokens(llm)) == len(PROMPTS)


def test_a_closed_one_stays_closed():
    llm = LLM(CHECKPOINT, **SMALL)
    llm.close()
    with pytest.raises(EngineStoppedError):
        llm.reopen(**SMALL)


def test_launched_ranks_reopen_together(llm, tmp_path):
    def serve():
        with LLM(CHECKPOINT, **SMALL, record=str(tmp_path / "run")) as ranked:
            first = tokens(ranked)
            ranked.reopen(**SMALL, placement="least_kv")
            return first, tokens(ranked)

    llm.reopen(**SMALL)
    alone = tokens(llm)
    assert llm_results(2, serve) == [(alone, alone)] * 2
    assert set(load_run(tmp_path / "run").requests["rank"]) == {0, 1}
