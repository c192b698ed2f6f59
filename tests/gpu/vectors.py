"""Inputs for kernels over vectors, and comparisons that name the first difference."""

import torch
from torch import Tensor

DEVICE = "cuda"
ROW_COUNTS = (1, 3, 127, 129, 1000)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).to(DEVICE)


def every_magnitude(group: int) -> Tensor:
    """Groups [32640, group]: each finite magnitude of bfloat16 once as a group's largest.

    The rest of a group is random below it: subnormals, zeros of both signs, and all exponents.
    """
    generator = torch.Generator().manual_seed(7)
    largest = torch.arange(0x7F80, dtype=torch.int32).unsqueeze(1)
    near = (largest - torch.randint(0, 512, (0x7F80, group // 2), generator=generator)).clamp(0)
    far = (torch.rand(0x7F80, group - group // 2, generator=generator) * (largest + 1)).to(
        torch.int32
    )
    bits = torch.cat((near, far), dim=1)
    bits[:, :1] = largest
    signs = torch.randint(0, 2, bits.shape, generator=generator, dtype=torch.int32) << 15
    return (bits | signs).to(torch.int16).view(torch.bfloat16).to(DEVICE)


def ties(group: int) -> Tensor:
    """Groups whose values lie on and beside the halfway points of E2M1 and E4M3, every scale."""
    halfway = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, 0.0, 0.5, 4.0, 4.25, 1.0625,
                            0.001953125, 0.0029296875, 0.0009765625])  # fmt: skip
    row = torch.cat((halfway, -halfway))[torch.arange(group) % 32]
    row[1] = 6.0
    scales = 2.0 ** torch.arange(-100, 100, dtype=torch.float32).unsqueeze(1)
    exact = (row * scales).to(torch.bfloat16)
    above = (exact.view(torch.int16) + 1).view(torch.bfloat16)
    below = (exact.view(torch.int16) - (exact != 0).to(torch.int16)).view(torch.bfloat16)
    return torch.cat((exact, above, below)).to(DEVICE)


def raw(x: Tensor) -> Tensor:
    """The bits of x, as integers."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def assert_bits(found: Tensor, expected: Tensor) -> None:
    """Assert the same shape, dtype and bits; the signs of zeros count."""
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    differ = (raw(found) != raw(expected)).nonzero()
    if len(differ):
        at = tuple(differ[0].tolist())
        raise AssertionError(
            f"{len(differ)} of {found.numel()} differ, first at {at}: "
            f"{found.float()[at]} instead of {expected.float()[at]}"
        )


def assert_close_in_ulps(found: Tensor, expected: Tensor, *, ulps: int, share: float) -> None:
    """Assert bfloat16 results at most `ulps` steps apart, and all but a `share` of them equal."""
    assert (found.shape, found.dtype) == (expected.shape, torch.bfloat16)

    def steps(x: Tensor) -> Tensor:
        bits = raw(x).to(torch.int32)
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    apart = (steps(found) - steps(expected)).abs()
    assert apart.max() <= ulps
    assert (apart != 0).float().mean() <= share


def assert_one_code_apart(found: Tensor, expected: Tensor, *, share: float) -> None:
    """Assert E4M3-rounded values [..., d] equal but for a `share` of them, off by one code."""
    assert (found.shape, found.dtype) == (expected.shape, torch.bfloat16)
    a, b = found.float(), expected.float()
    amax = torch.unflatten(b.abs(), -1, (-1, 32)).amax(dim=-1).repeat_interleave(32, dim=-1)
    step = 0.125 * torch.maximum(a.abs(), b.abs()) + amax * 2.0**-16
    assert ((a - b).abs() <= step).all()
    assert (a != b).float().mean() <= share
