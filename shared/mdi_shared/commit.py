"""Books what a step produced: tokens committed, sequences ended, rows thrown away (R3).

Read next: `scheduler.py` (when it is called), `request.py` (when a sequence ends).
"""

from mdi_shared.plan import Ending, StepOutcome, StepPlan, StepResult
from mdi_shared.queues import Queues
from mdi_shared.request import Sequence, State

Tokens = tuple[tuple[int, ...], ...]


class InFlightStep:
    """A step that was planned and not yet processed."""

    __slots__ = ("number", "plan", "seqs")

    def __init__(self, plan: StepPlan, seqs: list[Sequence]) -> None:
        self.plan = plan
        self.seqs = seqs  # not to be changed: the decode selection hands out the same list again
        self.number = plan.step  # moves on when the plan is repeated


def commit_step(queues: Queues, step: InFlightStep, result: StepResult) -> StepOutcome:
    """Book the result of `step`; rows of sequences that have left meanwhile are dropped."""
    plan, seqs, tokens = step.plan, step.seqs, result.tokens
    assert len(tokens) == len(seqs), (
        f"step {step.number} has {len(seqs)} sequences, its result {len(tokens)}"
    )
    ended: list[Ending] = []
    commit = _commit_prefill if plan.is_prefill else _commit_decode
    cut = commit(queues, step, tokens, ended)
    if cut:
        visible = list(tokens)
        for index, count in cut.items():
            visible[index] = visible[index][:count]
        tokens = tuple(visible)
    return StepOutcome(
        step=step.number,
        is_prefill=plan.is_prefill,
        seq_ids=plan.seq_ids,
        tokens=tokens,
        dropped=tuple(index for index, count in cut.items() if count == 0),
        ended=tuple(ended),
        n_waiting=len(queues.waiting),
        n_running=len(queues.running),
    )


def dropped_rows(step: InFlightStep) -> tuple[int, ...]:
    """Find the rows of a decode step whose sequences have left since it was planned."""
    running = State.RUNNING
    return tuple([i for i, seq in enumerate(step.seqs) if seq.state is not running])


def _commit_prefill(
    queues: Queues, step: InFlightStep, tokens: Tokens, ended: list[Ending]
) -> dict[int, int]:
    """Book a prefill step, none of whose rows is ever cut short (see `_commit_decode`)."""
    for index, (seq, q) in enumerate(zip(step.seqs, step.plan.qs, strict=True)):
        seq.inflight_total = 0
        assert not seq.is_finished, "a prefill step is processed in the turn that planned it"
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
    return {}


def _commit_decode(
    queues: Queues, step: InFlightStep, tokens: Tokens, ended: list[Ending]
) -> dict[int, int]:
    """Book a decode step; return the rows not fully visible and how much of them is."""
    cut: dict[int, int] = {}
    rows = 1 + queues.config.num_draft_tokens
    running = State.RUNNING
    for index, seq in enumerate(step.seqs):
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
            queues.num_dead_running += 1
            ended.append(_end(queues, seq))
            if emitted < len(new):
                cut[index] = emitted
    return cut


def _end(queues: Queues, seq: Sequence) -> Ending:
    queues.live.pop(seq.request.req_id, None)
    return Ending(seq.seq_id, seq.finish_reason, seq.output_len)
