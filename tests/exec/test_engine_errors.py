"""What callers can get wrong: each mistake is one line that names the thing, its value, and what
is allowed, and none of them is fatal to what else is running, unless nothing can run on.
"""

import json
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from mdi_exec.engine.llm import LLM
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.errors import EngineStoppedError, NumericsError
from mdi_shared.errors import ConfigError
from tests.exec.engines import CHECKPOINT, SMALL, is_empty

SHORT = SamplingParams(max_tokens=3, ignore_eos=True)


@pytest.fixture(scope="module")
def llm():
    with LLM(CHECKPOINT, **SMALL) as loaded:
        yield loaded


def one_line(error):
    text = str(error.value)
    assert "\n" not in text
    return text


# ---- requests ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "prompt_token_ids = []: must be a list of at least one token"),
        ("", "prompt_token_ids = []: must be a list of at least one token"),
        ([5, 1024], "prompt_token_ids[1] = 1024: must be an int from 0 to 1023"),
        ([-1], "prompt_token_ids[0] = -1: must be an int from 0 to 1023"),
        ([5, 6, 2.0], "prompt_token_ids[2] = 2.0: must be an int from 0 to 1023"),
        ([True], "prompt_token_ids[0] = True: must be an int from 0 to 1023"),
    ],
)
def test_a_bad_prompt_is_named_and_no_prompt_of_the_call_is_started(llm, prompt, message):
    with pytest.raises(ConfigError) as error:
        llm.generate([[5, 6], prompt], SHORT)
    assert one_line(error) == message
    assert is_empty(llm.engine)
    (out,) = llm.generate([[5, 6]], SHORT)
    assert len(out.token_ids) == 3


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"prompts": 5}, "prompts = 5: must be a text, a list of token ids, or a list of these"),
        ({"prompts": [[5], 6]}, "prompts = 6: each must be a text or a list of token ids"),
        ({"prompts": {"a": 1}}, "prompts = {'a': 1}: must be a text, a list of token ids, or"),
        ({"prompts": "\ud800"}, "prompts = '\\ud800': must be a text of Unicode characters"),
        (
            {"prompts": "a", "sampling_params": {"n": 2}},
            "sampling_params = {'n': 2}: must be a SamplingParams, or a list of them",
        ),
        (
            {"prompts": "a", "sampling_params": [None]},
            "sampling_params[0] = None: must be a SamplingParams",
        ),
        ({}, "prompts = None: give either prompts or prompt_token_ids"),
        ({"prompts": [[5]], "prompt_token_ids": [[5]]}, "give either prompts or prompt_token_ids"),
        (
            {"prompts": [[5], [6]], "sampling_params": [SHORT]},
            "sampling_params = 1: there must be one for each of the 2 prompts",
        ),
    ],
)
def test_calls_that_contradict_themselves(llm, call, message):
    with pytest.raises(ConfigError) as error:
        llm.generate(**call)
    assert message in one_line(error)
    with pytest.raises(ConfigError):
        next(llm.stream(**call))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature = -0.1: must be from 0 (greedy) to 3.4e+38"),
        ({"temperature": float("nan")}, "temperature = nan: must be from 0"),
        ({"top_p": 0.0}, "top_p = 0.0: must be above 0 and at most 1 (1 = off)"),
        ({"top_p": 1.5}, "top_p = 1.5: must be above 0 and at most 1 (1 = off)"),
        ({"top_k": 0}, "top_k = 0: must be from 1 to 2147483647, or -1 (off)"),
        ({"max_tokens": -1}, "max_tokens = -1: must be from 1 to 2147483647 (0 counts as 1)"),
    ],
)
def test_bad_sampling_parameters(options, message):
    with pytest.raises(ConfigError) as error:
        SamplingParams(**options)
    assert one_line(error).startswith(message)


def test_tokens_outside_the_vocabulary_in_sampling_parameters(llm):
    for name in ("stop_token_ids", "golden_token_ids"):
        with pytest.raises(ConfigError) as error:
            llm.generate([[5]], SamplingParams(**{name: (7, 1024)}))
        assert one_line(error) == f"{name} = (7, 1024): each must be below vocab_size = 1024"
    assert is_empty(llm.engine)


def test_a_prompt_too_long_is_answered_and_stops_nobody(llm):
    limit = SMALL["max_model_len"]
    outputs = llm.generate([[5] * (limit + 1), [5, 6]], SHORT)
    assert [out.finish_reason for out in outputs] == ["prompt_length_exceeded", "length"]
    assert [len(out.token_ids) for out in outputs] == [0, 3]
    assert is_empty(llm.engine)


@pytest.mark.parametrize("name", [5, None, ["x"], b"x", "\ud800"])
def test_a_name_that_is_no_text(llm, name):
    for call in (
        lambda: llm.engine.abort_request(name),
        lambda: llm.engine.add_request([5], SHORT, name if name is not None else 7),
    ):
        with pytest.raises(ConfigError) as error:
            call()
        assert one_line(error).endswith("must be a text of Unicode characters")
    assert is_empty(llm.engine)


@pytest.mark.parametrize(
    ("request_of", "message"),
    [
        (((5, 6), SHORT), "prompt_token_ids = (5, 6): must be a list of at least one token"),
        ((torch.tensor([5]), SHORT), "prompt_token_ids = tensor([5]): must be a list"),
        (([5], {"n": 1}), "sampling_params = {'n': 1}: must be a SamplingParams"),
        (([5], SamplingParams(n=2)), "n = 2: must be 1 for a request"),
        (([5], SHORT, None, {"arrival_ns": 1.5}), "arrival_ns = 1.5: must be an int"),
    ],
    ids=lambda value: "",
)
def test_a_request_of_the_wrong_kind_is_refused_by_the_engine(llm, request_of, message):
    ids, params, *rest = request_of
    with pytest.raises(ConfigError) as error:
        llm.engine.add_request(ids, params, **(rest[1] if rest else {}))
    assert one_line(error).startswith(message)
    assert is_empty(llm.engine)


def test_an_id_in_use(llm):
    llm.engine.add_request([5], SHORT, "mine")
    with pytest.raises(ConfigError) as error:
        llm.engine.add_request([6], SHORT, "mine")
    assert one_line(error) == "req_id = 'mine': is in use by an unfinished request"
    while llm.engine.has_unfinished_requests():
        llm.engine.step()
    llm.engine.drain()
    assert is_empty(llm.engine)


# ---- options -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_sequences": 3}, "max_sequences = 3: unknown option; known: block_size, "),
        ({"num_blocks": 5, "kv_cache_memory_gb": 0.1},
         "num_blocks = 5: contradicts kv_cache_memory_gb; give one of them"),
        ({"gpu_memory_utilization": 0.5, "kv_cache_memory_gb": 0.1},
         "gpu_memory_utilization = 0.5: contradicts kv_cache_memory_gb; give one of them"),
        ({"gpu_memory_utilization": 0.5},
         "gpu_memory_utilization = 0.5: needs a GPU; on a CPU give kv_cache_memory_gb"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization = 1.5: must be above 0 and at"),
        ({"kv_cache_memory_gb": 0.0}, "kv_cache_memory_gb = 0.0: must be above 0 GB"),
        ({"kv_cache_memory_gb": "1"}, "kv_cache_memory_gb = '1': must be a number"),
        ({"kv_cache_memory_gb": 0.001},
         "kv_cache_memory_gb = 0.001: must be from 0.0162, for one request of max_model_len = 4096 "
         "and the state of max_num_seqs = 256 (0.0158), to "),
        ({"kv_cache_memory_gb": 0.0003, "max_num_seqs": 4},
         "kv_cache_memory_gb = 0.0003: must be from 0.0007, for one request of max_model_len = "),
        ({"kv_cache_memory_gb": 1e12}, "kv_cache_memory_gb = 1000000000000.0: must be from 0.01"),
        ({"num_blocks": 5, "max_model_len": 2000},
         "num_blocks = 5: the KV pool is too small for one request of max_model_len = 2000: it "
         "needs num_blocks >= 20 (more KV memory), or max_model_len <= 511"),
        ({"weight_cache_memory_gb": 0.001},
         "weight_cache_memory_gb = 0.001: the model's weights take 0.005 GB"),
        ({"weight_cache_memory_gb": -1}, "weight_cache_memory_gb = -1: must be above 0 GB"),
        ({"max_model_len": 5000}, "max_model_len = 5000: the model has 4096 positions"),
        ({"replay_keep_tokens": 10},
         "replay_keep_tokens = 10: must be 0 (off) or at least sliding_window = 128"),
        ({"replay_keep_tokens": -1}, "replay_keep_tokens = -1: must be at least 0"),
        ({"numerics": "fp16"}, "numerics = 'fp16': must be one of quantised, float32, folded"),
        ({"device": "gpu"}, "device = 'gpu': must be cpu, cuda or cuda:<index>"),
        ({"device": "meta"}, "device = 'meta': must be cpu, cuda or cuda:<index>"),
        ({"device": "cuda:99"}, "device = 'cuda:99': torch sees "),
        ({"seed": 1.5}, "seed = 1.5: must be an integer"),
        ({"chunked_prefill": False, "max_num_batched_tokens": 512},
         "max_num_batched_tokens = 512: without chunked_prefill it must hold a whole prompt"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16},
         "max_num_batched_tokens = 8: must be at least max_num_seqs"),
        ({"prefill_target_ms": 5.0}, "prefill_target_ms = 5.0: is used by chunk_policy"),
        ({"num_draft_tokens": 6}, "num_draft_tokens = 6: must be at most 5, the block that the"),
        ({"num_draft_tokens": "2"}, "num_draft_tokens = '2': must be int"),
        ({"block_size": 64}, "block_size = 64: the executor has 128 only"),
        ({"revision": "main"}, "revision = 'main': "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)  # fmt: skip
def test_bad_options_are_named(options, message):
    with pytest.raises(ConfigError) as error:
        LLM(CHECKPOINT, **options)
    assert one_line(error).startswith(message)


# ---- checkpoints -------------------------------------------------------------------------------


@pytest.fixture
def copied(tmp_path):
    """A copy of the tiny checkpoint that a test may spoil."""
    return shutil.copytree(CHECKPOINT, tmp_path / "spoiled")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type = 'llama': only 'deepseek_v41' is implemented"),
        ({"text_config": None}, "text_config"),
        ({"engram_compressed_vocab_size": 700}, "engram_compressed_vocab_size = 700"),
    ],
)
def test_a_checkpoint_of_another_architecture(copied, change, message):
    config = json.loads((copied / "config.json").read_text())
    for key, value in change.items():
        (config if key in config else config["text_config"])[key] = value
    (copied / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError) as error:
        LLM(copied, **SMALL)
    assert message in one_line(error)


def test_a_checkpoint_without_tokenizer_cannot_hash(copied):
    (copied / "tokenizer.json").unlink()
    with pytest.raises(ConfigError) as error:
        LLM(copied, **SMALL)
    assert one_line(error).startswith("token_map = None: ")


def test_a_directory_that_is_no_checkpoint(tmp_path):
    with pytest.raises(ConfigError) as error:
        LLM(tmp_path, **SMALL)
    assert "config.json" in one_line(error)


# ---- weights that are not finite ---------------------------------------------------------------


BROKEN = [
    ("layers.3.ffn.gate.bias", (7,), "nan"),  # it would only select
    ("layers.5.attn.wq_a.scale", (0, 1), "nan"),
    ("layers.5.attn.wq_a.weight", (3, 2), "nan"),
    ("layers.2.ffn.experts.15.w1.scale", (1, 0), "nan"),
    ("layers.0.engram.embed.weight", (3143, 31), "nan"),
    ("layers.0.hc_attn_scale", (2,), "inf"),
    ("embed.weight", (17, 0), "-inf"),
    ("norm.weight", (127,), "inf"),
]


@pytest.mark.parametrize(("name", "index", "value"), BROKEN, ids=lambda value: str(value))
def test_a_weight_that_is_no_number_is_refused_by_name_and_index(copied, name, index, value):
    file = copied / "model.safetensors"
    tensors = load_file(file)
    tensor = tensors[name]
    if tensor.itemsize == 1:
        tensor.view(torch.uint8)[index] = 0xFF
    else:
        tensor[index] = float(value)
    save_file(tensors, file)
    with pytest.raises(ConfigError) as error:
        LLM(copied, **SMALL)
    assert one_line(error) == f"{name}{list(index)} = {value}: a weight must be a finite number"


PARTS = {
    "layer 5": lambda model: model.layers[5].ffn_norm.weight[3],
    "layer 1": lambda model: model.layers[1].attention.compressor.norm.weight[0],
    "the output head": lambda model: model.head.weight[700],
    "the embedding": lambda model: model.embed[17],
}


@pytest.mark.parametrize("enable_zos", [True, False])
@pytest.mark.parametrize(
    ("where", "request_index"),
    # The embedding: of a token that only the second prompt has.
    [("layer 5", 0), ("layer 1", 0), ("the output head", 0), ("the embedding", 1)],
)
def test_nan_is_an_error_that_names_request_and_part(where, request_index, enable_zos):
    threads = threading.active_count()
    with LLM(CHECKPOINT, **SMALL, enable_zos=enable_zos) as llm:
        with torch.inference_mode():
            PARTS[where](llm.rank.model).fill_(float("nan"))
        with pytest.raises(NumericsError) as error:
            llm.generate([[5, 6, 7], [3, 17], [8]], SHORT)
        assert one_line(error) == (
            f"request '{request_index}': its logits are not finite; the first values that are not "
            f"come out of {where}"
        )
        assert threading.active_count() == threads, "the device worker has gone"
        for call in (llm.engine.step, llm.engine.drain, lambda: llm.generate([[5]])):
            with pytest.raises(EngineStoppedError, match=f"stopped: request '{request_index}'"):
                call()


def test_nan_in_the_middle_keeps_what_was_shown_before():
    """Token 9 is forced as the third; its embedding is spoilt while the engine runs."""
    with LLM(CHECKPOINT, **SMALL) as llm:
        params = SamplingParams(golden_token_ids=(5, 6, 9, 7), max_tokens=8, ignore_eos=True)
        outputs = llm.stream([[3, 4]], params)
        first = next(outputs)
        with torch.inference_mode():
            llm.rank.model.embed[9] = float("nan")
        seen = [first]
        with pytest.raises(NumericsError):
            seen.extend(outputs)
        *shown, last = seen
        assert (last.finish_reason, last.new_token_ids) == ("error", ())
        assert last.token_ids == shown[-1].token_ids == (5, 6, 9)[: len(shown)]
        assert len(shown) >= 2


def test_a_closed_llm_says_so():
    with LLM(CHECKPOINT, **SMALL) as llm:
        pass
    llm.close()
    with pytest.raises(EngineStoppedError) as error:
        llm.generate([[5]], SHORT)
    assert one_line(error) == "the engine has stopped: it was closed"
