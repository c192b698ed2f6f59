"""Steps at fixed shapes, as CUDA graphs run them: sizes, padding, and what stays in flight.

There is no GPU here: a stand-in for a captured graph runs its work again at each replay and leaves
the results where the first run put them. `tests/gpu/test_runner.py` has the real ones.
"""

import pytest
import torch

import mdi_exec.engine.graphs as graphs_module
import mdi_shared.cost.graph_sizes as graph_sizes_module
from mdi_exec.engine.llm import LLM
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.errors import NumericsError
from mdi_exec.model.transformer import Transformer
from mdi_shared.cost.graph_sizes import SIZES, graph_sizes, prefill_shape
from mdi_shared.errors import ConfigError
from tests.exec.engines import CHECKPOINT, GOLDEN_MODES, SMALL

PROMPTS = [[5 + i, 17, 300, 42 + i][: 1 + i % 4] * (1 + 40 * (i == 2)) for i in range(5)]
PARAMS = [
    SamplingParams(max_tokens=6 + 2 * i, ignore_eos=True, seq_seed=i, temperature=0.9 * (i % 2))
    for i in range(5)
]


class Replay:
    """Does again, at each replay, what a real graph has recorded."""

    def __init__(self, work, out):
        self.work, self.out, self.num_replays = work, out, 0

    def replay(self):
        self.num_replays += 1
        for old, new in zip(tensors_of(self.out), tensors_of(self.work()), strict=True):
            old.copy_(new)

    def pool(self):
        return None


def tensors_of(results):
    """The results' own tensors; a batch's are views of the inputs but for its token ids."""
    for value in results:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from tensors_of(value)
        else:
            yield value.token_ids


@pytest.fixture
def recorded(monkeypatch):
    """Let the CPU capture; returns the graphs recorded, two per size: model and sampling."""
    made = []

    def record(work, pool):
        made.append(Replay(work, torch.inference_mode()(work)()))
        return made[-1], made[-1].out

    monkeypatch.setattr(graphs_module, "_record", record)
    monkeypatch.setattr(Transformer, "is_capturable", True)
    # Large shapes take a CPU long, and show nothing that small ones do not.
    monkeypatch.setattr(graph_sizes_module, "PREFILL_ROWS", (16, 144))
    monkeypatch.setattr(graphs_module, "PREFILL_ROWS", (16, 144))
    return made


def serve(params=PARAMS, prompts=PROMPTS, **options):
    with LLM(CHECKPOINT, **{**SMALL, **options}) as llm:
        outputs = llm.generate(prompts, params)
    return [(output.token_ids, output.logprobs) for output in outputs]


def test_sizes_end_at_the_seats():
    assert graph_sizes(1) == (1,)
    assert graph_sizes(20) == (1, 2, 4, 8, 16, 20)
    assert graph_sizes(256) == SIZES
    assert graph_sizes(500) == (*SIZES, 320, 384, 448, 500)


@pytest.mark.parametrize("numerics", GOLDEN_MODES, ids=lambda mode: mode.value)
@pytest.mark.parametrize("enable_zos", [True, False])
def test_graphs_change_nothing(recorded, numerics, enable_zos):
    """Five requests end one by one: sizes 8, 4, 2 and 1 run, padded and in flight."""
    options = {"numerics": numerics.value, "enable_zos": enable_zos}
    plain = serve(**options, use_cuda_graphs=False)
    assert not recorded
    assert serve(**options) == plain
    assert len(recorded) == 2 * 4
    assert all(graph.num_replays for graph in recorded)


def test_filters_and_alternatives_sample_without_a_graph(recorded):
    params = [
        SamplingParams(max_tokens=5, ignore_eos=True, seq_seed=1, top_p=0.8, top_k=50),
        SamplingParams(max_tokens=8, ignore_eos=True, seq_seed=2, top_logprobs=3),
        SamplingParams(max_tokens=12, ignore_eos=True, seq_seed=3),
    ]
    plain = serve(params, PROMPTS[:3], use_cuda_graphs=False)
    assert serve(params, PROMPTS[:3]) == plain
    assert [len(logprobs) for logprobs in plain[1][1]] >= [3] * 8
    alone = recorded[-1]  # the sampling of size 1, when the last request is alone
    assert alone.num_replays >= 2


def test_a_fault_in_a_graph_is_located(recorded):
    with LLM(CHECKPOINT, **{**SMALL, "max_num_seqs": 2}) as llm:
        llm.warm_up()
        weight = llm.rank.model.layers[3].attn_norm.weight
        llm.engine.add_request(PROMPTS[1], PARAMS[1], "first")
        llm.engine.step()
        weight.fill_(torch.nan)
        with pytest.raises(NumericsError, match=r"'first'.*come out of layer 3"):
            llm.engine.drain()


def test_all_sizes_can_be_captured_beforehand(recorded):
    with LLM(CHECKPOINT, **{**SMALL, "max_num_seqs": 5}) as llm:
        llm.warm_up()
        shapes = llm.engine.runner.graphs.shapes()
        assert [shape.rows for shape in shapes if shape.rows == shape.seqs] == [5, 4, 2, 1]
        assert {shape.seqs for shape in shapes if shape.rows > shape.seqs} == {2, 4}
        assert len(recorded) == 2 * len(shapes)
        llm.generate(PROMPTS, PARAMS)
        assert len(recorded) == 2 * len(shapes)


def test_a_prefill_shape_holds_the_step_and_a_placeholder():
    for rows, seqs in ((1, 1), (15, 1), (16, 1), (1024, 1), (300, 7), (40, 15), (1025, 14)):
        padded_rows, padded_seqs, context = prefill_shape(rows, seqs, rows + 100)
        assert padded_seqs > seqs
        assert padded_rows - rows >= padded_seqs - seqs
        assert context >= rows + 100
    assert prefill_shape(1, 16, 100) is None  # too many sequences
    assert prefill_shape(1040, 1, 2000) is None  # no room for the placeholder
    assert prefill_shape(1, 1, 131073) is None


@pytest.mark.parametrize("budget", [512, 24], ids=["whole", "chunks"])
def test_prefill_graphs_change_nothing(recorded, budget):
    """Steps of one or several prompts, whole and in chunks, equal the eager ones bit for bit."""
    options = {"max_num_batched_tokens": budget, "max_num_seqs": 8}
    plain = serve(**options, use_cuda_graphs=False)
    with LLM(CHECKPOINT, **{**SMALL, **options}) as llm:
        llm.warm_up()
        captured = len(recorded)
        before = [graph.num_replays for graph in recorded]
        outputs = llm.generate(PROMPTS, PARAMS)
        prefill = sum(1 for shape in llm.engine.runner.graphs.shapes() if shape.rows > shape.seqs)
    used = [graph.num_replays for graph in recorded[: 2 * prefill]]
    assert len(recorded) == captured
    assert used != before[: 2 * prefill], "some prefill step ran as a graph"
    assert [(output.token_ids, output.logprobs) for output in outputs] == plain


def test_a_prefill_shape_is_captured_at_its_second_use(recorded):
    with LLM(CHECKPOINT, **SMALL) as llm:
        sizes = []
        for prompt in ([5, 6, 7], [8, 9], [4, 4, 4, 4]):
            llm.generate([prompt], SamplingParams(max_tokens=1, seq_seed=1))
            sizes.append(len(recorded))
    assert sizes[0] == 0
    assert sizes[1] == sizes[2] == 2


def test_bounded_replay_prefills_without_graphs(recorded):
    with LLM(CHECKPOINT, **SMALL, replay_keep_tokens=128) as llm:
        for _ in range(3):
            llm.generate([[5, 6, 7, 8]], SamplingParams(max_tokens=1, seq_seed=1))
    assert not recorded


def test_a_cpu_captures_nothing():
    with LLM(CHECKPOINT, **{**SMALL, "max_num_seqs": 2}) as llm:
        llm.warm_up()
        assert llm.engine.runner.graphs is None


def test_the_switch_is_a_truth_value():
    with pytest.raises(ConfigError, match="use_cuda_graphs = 1: must be true or false"):
        LLM(CHECKPOINT, use_cuda_graphs=1)
