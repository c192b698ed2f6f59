"""Books what a step produced: tokens committed, sequences ended, rows thrown away (R3).

Read next: `scheduler.py` (when it is called), `request.py` (when a sequence ends).
"""

from itertools import chain

from mdi_shared.plan import Ending, StepOutcome, StepPlan, StepResult
from mdi_shared.queues import Queues
from mdi_shared.request import Sequence, State

Tokens = tuple[tuple[int, ...], ...]


class InFlightStep:
    """A step that was planned and not yet processed."""

    __slots__ = ("num_departed", "number", "plan", "seqs")

    def __init__(self, plan: StepPlan, seqs: list[Sequence], num_departed: int) -> None:
        self.plan = plan
        self.seqs = seqs  # not to be changed: all steps of a batch share the list
        self.number = plan.step  # moves on when the plan is repeated
        self.num_departed = num_departed  # when it was planned


def commit_step(queues: Queues, step: InFlightStep, result: StepResult) -> StepOutcome:
    """Book the result of `step`; rows of sequences that have left meanwhile are dropped."""
    plan, tokens = step.plan, result.tokens
    assert tokens is None or len(tokens) == len(step.seqs), (
        f"step {step.number} has {len(step.seqs)} sequences, its result {len(tokens)}"
    )
    dropped: tuple[int, ...] = ()
    ended: list[Ending] = []
    if plan.decodes:
        dropped = dropped_rows(queues, step)
        cut = dict.fromkeys(dropped, 0)  # rows not fully visible, and how much of them is
        queues.clock.done += 1
        if queues.is_even:
            ended = _commit_even(queues, step, tokens)
        else:
            assert tokens is not None, "each sequence must be told its tokens"
            ended = _commit_each(queues, step, tokens, cut)
        if cut and tokens:
            visible = list(tokens)
            for index, count in cut.items():
                visible[index] = visible[index][:count]
            tokens = tuple(visible)
    if plan.prompts:
        assert tokens is not None, "the first token of a prompt may end it"
        ended += _commit_prompts(queues, step, tokens)
    return StepOutcome(
        step.number, plan.is_prefill, plan.batch, tokens or (), dropped, tuple(ended),
        len(queues.waiting), len(queues.running),
    )  # fmt: skip


def dropped_rows(queues: Queues, step: InFlightStep) -> tuple[int, ...]:
    """Find the rows of sequences that decoded and have left since the step was planned."""
    if step.num_departed == queues.num_departed:
        return ()
    decoded = step.seqs[: step.plan.num_decoding]
    return tuple([i for i, seq in enumerate(decoded) if seq.clock is None])


def _commit_prompts(queues: Queues, step: InFlightStep, tokens: Tokens) -> list[Ending]:
    """Book a step's prompts, none of whose rows is ever cut short; return the requests it ends."""
    ended: list[Ending] = []
    prompts, first = step.plan.prompts, step.plan.num_decoding
    for seq, (q, _, _), new in zip(step.seqs[first:], prompts, tokens[first:], strict=True):
        assert not seq.is_finished, "prompts are processed in the turn that planned them"
        seq.prefilled += q
        if queues.prefix is not None:
            queues.prefix.computed(seq)
        if seq.prefilled < seq.num_tokens:  # a chunk that was not the last
            queues.waiting.appendleft(seq)
            continue
        assert len(new) == 1, f"{len(new)} tokens from the last chunk of a prompt"
        seq.extend(new)
        queues.join_running(seq)
        if seq.is_finished:
            queues.live.pop(seq.request.req_id, None)
            ended.append(Ending(seq.seq_id, seq.finish_reason, seq.output_len))
    return ended


def _commit_even(queues: Queues, step: InFlightStep, tokens: Tokens | None) -> list[Ending]:
    """Book a token for each who decodes: the clock has done it, but for those that end."""
    gone: list[Sequence] = []
    if tokens is not None and not queues.stop_ids.isdisjoint(chain.from_iterable(tokens)):
        for seq, new in zip(step.seqs, tokens, strict=True):
            if seq.clock is not None and new[0] in seq.stop_ids:
                seq.become(State.STOPPED)
                gone.append(seq)
    for seq in queues.clock.take_ended():
        if not seq.is_finished:  # the token that is the last anyway may also be a stop
            seq.become(State.LENGTH_CAPPED)
            gone.append(seq)
    if len(gone) > 1:
        gone.sort(key=step.seqs.index)
    return [queues.end_running(seq) for seq in gone]


def _commit_each(
    queues: Queues, step: InFlightStep, tokens: Tokens, cut: dict[int, int]
) -> list[Ending]:
    """Book a decode step sequence by sequence; adds to `cut` what is not fully visible."""
    ended: list[Ending] = []
    rows = queues.clock.rows
    for index, (seq, new) in enumerate(zip(step.seqs, tokens, strict=True)):
        if seq.clock is None:
            continue
        assert 1 <= len(new) <= rows, f"{len(new)} tokens from {rows} rows"
        seq.base -= 1  # what the clock has counted is part of these
        emitted = seq.extend(new)
        if seq.is_finished:
            ended.append(queues.end_running(seq))
            if emitted < len(new):
                cut[index] = emitted
    return ended
