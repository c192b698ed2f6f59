"""Kernels run on the CPU, from the CUDA source that TileLang generates, against their references.

Where no GPU is at hand this is what shows that a kernel computes the right numbers. Whole families
run the very tests of `tests/gpu`, on fewer rows and sizes, with fresh tensors full of garbage. Not
here: kernels of tensor cores (gemm, weight_gemm, expert_gemm, sparse_attention, index_scores),
which plain C++ cannot run; and what only a GPU shows: its own exponentials, races, speed, other
architectures.
"""

from importlib import import_module

import pytest
import torch

pytest.importorskip("tilelang")

from mdi_exec.ops import engram, routing, top_entries
from mdi_exec.ops.gemm import Partial
from mdi_exec.ops.kernels import engram as engram_kernels
from mdi_exec.ops.kernels import routing as routing_kernels
from mdi_exec.ops.kernels import sampler as sampler_kernels
from mdi_exec.ops.kernels import top_entries as top_entries_kernels
from mdi_exec.ops.sampler import Sampler, sample_ref
from tests.exec.draws import rows_of_draws
from tests.gpu import test_engram as on_gpu_engram
from tests.gpu import test_folding as folding
from tests.gpu import test_hyper_connections as hyper_connections
from tests.gpu import test_norm as norm
from tests.gpu import test_norm_store as norm_store
from tests.gpu import test_quantise as quantise
from tests.gpu import test_rope as rope
from tests.gpu import test_routing as on_gpu_routing
from tests.gpu import test_row_pool as row_pool
from tests.gpu import test_sampler as on_gpu_sampler
from tests.gpu import test_step_rows as step_rows
from tests.gpu import test_swiglu as swiglu
from tests.gpu import test_top_entries as on_gpu_top_entries
from tests.gpu import vectors
from tests.gpu.strictness import poisoned
from tests.kernels.emulator import Emulator, what_is_missing

pytestmark = pytest.mark.skipif(what_is_missing() is not None, reason=what_is_missing() or "")

FAMILIES = ("engram", "folding", "grouping", "hc_coefficients", "hyper_connections", "norm",
            "norm_store", "pairs", "quantise", "rope", "routing", "row_pool", "sampler",
            "selected_rows", "step_rows", "swiglu", "top_entries")  # fmt: skip
ROWS = (1, 3, 33)
rows_of_each = pytest.mark.parametrize("rows", ROWS)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    return Emulator(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(autouse=True)
def emulated(emulator, monkeypatch):
    """Let every family's launchers run emulations, and the GPU's tests draw inputs on the CPU."""
    for family in FAMILIES:
        module = import_module(f"mdi_exec.ops.kernels.{family}")
        monkeypatch.setattr(module, "compiled", emulator.compiled)
    for module in (vectors, row_pool):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    with poisoned():
        yield


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Families whose tests take their device from `vectors`: the tests themselves.


@rows_of_each
@pytest.mark.parametrize("width", [64, 1280])
def test_norm(rows, width):
    norm.test_norm_matches_the_reference(width, rows)
    norm.test_the_rounded_norm_is_the_norm_rounded(width, rows)


def test_norm_stays_inside_its_output():
    norm.test_nothing_is_written_beyond_the_output()


@pytest.mark.parametrize("name", quantise.CODES)
def test_codes_and_scales(name):
    for make in (vectors.every_magnitude, vectors.ties):
        quantise.test_codes_and_scales_are_exact(name, make)
    for shape in ((0, 64), (1, 32), (3, 5120), (33, 64)):
        quantise.test_codes_of_any_shape(name, shape)


@pytest.mark.parametrize("name", quantise.VALUES)
def test_rounded_values(name):
    for make in (vectors.every_magnitude, vectors.ties):
        quantise.test_rounded_values_are_exact(name, make)
    for rows in ROWS:
        quantise.test_values_of_any_number_of_rows(name, rows)
    quantise.test_nothing_is_written_beyond_the_output(name)


@rows_of_each
@pytest.mark.parametrize("width", [64, 2304])
def test_folded_rows(rows, width):
    folding.test_folded_rows_are_exact(width, rows)


@rows_of_each
@pytest.mark.parametrize("shape", [(64, 512, 64), (None, 32, 16)])
@pytest.mark.parametrize("inverse", [False, True])
def test_rotation(rows, shape, inverse):
    x, rotation = rope.case(rows, *shape)
    expected = rope.rotate_ref(x, rotation, inverse)
    vectors.assert_bits(rope.kernels.rotate(x, rotation, inverse), expected)
    if shape[0] is not None:
        rope.test_rotated_and_rounded_is_both_in_turn((32, 128, 64), rows)


@pytest.mark.parametrize(("make", "width", "rotated"), norm_store.CASES)
def test_norm_store(make, width, rotated):
    for rows, parts in ((1, 8), (3, 1)):
        norm_store.test_is_all_steps_in_turn(make, width, rotated, rows, parts)
        norm_store.test_the_rounded_norm_of_a_sum(width, rows, parts)


@pytest.mark.parametrize("name", step_rows.STEPS)
def test_step_rows(name):
    for in_ring, replay_keep in ((True, 0), (False, 0), (False, 150)):
        step_rows.test_row_numbers(name, in_ring, replay_keep)
    step_rows.test_pairs(name, 64, 2)
    step_rows.test_ngrams_and_their_rows(name, 3)
    for staged, is_listed in ((True, False), (False, True)):
        step_rows.test_selected_rows(staged, is_listed, 5)


@rows_of_each
@pytest.mark.parametrize("width", [128, 5120])
def test_hyper_connections(rows, width):
    hyper_connections.test_read_is_exact(width, rows)
    hyper_connections.test_write_is_exact(width, rows)
    hyper_connections.test_fused_read_and_norm_is_both_in_turn(width, rows)
    hyper_connections.test_fused_write_and_read_is_both_in_turn(width, rows)


@rows_of_each
def test_hyper_connection_coefficients(rows):
    for scale in (0.3, 30.0):
        hyper_connections.test_split_matches_the_reference(rows, scale)
    hyper_connections.test_finish_sums_normalises_and_splits(rows)


@rows_of_each
@pytest.mark.parametrize(("inner", "limit", "weighted"), [(64, 2.5, False), (2304, 10.0, True)])
def test_swiglu(rows, inner, limit, weighted):
    swiglu.test_halves_match_the_reference(inner, limit, weighted, rows)


def test_swiglu_of_separate_tensors():
    swiglu.test_views_and_separate_tensors_give_the_same_bits(64, 2.5, True)


@pytest.mark.parametrize(("make", "width"), row_pool.CASES[1::2])
def test_row_pool(make, width):
    for rows in ROWS:
        row_pool.test_storing_is_exact_and_skips_missing_rows(make, width, rows)
    for shape in ((0,), (1,), (3, 7)):
        row_pool.test_gathering_is_exact(make, width, shape)
    row_pool.test_storing_every_magnitude_is_exact(make, width)
    row_pool.test_every_code_decodes(make, width)
    row_pool.test_a_pool_of_given_rows(make, width)


@pytest.mark.parametrize(("make", "width"), row_pool.CASES[::2])
def test_row_pool_of_true_width(make, width):
    row_pool.test_storing_is_exact_and_skips_missing_rows(make, width, ROWS[-1])
    row_pool.test_every_code_decodes(make, width)


# Families whose tests name the GPU: their inputs' kinds, and their tolerances.


@pytest.mark.parametrize(("num_experts", "k"), [(384, 6), (16, 3)])
def test_route(num_experts, k):
    for rows in ROWS:
        logits = normal(rows, num_experts) * 3
        for x in (logits, logits.sign(), logits * 100):
            for bias in (normal(num_experts, seed=1) * 0.1, normal(rows, num_experts, seed=2)):
                experts, weights = routing_kernels.route(Partial.of(x), bias, k, 1.5)
                expected, expected_weights = routing.route_ref(Partial.of(x), bias, k, 1.5)
                assert torch.equal(experts, expected)
                torch.testing.assert_close(
                    weights, expected_weights, rtol=on_gpu_routing.WEIGHT_RTOL, atol=0
                )


@pytest.mark.parametrize("rows", [*ROWS, 900])
def test_group_rows(rows):
    num_experts, tile = 16, 16
    drawn = torch.randint(num_experts, (rows, 3), generator=torch.Generator().manual_seed(rows))
    for experts in (drawn, torch.full_like(drawn, num_experts - 1)):
        on_gpu_routing.compare_groups(experts, num_experts, tile)
        on_gpu_routing.compare_tokens(normal(rows, 128).bfloat16(), experts.int())


@rows_of_each
def test_combine(rows):
    k, width = 6, 5120
    routed, shared = normal(rows * k, width).bfloat16(), normal(rows, width, seed=1).bfloat16()
    position = torch.randperm(rows * k, generator=torch.Generator().manual_seed(3)).int()
    found = routing_kernels.combine(routed, position, shared)
    vectors.assert_bits(found, routing.combine_ref(routed, position, shared))


@pytest.mark.parametrize("kind", on_gpu_top_entries.SCORES)
@pytest.mark.parametrize(("width", "k"), [(1001, 8), (9000, 512)])
def test_top_entries(kind, width, k):
    edges = torch.tensor([width, 0, 1, width // 2, k - 1, k, k + 1, 4095, 4096, 4097])
    visible = edges.clamp(0, width).to(torch.int32)
    scores = on_gpu_top_entries.SCORES[kind](normal(len(visible), width)).bfloat16()
    is_hidden = torch.arange(width) >= visible.unsqueeze(1)
    clean, garbage = scores.masked_fill(is_hidden, 0), scores.masked_fill(is_hidden, torch.nan)
    chosen = top_entries_kernels.top_visible(garbage, visible, k)
    assert torch.equal(chosen, top_entries.top_visible_ref(clean, visible, k))
    blocks = top_entries_kernels.candidate_blocks(garbage, visible, 8, 8)
    assert torch.equal(blocks, top_entries.candidate_blocks_ref(clean, visible, 8, 8))


@pytest.mark.parametrize("kind", ["random", "many ties", "minus infinity"])
@pytest.mark.parametrize("k", [5, 512])
def test_top_entries_of_several_parts(kind, k):
    visible = torch.tensor([70_001, 32_768, 32_769], dtype=torch.int32)
    scores = on_gpu_top_entries.SCORES[kind](normal(3, 70_001)).bfloat16()
    chosen = top_entries_kernels.top_visible(scores, visible, k)
    assert torch.equal(chosen, top_entries.top_visible_ref(scores, visible, k))


@pytest.mark.parametrize("kind", ["random", "equal", "ties", "two"])
def test_sampler(kind):
    vocab = 5000
    sampler = Sampler(vocab, eos_token_id=on_gpu_sampler.EOS, blacklist=[0, 7, vocab - 1])
    for count in ROWS:
        logits = on_gpu_sampler.logits_of(count, vocab, kind)
        for options in ({}, {"first_n_token_no_eos": 1}, {"golden_token_ids": (5, -1, 7)}):
            rows = rows_of_draws(on_gpu_sampler.draws_of(count, **options), "cpu")
            found = sampler_kernels.sample_plain(logits, rows, sampler.bans)
            expected = sample_ref(logits, rows, sampler.bans)
            assert torch.equal(found.token_ids, expected.token_ids)
            tolerance = on_gpu_sampler.LOGPROB_RTOL
            torch.testing.assert_close(
                found.logprobs, expected.logprobs, rtol=tolerance, atol=tolerance
            )


@rows_of_each
@pytest.mark.parametrize(("width", "has_gaps"), [(128, True), (5120, False)])
def test_engram_add(rows, width, has_gaps):
    is_open = torch.arange(rows) % 3 != 1 if has_gaps else None
    for scale in (1.0, 0.0, 1e-3, 1e4):
        tensors = (normal(rows, 4, width) * scale, normal(rows, 5 * width, seed=1) * scale,
                   normal(4, width, seed=2), normal(4, width, seed=3))  # fmt: skip
        inputs = tuple(tensor.bfloat16() for tensor in tensors)
        found = engram_kernels.engram_add(*inputs, is_open)
        expected = engram.engram_add_ref(*inputs, is_open)
        torch.testing.assert_close(found, expected, rtol=on_gpu_engram.RTOL, atol=1e-3 * scale)
        assert (found != expected).float().mean() < 1e-2
