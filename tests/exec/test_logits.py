"""The whole model against golden logits: every row of a prompt and a few decode steps, both modes.

The engine's golden test decodes on to the end of the data. Decode steps feed the stored tokens. The
rounded mode is chaotic (a legitimate change of softmax order moves logits by 0.1 on average), so
its bounds are those measured with the golden data.
"""

import pytest
import torch

from mdi_exec.numerics import Numerics

LENGTHS = (1, 37, 127, 128, 129, 300, 520)
DECODE_STEPS = 6
EXACT_MAX_ABS = 1e-4
ROUNDED_MEAN_ABS, ROUNDED_MAX_ABS = 0.2, 2.0
ROUNDED_SAME_ARGMAX = 0.85
CLEAR_GAP = 1.0  # rows whose best token leads by more must agree on it


def run(runner, golden):
    cache = runner.cache()
    prompt = runner.prefill(cache, golden["prompt_ids"])
    return prompt, runner.decode(cache, len(prompt), golden["decode_ids"][:DECODE_STEPS])


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
    runner = runners[Numerics.QUANTISED]
    files = {length: golden(f"logits/p{length}") for length in LENGTHS}
    return {length: (file, *run(runner, file)) for length, file in files.items()}


@pytest.mark.parametrize("length", LENGTHS)
def test_with_rounding_logits_are_as_close_as_rounding_allows(rounded_runs, length):
    expected, prompt, decoded = rounded_runs[length]
    found = torch.cat((prompt[-1:], decoded))
    after = expected["decode_logits"][:DECODE_STEPS]
    wanted = torch.cat((expected["prefill_last"].unsqueeze(0), after))
    error = (found - wanted).abs()
    assert error.mean() <= ROUNDED_MEAN_ABS
    assert error.max() <= ROUNDED_MAX_ABS
    is_clear = expected["top2_gap"][: DECODE_STEPS + 1] > CLEAR_GAP
    assert torch.equal(found.argmax(dim=1)[is_clear], wanted.argmax(dim=1)[is_clear])
    is_clear = expected["prefill_top2_gap"] > CLEAR_GAP
    mine, theirs = prompt.argmax(dim=1), expected["prefill_argmax"].long()
    assert torch.equal(mine[is_clear], theirs[is_clear])


def test_with_rounding_most_prompt_rows_choose_the_golden_token(rounded_runs):
    prompts = [p.argmax(1) == f["prefill_argmax"] for f, p, _ in rounded_runs.values()]
    assert torch.cat(prompts).float().mean() >= ROUNDED_SAME_ARGMAX
