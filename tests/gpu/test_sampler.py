"""The sampler's kernel: the CPU's tokens, its logprobs to rounding, and no waiting."""

from dataclasses import replace

import pytest
import torch

from mdi_exec.engine.sampling import Draw, SamplingParams
from mdi_exec.ops.gumbel import FRESH, mix, signed, stream_key
from mdi_exec.ops.kernels.sampler import sample_plain
from mdi_exec.ops.sampler import Sampler, sample_ref
from tests.exec.draws import rows_of_draws
from tests.gpu.marks import gpu
from tests.gpu.strictness import poisoned, unawaited

pytestmark = gpu

EOS = 1
VOCABULARIES = [129_280, 1024]
TEMPERATURES = [1.0, 0.0, 0.7, 1e-7, 2.5]
# float64 exponentials and logarithms of two devices differ in the last place; float32 is reported.
LOGPROB_RTOL = 1e-6


def draws_of(count, **options):
    seeds = [2**63 + 977 * i if i % 2 else 31 * i for i in range(count)]
    return [
        Draw(
            SamplingParams(
                temperature=TEMPERATURES[i % len(TEMPERATURES)], seq_seed=seeds[i], **options
            ),
            100_003 * i, i % 3,
        )
        for i in range(count)
    ]  # fmt: skip


def logits_of(count, vocab, kind):
    x = torch.randn(count, vocab, generator=torch.Generator().manual_seed(vocab)) * 4
    kinds = {"random": x, "equal": torch.zeros_like(x), "ties": x.round(), "two": x.sign() * 50}
    return kinds[kind]


def compare(logits, draws, blacklist=()):
    results = []
    for device in ("cpu", "cuda"):
        sampler = Sampler(logits.shape[1], eos_token_id=EOS, blacklist=blacklist, device=device)
        rows = rows_of_draws(draws, device)
        run = sample_ref if device == "cpu" else sample_plain
        with poisoned():
            results.append(run(logits.to(device), rows, sampler.bans))
    expected, found = results
    assert torch.equal(found.token_ids.cpu(), expected.token_ids)
    torch.testing.assert_close(
        found.logprobs.cpu(), expected.logprobs, rtol=LOGPROB_RTOL, atol=LOGPROB_RTOL
    )
    assert found.top_ids.shape == expected.top_ids.shape
    return found


@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize("count", [1, 3, 65])
@pytest.mark.parametrize("kind", ["random", "equal", "ties", "two"])
def test_tokens_are_the_cpus(vocab, count, kind):
    compare(logits_of(count, vocab, kind), draws_of(count), blacklist=[0, 7, vocab - 1])


def test_bans_and_golden_tokens():
    logits = logits_of(12, 1024, "random")
    logits[:, EOS] = 90.0
    found = compare(logits, draws_of(12, first_n_token_no_eos=1))
    assert (found.token_ids.cpu() != EOS).tolist() == [i % 3 == 0 for i in range(12)]
    logits[:, 5] = 99.0
    draws = draws_of(12, golden_token_ids=(5, -1, 1023))
    found = compare(logits, draws, blacklist=[5])
    assert found.token_ids[0] == 5
    assert found.logprobs[0] == -9999.0


def test_random_bits_are_the_cpus():
    seeds = torch.tensor([0, 42, signed(2**64 - 1), signed(2**63)])
    positions = torch.tensor([0, 10, 131_072, 2**40])
    keys = [stream_key(seeds.to(d), positions.to(d), FRESH).cpu() for d in ("cpu", "cuda")]
    assert torch.equal(*keys)
    tokens = torch.arange(129_280)
    bits = [mix(keys[0].to(d)[:, None] + tokens.to(d)).cpu() for d in ("cpu", "cuda")]
    assert torch.equal(*bits)


def test_a_row_is_sampled_alike_in_any_batch():
    logits, draws = logits_of(70, 129_280, "random").cuda(), draws_of(70)
    sampler = Sampler(129_280, eos_token_id=EOS, device="cuda")
    together = sampler(logits, rows_of_draws(draws, "cuda"))
    for row in (0, 1, 69):
        alone = sampler(logits[row : row + 1], rows_of_draws(draws[row : row + 1], "cuda"))
        assert alone.token_ids[0] == together.token_ids[row]
        assert alone.logprobs[0] == together.logprobs[row]


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9, "top_k": 50, "top_logprobs": 3}])
def test_nothing_waits_for_the_device(options):
    draws = draws_of(6)
    draws = [d._replace(params=replace(d.params, **options)) for d in draws]
    logits = logits_of(6, 1024, "random").cuda()
    sampler = Sampler(1024, eos_token_id=EOS, blacklist=[3], device="cuda")
    sampler(logits, rows_of_draws(draws, "cuda"))
    with unawaited():
        sampler(logits, rows_of_draws(draws, "cuda"))


def test_no_rows():
    sampler = Sampler(1024, eos_token_id=EOS, device="cuda")
    logits = torch.empty((0, 1024), device="cuda")
    found = sampler(logits, replace(rows_of_draws(draws_of(1), "cuda").part(slice(0))))
    assert found.token_ids.shape == (0,)
