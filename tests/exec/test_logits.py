"""The whole model against golden logits: every row of a prompt and a few decode steps, both modes.

Decode steps feed the stored tokens. The rounded mode magnifies last bits: one that differs moves a
row by 0.1 on average. Most rows are golden all the same where the library sums as the golden data's
did (`sums_like_golden`), and steps of few rows are multiplied as the released reference multiplies
them (`Runner.few_rows_apart`); the engine's golden test has the engine's own tiles. Elsewhere the
bounds are those measured with the golden data.
"""

from dataclasses import replace

import pytest
import torch

from mdi_exec.numerics import Numerics
from tests.exec.engines import report

LENGTHS = (1, 37, 127, 128, 129, 300, 520)
DECODE_STEPS, ALL_STEPS = 6, 24
EXACT_MAX_ABS = 1e-4
ROUNDED_MEAN_ABS, ROUNDED_MAX_ABS = 0.2, 2.0
ROUNDED_SAME_ARGMAX = 0.85
CLOSE_MEAN_ABS, CLOSE_SHARE = 0.05, 0.8
CLEAR_GAP = 1.0  # rows whose best token leads by more must agree on it


def run(runner, golden, steps=DECODE_STEPS):
    cache, ids = runner.cache(), golden["prompt_ids"]
    prompt = runner.prefill(cache, ids, given_len=len(ids))
    return prompt, runner.decode(cache, len(prompt), golden["decode_ids"][:steps])


@pytest.mark.parametrize("length", LENGTHS)
def test_without_rounding_logits_are_golden(exact, golden, length):
    expected = golden(f"logits_f32/p{length}")
    prompt, decoded = run(exact, expected)
    torch.testing.assert_close(prompt[-1], expected["prefill_last"], rtol=0, atol=EXACT_MAX_ABS)
    wanted = expected["decode_logits"][:DECODE_STEPS]
    torch.testing.assert_close(decoded, wanted, rtol=0, atol=EXACT_MAX_ABS)
    assert torch.equal(prompt.argmax(dim=1), expected["prefill_argmax"].long())
    if "prefill_all" in expected:
        torch.testing.assert_close(prompt, expected["prefill_all"], rtol=0, atol=EXACT_MAX_ABS)


@pytest.fixture(scope="module")
def rounded_runs(runners, golden):
    """Golden data and our logits (all prompt rows, decode rows) by prompt length."""
    runner = replace(runners[Numerics.QUANTISED], few_rows_apart=True)
    files = {length: golden(f"logits/p{length}") for length in LENGTHS}
    return {length: (file, *run(runner, file, ALL_STEPS)) for length, file in files.items()}


def beside_golden(rounded_run):
    """Logits of the prompt's last row and of all decode rows, found and golden."""
    expected, prompt, decoded = rounded_run
    wanted = torch.cat((expected["prefill_last"].unsqueeze(0), expected["decode_logits"]))
    return torch.cat((prompt[-1:], decoded)), wanted


@pytest.mark.parametrize("length", LENGTHS)
def test_with_rounding_logits_are_as_close_as_rounding_allows(rounded_runs, length):
    expected, prompt, _ = rounded_runs[length]
    found, wanted = beside_golden(rounded_runs[length])
    error = (found - wanted).abs()
    assert error.mean() <= ROUNDED_MEAN_ABS
    assert error.max() <= ROUNDED_MAX_ABS
    is_clear = expected["top2_gap"] > CLEAR_GAP
    assert torch.equal(found.argmax(dim=1)[is_clear], wanted.argmax(dim=1)[is_clear])
    is_clear = expected["prefill_top2_gap"] > CLEAR_GAP
    mine, theirs = prompt.argmax(dim=1), expected["prefill_argmax"].long()
    assert torch.equal(mine[is_clear], theirs[is_clear])


def test_with_rounding_most_prompt_rows_choose_the_golden_token(rounded_runs):
    prompts = [p.argmax(1) == f["prefill_argmax"] for f, p, _ in rounded_runs.values()]
    assert torch.cat(prompts).float().mean() >= ROUNDED_SAME_ARGMAX


def test_with_rounding_most_rows_are_the_golden_ones(rounded_runs, sums_like_golden):
    """All but one in a hundred where this was measured; the rest is room for other last bits."""
    means = []
    for length, rounded_run in rounded_runs.items():
        found, wanted = beside_golden(rounded_run)
        error = (found - wanted).abs()
        means.append(error.mean(dim=1))
        close = (means[-1] <= CLOSE_MEAN_ABS).sum()
        report(f"prompt of {length}: mean {error.mean():.2g}, max {error.max():.2g}, "
               f"{close} of {len(error)} rows within {CLOSE_MEAN_ABS}")  # fmt: skip
    share = (torch.cat(means) <= CLOSE_MEAN_ABS).float().mean()
    report(f"{share:.1%} of all rows; float32 sums like the golden data's: {sums_like_golden}")
    assert share >= CLOSE_SHARE or not sums_like_golden
