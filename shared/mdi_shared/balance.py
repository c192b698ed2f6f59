"""One target step time for a data-parallel group (engine-semantics §7.3, "DP balance").

Every rank waits for the slowest, so the target that is best for one may be poor for all. Each rank
says what it would run at sixteen shares of the target; the group takes the share with the most
tokens per time. A rank with little work then does not stretch a step, and one with long contexts
takes smaller chunks. Nothing here communicates: a driver carries the offers.

Read next: `chunking.py` (the target), `loop.py` (when ranks balance).
"""

from collections.abc import Sequence
from typing import NamedTuple

from mdi_shared.chunking import CostTarget
from mdi_shared.cost.step_cost import group_device_ns
from mdi_shared.cost.work import prefill_work
from mdi_shared.prefill import PrefillSelection

SHARES = 16


class Offer(NamedTuple):
    """What a rank would run at 1/16, 2/16 … of the target: tokens, and the time of its step, ns.

    The time is the device's and the host's around it, which a prefill step does not hide. A rank
    without work offers nothing in no time.
    """

    tokens: tuple[int, ...] = (0,) * SHARES
    step_ns: tuple[int, ...] = (0,) * SHARES


def make_offer(selection: PrefillSelection, policy: CostTarget) -> Offer:
    """Return what `selection` would pick at each share of the policy's target; changes nothing."""
    tokens, step_ns = [], []
    for share in range(1, SHARES + 1):
        rows = selection.preview(policy.at(share, SHARES))
        tokens.append(sum(q for q, _, _ in rows))
        device_ns = policy.cost.device_ns(prefill_work(policy.shape, rows)) if rows else 0
        host = policy.cost.host.of_step(len(rows), tokens[-1], is_alone=False) if rows else (0,)
        step_ns.append(device_ns + sum(host))
    return Offer(tuple(tokens), tuple(step_ns))


def best_share(offers: Sequence[Offer]) -> int:
    """Return the share, 1 to 16, at which the group runs most tokens per time; of equal ones the
    smallest, and all of the target when no rank has work."""
    best, best_tokens, best_ns = SHARES, 0, 1
    for index in range(SHARES):
        tokens = sum(offer.tokens[index] for offer in offers)
        ns = group_device_ns([offer.step_ns[index] for offer in offers])
        if tokens * best_ns > best_tokens * ns:  # exact, so that all ranks agree
            best, best_tokens, best_ns = index + 1, tokens, ns
    return best
