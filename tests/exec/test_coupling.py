"""The accept rule by itself: what is shown has the model's distribution, whatever is drafted.

A model of five tokens, whose second token depends on the first, is drawn 200,000 times with one
draft. Where the draft is accepted the second token comes from the same step, else from the next.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mdi_exec.engine.drafting import Drafting
from mdi_exec.model.batch import Batch
from mdi_exec.ops import sampler
from mdi_exec.ops.sampler import NO_GOLDEN, Sampler, SamplingRows

DRAWS, VOCABULARY = 200_000, 5
CHI_SQUARE_999 = {4: 18.47, 24: 51.18}  # by degrees of freedom: exceeded once in a thousand
FIRST = torch.tensor([0.40, 0.25, 0.20, 0.10, 0.05])
GUESS = torch.tensor([0.15, 0.35, 0.20, 0.25, 0.05])
SECOND = torch.stack([FIRST.roll(k) for k in range(VOCABULARY)])  # by the first token


@pytest.fixture
def rows(monkeypatch):
    """A row for each draw, of temperature 1 and a seed of its own, at position 7."""
    monkeypatch.setattr(sampler, "ROWS_AT_ONCE", DRAWS)
    whole, off = torch.arange(DRAWS), torch.zeros(DRAWS, dtype=torch.bool)
    return SamplingRows(
        seeds=whole, positions=torch.full_like(whole, 7), temperature=torch.ones(DRAWS).double(),
        top_p=torch.ones(DRAWS).double(), top_k=torch.full_like(whole, 99),
        golden_ids=torch.full_like(whole, NO_GOLDEN), is_greedy=off, bans_eos=off,
        has_filters=False, has_noise=True, num_top=0,
    )  # fmt: skip


def draw(probabilities, rows):
    logits = probabilities.log().expand(DRAWS, VOCABULARY)
    return Sampler(VOCABULARY, eos_token_id=1)(logits, rows).token_ids


def accepted_by(drafts, tokens):
    """Verify one draft a sequence, whose two rows drew tokens [n, 2]."""
    head = SimpleNamespace(model=SimpleNamespace(
        device=torch.device("cpu"), config=SimpleNamespace(vocab_size=VOCABULARY)))  # fmt: skip
    drafting = Drafting(head, SimpleNamespace(num_slots=DRAWS), None, 1)
    drafting.ids[:, 0] = drafts
    whole = torch.arange(DRAWS + 1)
    batch = Batch(**dict.fromkeys(Batch.__dataclass_fields__))
    batch = replace(batch, slots=whole[:-1], cu_q=2 * whole, k_len=whole[1:],
                    token_ids=torch.zeros(1))  # fmt: skip
    return drafting.verify(batch, tokens.flatten())


def chi_square(counts, probabilities):
    wanted = probabilities * counts.sum()
    return ((counts - wanted) ** 2 / wanted).sum()


def test_what_is_shown_has_the_models_distribution(rows):
    first, draft = draw(FIRST, rows), draw(GUESS, rows)
    behind = replace(rows, positions=rows.positions + 1)
    verified = accepted_by(draft, torch.stack((first, draw(SECOND[draft], behind)), dim=1))
    is_accepted = verified.accepted == 1
    assert torch.equal(is_accepted, draft == first)
    # Who was rejected draws the same position again, behind the token that stands now.
    second = torch.where(is_accepted, verified.last, draw(SECOND[first], behind))
    assert torch.equal(verified.last[~is_accepted], first[~is_accepted])
    pairs = torch.bincount(VOCABULARY * first + second, minlength=VOCABULARY**2)
    joint = (FIRST.unsqueeze(1) * SECOND).flatten()
    assert chi_square(pairs, joint) < CHI_SQUARE_999[24]
    # Nor does acceptance favour any token behind it.
    for token in range(VOCABULARY):
        alike = second[is_accepted & (first == token)]
        counts = torch.bincount(alike, minlength=VOCABULARY)
        assert chi_square(counts, SECOND[token]) < CHI_SQUARE_999[4]


def test_acceptance_lies_between_the_couplings_bounds(rows):
    """From (1 - TV) / (1 + TV) to 1 - TV, the most that any rule can accept."""
    distance = (FIRST - GUESS).abs().sum() / 2
    share = (draw(FIRST, rows) == draw(GUESS, rows)).double().mean()
    assert (1 - distance) / (1 + distance) - 0.005 < share < 1 - distance + 0.005
