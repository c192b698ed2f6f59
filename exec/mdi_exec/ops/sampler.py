"""From logits to tokens: bans, temperature, top-p and top-k, Gumbel-max (docs/rules.md, R28).

A row's result depends on that row alone. Everything that sums over the vocabulary sums integers,
whose order does not matter: probabilities become fixed-point masses first, as in the production
sampler. Log-probabilities and scores are float64. This is not where a request ends (the driver
knows EOS and lengths). Read next: `gumbel.py` (random numbers), `engine/sampling.py` (options).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mdi_exec.ops.backend import select
from mdi_exec.ops.gumbel import FRESH, gumbel_noise
from mdi_shared.errors import ConfigError

FILTERED_LOGPROB = -9999.0  # reported in place of minus infinity
ROWS_AT_ONCE = 64  # bounds the float64 scratch space: a few arrays of this many rows
MOST_MASS_BITS = 52  # what a float64 probability has
NO_GOLDEN = -1  # in place of a golden token: sample normally


class SamplingNeeds(NamedTuple):
    """What the most demanding of some rows needs: work that none of them needs is left out."""

    has_filters: bool
    has_noise: bool
    num_top: int


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """What n rows are asked for, as tensors [n].

    seeds, positions, top_k, golden_ids int64; temperature, top_p float64; is_greedy and bans_eos
    bool. `has_filters`, `has_noise` and `num_top` say what the most demanding row needs.
    """

    seeds: Tensor
    positions: Tensor
    temperature: Tensor
    top_p: Tensor
    top_k: Tensor
    golden_ids: Tensor
    is_greedy: Tensor
    bans_eos: Tensor
    has_filters: bool
    has_noise: bool
    num_top: int

    @classmethod
    def place(cls, tensors: Mapping[str, Tensor], needs: SamplingNeeds) -> "SamplingRows":
        """Build from what `sampling.draw_columns` gave, by now on a device."""
        values: dict[str, Any] = {**tensors, **needs._asdict()}
        return cls(**values)

    def part(self, rows: slice | Tensor) -> "SamplingRows":
        """Return these rows (a range, or int64 indices), with the whole batch's needs."""
        columns = {field.name: getattr(self, field.name) for field in fields(self)}
        cut: dict[str, Any] = {
            name: c[rows] for name, c in columns.items() if isinstance(c, Tensor)
        }
        return replace(self, **cut)


class Sampled(NamedTuple):
    """token_ids int64 [n], their logprobs float32 [n], and the best alternatives.

    top_ids int64 and top_logprobs float32 are [n, N], best first, N the most any row asks for.
    Logprobs are of the tempered, filtered distribution; -9999 stands for impossible.
    """

    token_ids: Tensor
    logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


class Bans(NamedTuple):
    """Tokens never drawn: is_banned bool [vocab_size], and EOS in rows that ban it."""

    is_banned: Tensor
    eos_token_id: int


class Sampler:
    """Samples rows of logits; `blacklist` token ids are never chosen (golden tokens excepted)."""

    def __init__(
        self, vocab_size: int, *, eos_token_id: int, blacklist: Sequence[int] = (),
        device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        banned = sorted({*blacklist, eos_token_id})
        if not all(0 <= token < vocab_size for token in banned):
            raise ConfigError("blacklist", tuple(blacklist), f"each, and eos_token_id = "
                              f"{eos_token_id}, must be below {vocab_size}")  # fmt: skip
        if len(banned) >= vocab_size:
            raise ConfigError("blacklist", tuple(blacklist), "must leave a token besides EOS")
        self.vocab_size = vocab_size
        is_banned = torch.zeros(vocab_size, dtype=torch.bool)
        is_banned[sorted(set(blacklist))] = True
        self.bans = Bans(is_banned.to(device), eos_token_id)

    @torch.inference_mode()
    def __call__(self, logits: Tensor, rows: SamplingRows) -> Sampled:
        """Sample logits float32 [n, vocab_size], one draw a row; logits are left as they are."""
        count = rows.seeds.shape[0]
        assert logits.shape == (count, self.vocab_size), f"{count} draws, logits {logits.shape}"
        return sample(logits, rows, self.bans)


def sample_ref(logits: Tensor, rows: SamplingRows, bans: Bans) -> Sampled:
    parts = [
        _sample(logits[i : i + ROWS_AT_ONCE], rows.part(slice(i, i + ROWS_AT_ONCE)), bans)
        for i in range(0, max(logits.shape[0], 1), ROWS_AT_ONCE)
    ]
    return Sampled(*map(torch.cat, zip(*parts, strict=True)))


def sample(logits: Tensor, rows: SamplingRows, bans: Bans) -> Sampled:
    """Draw a token for each row of float32 logits; nothing waits for the device.

    The kernel serves rows without filters and alternatives; others run on the reference.
    """
    is_plain = not rows.has_filters and not rows.num_top
    run = select(
        logits, ref=sample_ref, kernel="sampler.sample_plain" if is_plain else None,
        dtypes=(torch.float32,),
    )  # fmt: skip
    return run(logits, rows, bans)


def _sample(logits: Tensor, rows: SamplingRows, bans: Bans) -> Sampled:
    allowed = _ban(logits, rows, bans)
    logprobs = filtered_logprobs(allowed, rows)
    token_ids = allowed.argmax(dim=1)
    if rows.has_noise:
        noise = gumbel_noise(rows.seeds, rows.positions, FRESH, logits.shape[1])
        scores = (logprobs + noise).masked_fill(logprobs == -torch.inf, -torch.inf)
        token_ids = torch.where(rows.is_greedy, token_ids, scores.argmax(dim=1))
    token_ids = torch.where(rows.golden_ids == NO_GOLDEN, token_ids, rows.golden_ids)
    top_ids = token_ids.new_empty((len(token_ids), 0))
    if rows.num_top:
        order = torch.sort(logprobs, dim=1, descending=True, stable=True).indices
        top_ids = order[:, : rows.num_top]
    reported = logprobs.clamp(min=FILTERED_LOGPROB).to(torch.float32)
    drawn = reported.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    return Sampled(token_ids, drawn, top_ids, reported.gather(1, top_ids))


def _ban(logits: Tensor, rows: SamplingRows, bans: Bans) -> Tensor:
    allowed = logits.masked_fill(bans.is_banned, -torch.inf)
    eos = allowed[:, bans.eos_token_id]
    allowed[:, bans.eos_token_id] = eos.masked_fill(rows.bans_eos, -torch.inf)
    return allowed


def filtered_logprobs_ref(logits: Tensor, rows: SamplingRows) -> Tensor:
    tempered = logits.to(torch.float64) * (1.0 / rows.temperature).unsqueeze(1)
    tempered = tempered - tempered.amax(dim=1, keepdim=True)
    bits = mass_bits(logits.shape[1])
    masses = (torch.exp(tempered) * 2.0**bits).to(torch.int64)
    if rows.has_filters:
        kept = _kept(tempered, masses, rows)
        tempered = tempered.masked_fill(~kept, -torch.inf)
        masses = masses.masked_fill(~kept, 0)
    total = masses.sum(dim=1, keepdim=True).to(torch.float64)
    return tempered - torch.log(total * 2.0**-bits)


def filtered_logprobs(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Return float64 logprobs [n, V] after temperature, top-p and top-k; -inf = filtered.

    A token stays iff the mass strictly before it, in descending order with ties to the lower id,
    is at most top_p, and its rank is below top_k. At least one always stays.
    """
    return select(logits, ref=filtered_logprobs_ref)(logits, rows)


def _kept(tempered: Tensor, masses: Tensor, rows: SamplingRows) -> Tensor:
    order = torch.sort(tempered, dim=1, descending=True, stable=True).indices
    sorted_masses = masses.gather(1, order)
    up_to = sorted_masses.cumsum(dim=1)
    most = up_to[:, -1:].to(torch.float64) * rows.top_p.unsqueeze(1)
    ranks = torch.arange(order.shape[1], device=order.device)
    stays = ((up_to - sorted_masses).to(torch.float64) <= most) & (ranks < rows.top_k.unsqueeze(1))
    return torch.empty_like(stays).scatter_(1, order, stays)


def mass_bits(vocab_size: int) -> int:
    """Return fractional bits such that vocab_size masses of at most 1 add up below 2^63."""
    return min(MOST_MASS_BITS, 62 - (vocab_size - 1).bit_length())
