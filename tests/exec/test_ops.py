"""Single operations: golden kernels, tie rules, and properties that hold for any input."""

import pytest
import torch

from mdi_exec.numerics import Numerics
from mdi_exec.ops.elementwise import PIECE, everywhere
from mdi_exec.ops.hyper_connections import HC_MAX_ABS, hc_read, hc_split, hc_write
from mdi_exec.ops.rms_norm import rms_norm
from mdi_exec.ops.rope import Rotation, rotate
from mdi_exec.ops.row_pool import RowPool, entry_format, key_format, window_format
from mdi_exec.ops.sparse_attention import (
    ATTENTION_MAX_ABS,
    ATTENTION_MEAN_ABS,
    NO_COLUMN,
    NONE,
    attend_ref,
    sparse_attention,
)
from mdi_exec.ops.swiglu import RowWeights, swiglu_quantise
from mdi_exec.ops.top_entries import candidate_blocks, top_entries

SPLIT_SAME_BITS = 0.85  # exponentials differ by processor; 95 % were the least seen


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def pool_of(keys):
    """A pool of unrounded rows."""
    pool = RowPool(window_format(keys.shape[1], Numerics.FLOAT32), len(keys), keys.device)
    pool.write(torch.arange(len(keys)), pool.encode(keys.float()))
    return pool


def test_sparse_attention_matches_golden(golden):
    tensors = golden("quant/kernels")
    q, kv, rows = tensors["q"][0], tensors["kv"][0], tensors["idx"][0].long()
    found = sparse_attention(q, pool_of(kv), rows, tensors["sink"])
    error = (found.float() - tensors["out"][0].float()).abs()
    assert error.max() < ATTENTION_MAX_ABS
    assert error.mean() < ATTENTION_MEAN_ABS
    exact = sparse_attention(q.float(), pool_of(kv), rows, tensors["sink"])
    torch.testing.assert_close(exact, tensors["out_exact_f32"][0], rtol=0, atol=1e-5)


def test_attention_without_any_key_is_zero():
    out = attend_ref(normal(2, 4, 32), normal(2, 5, 32), torch.zeros(2, 5, dtype=torch.bool),
                     torch.zeros(4))  # fmt: skip
    assert torch.equal(out, torch.zeros_like(out))


def test_attention_reads_entries_from_their_pool():
    """Keys in the window tensor and the same keys in a pool must count alike."""
    q, keys, sink = normal(3, 2, 32), normal(64, 32, seed=1), torch.zeros(2)
    pool = RowPool(entry_format(32, Numerics.FLOAT32), 64, torch.device("cpu"))
    pool.write(torch.arange(64), pool.encode(keys))
    window_rows = torch.arange(64).expand(3, -1)
    everything = torch.cat((keys, keys))
    both = torch.cat((window_rows, window_rows + 64), dim=1)
    split = sparse_attention(
        q, pool_of(keys), window_rows, sink, entries=pool, entry_rows=window_rows
    )
    assert torch.equal(split, sparse_attention(q, pool_of(everything), both, sink))


@pytest.mark.parametrize("widths", [[37, 37, 37], [37, 128, 64]])
def test_a_list_of_window_keys_may_end_early(widths):
    """Entries then follow at once, and the softmax's blocks of 64 fall where they would without.

    A key that is only missing keeps its place, and the entries theirs.
    """
    q, keys, sink = normal(3, 2, 64).bfloat16(), normal(200, 64, seed=1), torch.zeros(2)
    keys[128:] *= 2  # later blocks raise the maximum that probabilities are rounded against
    columns = torch.arange(128).expand(3, -1)
    has_ended = columns >= torch.tensor(widths).unsqueeze(1)
    window_rows, entry_rows = columns.masked_fill(has_ended, NO_COLUMN), columns[:, :40] + 128
    pool = RowPool(entry_format(64, Numerics.FLOAT32), 200, torch.device("cpu"))
    pool.write(torch.arange(200), pool.encode(keys))

    def attend(rows, part=slice(None)):
        return sparse_attention(
            q[part], pool_of(keys), rows, sink, entries=pool, entry_rows=entry_rows[part]
        )

    found = attend(window_rows)
    for i, width in enumerate(widths):
        part = slice(i, i + 1)
        assert torch.equal(found[part], attend(columns[part, :width], part)), f"{width} keys"
    assert not torch.equal(found, attend(columns.masked_fill(has_ended, NONE)))


def test_hyper_connection_split_matches_golden(golden):
    t = golden("quant/kernels")
    found = hc_split(t["hc_mixes"], t["hc_base"], t["hc_scale"], n=4, iterations=20, eps=1e-6)
    for mine, theirs in zip(found, (t["hc_pre"], t["hc_post"], t["hc_comb"]), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=HC_MAX_ABS)
        # Float64 sigmoids, rounded once, agree in 63 to 74 % of all bits, torch's softmax in 40 %.
        assert (mine == theirs).float().mean() > SPLIT_SAME_BITS
    torch.testing.assert_close(found.mix.sum(dim=1), torch.ones(50, 4), rtol=0, atol=1e-4)


def test_hyper_connections_read_and_write_are_the_sums_they_say():
    streams, output, read = normal(5, 4, 32), normal(5, 32, seed=1), normal(5, 4, seed=2)
    torch.testing.assert_close(hc_read(streams, read), torch.einsum("tn,tnd->td", read, streams))
    c = hc_split(
        normal(5, 24, seed=3), torch.zeros(24), torch.ones(3), n=4, iterations=20, eps=1e-6
    )
    expected = torch.einsum("tk,td->tkd", c.write, output) + torch.einsum(
        "tjk,tjd->tkd", c.mix, streams
    )
    torch.testing.assert_close(hc_write(streams, output, c), expected)


def test_ties_go_to_the_lower_position():
    scores = torch.tensor([[1.0, 2.0, 2.0, 2.0, 1.0, 3.0]])
    visible = torch.tensor([[True] * 5 + [False]])
    assert top_entries(scores, visible, 2).tolist() == [[1, 2]]
    assert top_entries(scores, visible, 4).tolist() == [[0, 1, 2, 3]]


def test_a_short_row_selects_all_it_sees():
    scores, visible = normal(2, 5), torch.tensor([[True, True, False, False, False], [False] * 5])
    assert top_entries(scores, visible, 8).tolist() == [[0, 1] + [-1] * 6, [-1] * 8]


def test_negative_scores_are_selected_like_any_other():
    scores = torch.tensor([[-5.0, -1.0, -3.0]])
    assert top_entries(scores, torch.ones(1, 3, dtype=torch.bool), 2).tolist() == [[1, 2]]


def test_the_newest_block_is_always_a_candidate():
    scores = torch.arange(32, 0, -1, dtype=torch.float32).expand(3, -1)
    blocks = candidate_blocks(scores, torch.tensor([31, 9, 0]), 8, 2)
    assert blocks.tolist() == [[0, 3], [0, 1], [-1, -1]]


def test_block_scores_see_visible_entries_only():
    scores = torch.zeros(1, 24)
    scores[0, 12] = 9.0  # invisible to this query
    scores[0, 1] = 1.0
    assert candidate_blocks(scores, torch.tensor([12]), 4, 2).tolist() == [[0, 2]]


FUNCTIONS = (torch.exp, torch.sigmoid, torch.nn.functional.silu, torch.nn.functional.softplus)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
@pytest.mark.parametrize("threads", [1, 2])
def test_an_element_does_not_feel_its_place(function, threads):
    x = normal(3 * PIECE + 24) * 4
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        whole = everywhere(function, x)
        for start, count in ((0, 1), (5, 7), (100, 33), (17, PIECE), (3, 2 * PIECE + 1)):
            part = slice(start, start + count)
            assert torch.equal(everywhere(function, x[part]), whole[part]), f"{count} at {start}"
    finally:
        torch.set_num_threads(usual)
    torch.testing.assert_close(whole, function(x))


def test_rotation_and_its_inverse_cancel_and_leave_the_rest():
    angles = normal(6, 8) * 3
    rotation = Rotation(angles.cos(), angles.sin())
    x = normal(6, 2, 32, seed=1)
    turned = rotate(x, rotation)
    assert torch.equal(turned[..., :16], x[..., :16])
    assert not torch.allclose(turned[..., 16:], x[..., 16:])
    torch.testing.assert_close(rotate(turned, rotation, inverse=True), x)


def test_rms_norm_is_scale_free_and_weighted():
    x, weight = normal(3, 64), normal(64, seed=1).to(torch.bfloat16)
    found = rms_norm(x, weight, 1e-20)
    torch.testing.assert_close(found, rms_norm(x * 1000, weight, 1e-20))
    torch.testing.assert_close((found / weight.float()).square().mean(dim=1), torch.ones(3))


def test_swiglu_clamps_the_gate_above_only():
    gate, up = torch.tensor([[-9.0, 9.0]]), torch.tensor([[-9.0, 9.0]])
    found = swiglu_quantise(gate, up, 2.0, RowWeights(torch.tensor([7.0, 0.5]), torch.tensor([1])))
    expected = 0.5 * torch.nn.functional.silu(torch.tensor([-9.0, 2.0])) * torch.tensor([-2.0, 2.0])
    torch.testing.assert_close(found, expected.unsqueeze(0))


@pytest.mark.parametrize("make", [window_format, entry_format, key_format])
@pytest.mark.parametrize("numerics", list(Numerics))
def test_pools_give_back_what_was_written(make, numerics):
    pool = RowPool(make(64, numerics), 10, torch.device("cpu"))
    values = normal(3, 64).to(numerics.dtype)
    rows = pool.encode(values)
    pool.write(torch.tensor([7, 0, 3]), rows)
    found = pool.gather(torch.tensor([[3, -1], [7, 0]]))
    assert found.dtype == numerics.dtype
    assert torch.equal(found[0, 0], pool.decode(rows)[2])
    assert torch.equal(found[1], pool.decode(rows)[:2])
    assert torch.equal(found[0, 1], torch.zeros(64, dtype=numerics.dtype))
    assert rows.codes.shape[1] + rows.scales.shape[1] == pool.format.bytes_per_row
