"""Books what a step produced: tokens committed, sequences ended, rows thrown away (§1.3).

Read next: `scheduler.py` (when it is called), `request.py` (when a sequence ends).
"""

from mdi_shared.plan import Ending, StepOutcome, StepPlan, StepResult
from mdi_shared.queues import Queues
from mdi_shared.request import Sequence, State

Tokens = tuple[tuple[int, ...], ...]


class Flight:
    """A step that was planned and not yet processed."""

    __slots__ = ("plan", "seqs", "step")

    def __init__(self, plan: StepPlan, seqs: list[Sequence]) -> None:
        self.plan = plan
        self.seqs = seqs  # not to be changed: the decode selection hands out the same list again
        self.step = plan.step  # moves on when the plan is repeated


def commit_step(queues: Queues, flight: Flight, result: StepResult) -> StepOutcome:
    """Book the result of `flight`; rows of sequences that have left meanwhile are dropped."""
    plan, seqs, tokens = flight.plan, flight.seqs, result.tokens
    assert len(tokens) == len(seqs), (
        f"step {flight.step} has {len(seqs)} sequences, its result {len(tokens)}"
    )
    ended: list[Ending] = []
    commit = _commit_prefill if plan.is_prefill else _commit_decode
    cut = commit(queues, flight, tokens, ended)
    if cut:
        visible = list(tokens)
        for index, count in cut.items():
            visible[index] = visible[index][:count]
        tokens = tuple(visible)
    return StepOutcome(
        step=flight.step,
        is_prefill=plan.is_prefill,
        seq_ids=plan.seq_ids,
        tokens=tokens,
        dropped=tuple(index for index, count in cut.items() if count == 0),
        ended=tuple(ended),
        n_waiting=len(queues.waiting),
        n_running=len(queues.running),
    )


def dropped_rows(flight: Flight) -> tuple[int, ...]:
    """Find the rows of a decode step whose sequences have left since it was planned."""
    running = State.RUNNING
    return tuple([i for i, seq in enumerate(flight.seqs) if seq.state is not running])


def _commit_prefill(
    queues: Queues, flight: Flight, tokens: Tokens, ended: list[Ending]
) -> dict[int, int]:
    """Book a prefill step; return the rows not fully visible and how much of them is."""
    cut: dict[int, int] = {}
    for index, (seq, q) in enumerate(zip(flight.seqs, flight.plan.qs, strict=True)):
        seq.inflight_total = 0
        if seq.is_finished:
            cut[index] = 0
            queues.join_running(seq)  # the next decode step frees it
            continue
        seq.cached += q
        if seq.cached < seq.num_tokens:  # a chunk that was not the last
            queues.waiting.appendleft(seq)
            continue
        new = tokens[index]
        assert len(new) == 1, f"{len(new)} tokens from the last chunk of a prompt"
        seq.extend(new)
        seq.num_drafts = queues.config.num_draft_tokens
        queues.join_running(seq)
        if seq.is_finished:
            ended.append(_end(queues, seq))
    return cut


def _commit_decode(
    queues: Queues, flight: Flight, tokens: Tokens, ended: list[Ending]
) -> dict[int, int]:
    """Book a decode step; return the rows not fully visible and how much of them is."""
    cut: dict[int, int] = {}
    rows = 1 + queues.config.num_draft_tokens
    running = State.RUNNING
    for index, seq in enumerate(flight.seqs):
        if seq.state is not running:  # finished, or preempted and its counters reset
            cut[index] = 0
            continue
        new = tokens[index]
        seq.inflight_total -= rows
        if len(new) == 1 and seq.num_tokens + 1 < seq.finish_at and new[0] not in seq.stop_ids:
            # What `extend` would do, written out: nearly all rows of all steps come by here.
            seq.num_tokens += 1
            seq.output_len += 1
            seq.cached += 1
            continue
        assert 1 <= len(new) <= rows, f"{len(new)} tokens from {rows} rows"
        emitted = seq.extend(new)
        seq.cached += emitted  # rejected drafts are not cached
        if seq.state is not running:
            queues.dead_running.append(seq)
            ended.append(_end(queues, seq))
            if emitted < len(new):
                cut[index] = emitted
    return cut


def _end(queues: Queues, seq: Sequence) -> Ending:
    queues.live.pop(seq.request.req_id, None)
    return Ending(seq.seq_id, seq.finish_reason, seq.output_len)
