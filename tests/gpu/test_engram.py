"""Engram's gate against its reference on the same GPU."""

import pytest
import torch

from mdi_exec.ops.engram import engram_add_ref, engram_rows_ref
from mdi_exec.ops.kernels import engram as kernels
from tests.gpu.marks import gpu
from tests.gpu.strictness import poisoned, unawaited

pytestmark = gpu

ROWS = [1, 3, 127, 129, 1000]
# One bfloat16 place: float32 sums over a stream are taken in another order.
RTOL = 2**-7


def inputs(rows, width, scale=1.0):
    generator = torch.Generator("cuda").manual_seed(rows)

    def draw(*shape):
        return torch.randn(*shape, device="cuda", generator=generator)

    streams, looked_up = draw(rows, 4, width) * scale, draw(rows, 5 * width) * scale
    tensors = (streams, looked_up, draw(4, width), draw(4, width))
    return tuple(t.to(torch.bfloat16) for t in tensors)


@pytest.mark.parametrize("width", [5120, 128])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("has_gaps", [False, True])
def test_engram_add(width, rows, has_gaps):
    tensors = inputs(rows, width)
    is_open = torch.arange(rows, device="cuda") % 3 != 1 if has_gaps else None
    with poisoned():
        found = kernels.engram_add(*tensors, is_open)
    expected = engram_add_ref(*tensors, is_open)
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=1e-3)
    assert (found != expected).float().mean() < 1e-2
    if has_gaps:
        assert torch.equal(found[~is_open], tensors[0][~is_open])


@pytest.mark.parametrize("scale", [0.0, 1e-12, 1e-3, 1e4])
def test_engram_add_of_small_and_large_values(scale):
    tensors = inputs(5, 5120, scale)
    found, expected = kernels.engram_add(*tensors), engram_add_ref(*tensors, None)
    torch.testing.assert_close(found, expected, rtol=RTOL, atol=1e-3 * scale)


@pytest.mark.parametrize("width", [5120, 128])
def test_a_token_is_gated_alike_in_any_batch(width):
    tensors = inputs(129, width)
    together = kernels.engram_add(*tensors)
    for row in (0, 50, 128):
        alone = [t[row : row + 1].clone() for t in tensors[:2]]
        assert torch.equal(kernels.engram_add(*alone, *tensors[2:])[0], together[row])


def test_no_tokens():
    streams, looked_up, *weights = inputs(1, 128)
    assert kernels.engram_add(streams[:0], looked_up[:0], *weights).shape == (0, 4, 128)


def test_hashing_is_the_same_on_both_devices_and_waits_for_none():
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, 99_092, (50, 4), generator=generator)
    multipliers = torch.randint(1, 2**62 // 99_092, (4,), generator=generator) * 2 + 1
    primes = torch.randint(15_000_000, 17_000_000, (3, 8), generator=generator)
    offsets = torch.arange(24).reshape(3, 8) * 16_000_000
    on_gpu = [t.cuda() for t in (ids, multipliers, primes, offsets)]
    with unawaited():
        found = engram_rows_ref(on_gpu[0], 2, *on_gpu[1:])
    assert torch.equal(found.cpu(), engram_rows_ref(ids, 2, multipliers, primes, offsets))
