"""The serving loop, written once for both worlds.

The loop is part of the policy: when it looks for arrivals and when it waits decides which batches
are made. So it is a generator that yields what it wants done, as an effect, and is sent the
answer; a driver answers in virtual time or in wall time and makes no decision of its own.

    poll ─► anyone unfinished? ─► vote ─► plan ─► launch ─► await the step before ─► commit ─┐
     ▲                                                                                       │
     └───────────────────────────────────────────────────────────────────────────────────────┘

A prefill step, and every step without ZOS, is awaited in its own turn; a decode step with ZOS is
awaited in the next one, so that planning overlaps the device (docs/rules.md, R24).
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple

from mdi_shared.plan import Advance, Ending, StepOutcome, StepPlan, StepResult
from mdi_shared.repeat import Horizon
from mdi_shared.request import REASONS, Request, State
from mdi_shared.scheduler import Scheduler
from mdi_shared.vote import ANY, NONE, Ballot


@dataclass(frozen=True, slots=True)
class Poll:
    """Look at the world. Answer: `News`."""


class News(NamedTuple):
    """Requests and aborts (by `req_id`) since the last poll, in order of arrival.

    `now_ns` is the time of this poll, which only scheduling policies ask for.
    """

    arrivals: tuple[Request, ...] = ()
    aborts: tuple[str, ...] = ()
    now_ns: int = 0


class Vote(NamedTuple):
    """Combine this ballot with those of the other ranks. Answer: bool.

    `topic` is "unfinished" once per turn, "prefill" for the decision and "admitted" for its
    confirmation. All ranks cast the same topics in the same order.
    """

    topic: str
    ballot: Ballot


class Launch(NamedTuple):
    """Start a step. Answer: int, how many steps the driver took in one go; 1 is always right.

    A driver that can foretell results may take as many steps of this very batch as all ranks'
    horizons allow (`common_repeats`), the same number on each. Between two launches it awaits the
    oldest step in flight, as the loop would (`Scheduler.advance`).
    """

    plan: StepPlan
    horizon: Horizon


@dataclass(frozen=True, slots=True)
class AwaitStep:
    """Wait for the oldest step in flight. Answer: `StepResult`."""


@dataclass(frozen=True, slots=True)
class AwaitArrival:
    """Sleep until something arrives. Answer: bool, False when nothing ever will."""


class Report(NamedTuple):
    """Tell the driver what became visible; no answer.

    `outcome` is a processed step, `advance` several repeated ones before it. `ended` are requests
    that left without a step: aborted, refused, or stopped by preemption.
    """

    ended: tuple[Ending, ...] = ()
    outcome: StepOutcome | None = None
    advance: Advance | None = None


POLL, AWAIT_STEP, AWAIT_ARRIVAL = Poll(), AwaitStep(), AwaitArrival()
Effect = Poll | Vote | Launch | AwaitStep | AwaitArrival | Report
Answer = News | StepResult | bool | int | None
Loop = Generator[Effect, Answer, None]


def serve(scheduler: Scheduler, *, num_ranks: int = 1) -> Loop:
    """Serve until the driver says that nothing will arrive and all requests have ended.

    Yields effects for one rank of `num_ranks`. Raises `DeadlockError` when requests wait that no
    step can ever serve.
    """
    while True:
        news: Answer = yield POLL
        assert isinstance(news, News), news
        if scheduler.decisions is not None:
            scheduler.decisions.view.now_ns = news.now_ns
        if news.arrivals or news.aborts:
            yield from _take_in(scheduler, news)
        unfinished = scheduler.has_unfinished()
        if num_ranks > 1:
            unfinished = yield Vote("unfinished", Ballot(ANY, unfinished))  # type: ignore[assignment]
        if not unfinished:
            yield from _drain(scheduler)
            if not (yield AWAIT_ARRIVAL):
                return
            continue
        ballot = scheduler.ballot()
        if ballot.rule == NONE or not (ballot.want or num_ranks > 1):
            plan = scheduler.plan_decode(ballot)
        else:
            plan = yield from _decide(scheduler, ballot, num_ranks)
        if plan.ignored:
            yield Report(_without_aborted(plan.ignored))
        horizon = scheduler.horizon(plan)
        taken = yield Launch(plan, horizon)
        assert isinstance(taken, int), taken
        assert 1 <= taken <= horizon.steps, f"{taken} of {horizon.steps} steps"
        advance = scheduler.advance(taken - 1) if taken > 1 else None
        yield from _drain(scheduler, 0 if plan.is_prefill else scheduler.keep, advance)
        scheduler.release()


def _take_in(scheduler: Scheduler, news: News) -> Loop:
    for request in news.arrivals:
        scheduler.submit(request)
    if news.aborts:
        ended = [scheduler.abort(req_id) for req_id in news.aborts]
        yield Report(tuple(ending for ending in ended if ending is not None))


def _decide(
    scheduler: Scheduler, ballot: Ballot, num_ranks: int
) -> Generator[Effect, Answer, StepPlan]:
    """Decide between prefill and decode, with the group where there is one (R6)."""
    go: Answer = ballot.want
    if num_ranks > 1:
        go = yield Vote("prefill", ballot)
    if not go:
        return scheduler.plan_decode(ballot)
    plan = scheduler.try_prefill(ballot) if ballot.want else None
    admitted: Answer = plan is not None
    if num_ranks > 1:
        # Without this second vote, ranks that cannot admit anyone would keep the group on empty
        # prefill steps and nobody would decode.
        admitted = yield Vote("admitted", Ballot(ANY, plan is not None))
    if not admitted:
        return scheduler.plan_decode(ballot)
    return plan if plan is not None else scheduler.plan_idle_prefill(ballot)


def _without_aborted(ignored: tuple[Ending, ...]) -> tuple[Ending, ...]:
    """Requests refused or stopped by a plan; aborted ones were reported when it happened."""
    return tuple(ending for ending in ignored if ending.reason != REASONS[State.ABORTED])


def _drain(scheduler: Scheduler, keep: int = 0, advance: Advance | None = None) -> Loop:
    """Process steps in flight, oldest first, until `keep` are left; `advance` came before them."""
    while scheduler.num_in_flight > keep:
        result = yield AWAIT_STEP
        assert isinstance(result, StepResult), result
        yield Report((), scheduler.commit(result), advance)
        advance = None
    assert advance is None, "more steps than one leave one to process"
