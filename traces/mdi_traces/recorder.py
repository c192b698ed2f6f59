"""Collects what one rank does into flat integer arrays; `tables.py` turns them into Parquet tables.

Both drivers use it, so a simulated and a real run leave the same columns. Recording must cost
little next to a step: no object is kept per step, only integers in arrays. Equal decode steps in a
row, a stretch, are one entry with what they share, and a sequence that runs is one entry from the
step it joins to the step it has left; they are spread out when tables are asked for.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from mdi_shared.cost.work import StepWork
from mdi_shared.loop import Report
from mdi_shared.plan import STEP_KINDS, Advance, Ending, Member, StepOutcome, StepPlan
from mdi_shared.vote import ALL, ANY, NONE

VOTES = (NONE, ALL, ANY)
NOT_YET = -1
_VOTE_CODES = {rule: code for code, rule in enumerate(VOTES)}
_KIND_CODES = {kind: code for code, kind in enumerate(STEP_KINDS)}


class Launches(NamedTuple):
    """When the first step of a stretch was launched, ns, and what the others' times follow from.

    The loop looked for arrivals, a plan was made, the step was handed over; `wait_ns` of the time
    between went into waiting for other ranks; `pred_ns` is the predicted device time, NOT_YET =
    none. A later look comes when the oldest step in flight was processed (`has_oldest`: already in
    the first turn), the plan `schedule_ns` after the ranks have met then, and the launch
    `launch_ns` after it.
    """

    t_sched: int
    t_planned: int
    t_launch: int
    wait_ns: int
    pred_ns: int
    schedule_ns: int = 0
    launch_ns: int = 0
    has_oldest: bool = True


# Entries of several integers each, by the array that holds them; names in the order of storage.
FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "stretches": (
        "row", "kind", "step", "decode_step", "vote", "want", "n_items", "rows_each",
        "n_tokens_padded", "n_chunked", "n_finished", "n_ignored", "n_preempted", "target_ns",
        "shift", "free_blocks", "free_slots", "n_restored", "n_saved",
        *Launches._fields, "n_wanting",
    ),
    "prompts": ("row", "seq_id", "q", "k"),
    "works": ("row", *StepWork._fields),  # of steps that do not have one row per sequence
    # A running sequence takes part in decode steps from `first` up to `stop`, counted from 0.
    "stays": ("first", "stop", *Member._fields),
    "pools": ("row", "free_blocks", "free_slots"),  # from this row of a stretch on
    "queues": ("row", "n_waiting", "n_running"),  # likewise
    "dropped": ("row", "seq_id"),
    "accepted": ("row", "seq_id", "drafts"),
    "hosts": ("ingress_ns", "t_enqueued"),  # at launch; of a real run only
})  # fmt: skip
POOL_FIELDS = ("free_blocks", "free_slots")
# What a step has of its own, an array each.
LANDING_FIELDS = ("t_dev_start", "t_dev_end", "t_done", "process_ns")
MEETING_FIELDS = ("met_ns", "pred_ns")  # of all but the first of a stretch; of groups only
MEASURED_FIELDS = ("sample_ns", "graph_size", "moe_imbalance")  # by a real device
REQUEST_FIELDS = (
    "rank", "t_first_sched", "t_first_token", "t_finish", "output_len",
    "n_chunks", "n_preempt", "n_recomputed_tokens", "hit_tokens", "known_tokens",
)  # fmt: skip


@dataclass(slots=True, eq=False)
class RequestLog:
    """What became of one request; times are ns since the run's start, NOT_YET where none."""

    row: int
    rank: int
    t_first_sched: int = NOT_YET
    t_first_token: int = NOT_YET
    t_finish: int = NOT_YET
    output_len: int = 0
    n_chunks: int = 0
    n_preempt: int = 0
    n_recomputed_tokens: int = 0
    hit_tokens: int = 0
    known_tokens: int = 0
    finish_reason: str | None = None


class RankRecorder:
    """Records the steps and requests of one rank, in the order the driver meets them.

    Steps are launched and land in the same order. Calls: `submitted` per request, `launched` per
    stretch, `landed` once results are processed, `reported` per report of the loop.
    """

    def __init__(self, rank: int, *, drafting: bool = False) -> None:
        self.rank = rank
        self.drafting = drafting  # decode steps may yield more than one token
        self.requests: list[RequestLog] = []  # by sequence id
        self.num_launched = 0
        self.num_processed = 0
        self.final_pool: tuple[int, int] | None = None
        self.entries = {name: array("q") for name in FIELDS}
        self.columns = {name: array("q") for name in (*LANDING_FIELDS, *MEETING_FIELDS)}
        self._landing = [self.columns[name] for name in LANDING_FIELDS]
        self.measured = array("d")  # by `MEASURED_FIELDS`; empty in a simulated run
        self._num_decodes = 0
        self._stay_of: dict[int, int] = {}  # where the entry of a running sequence begins

    def arrays(self) -> "dict[str, array[int] | array[float]]":
        """Everything recorded but the requests, by name; no name stands twice."""
        return {**self.entries, **self.columns, "measured": self.measured}

    def submitted(self, row: int) -> int:
        """Note that trace row `row` goes to the scheduler; return its sequence id there."""
        self.requests.append(RequestLog(row, self.rank))
        return len(self.requests) - 1

    def launched(
        self, plan: StepPlan, work: StepWork | None, times: Launches, count: int = 1,
        meetings: Sequence[Sequence[int]] = (),
    ) -> None:  # fmt: skip
        """Note a planned step and its repetitions, `count` steps in all.

        `work` may be None for a step of one row per sequence. `meetings` are `MEETING_FIELDS`.
        """
        entries, row, size = self.entries, self.num_launched, len(plan.batch.members)
        restored = sum(copy.to_slot for copy in plan.copies)
        entries["stretches"].extend((
            row, _KIND_CODES[plan.kind], plan.step, plan.decode_step, _VOTE_CODES[plan.vote],
            plan.want, size, plan.rows_each, plan.num_batched_tokens, plan.is_partial,
            len(plan.finished), len(plan.ignored), len(plan.preempted), plan.target_ns, plan.shift,
            plan.free_blocks, plan.free_slots, restored, len(plan.copies) - restored, *times, 0,
        ))  # fmt: skip
        self.num_launched += count
        for seq_id in plan.preempted:
            self.requests[seq_id].n_preempt += 1
        self._note_hits(plan)
        self._note_prompts(plan, row, times.t_sched)
        if plan.decodes:
            if plan.joined or plan.left:
                self._note_stays(plan)
            self._num_decodes += count
        if size and (plan.rows_each > 1 or plan.is_prefill):
            assert work is not None, "these rows are counted when they are launched"
            entries["works"].append(row)
            entries["works"].extend(work)
        for name, values in zip(MEETING_FIELDS, meetings, strict=False):
            self.columns[name].extend(values)

    def hosted(self, ingress_ns: int, enqueued_ns: int) -> None:
        """Note a real launch: the newest arrival's wait (NOT_YET = none), and when it was done."""
        self.entries["hosts"].extend((ingress_ns, enqueued_ns))

    def measure(self, sample_ns: int, graph_size: int, moe_imbalance: float) -> None:
        """Note what a real device measured in the oldest step in flight; see `MEASURED_FIELDS`."""
        self.measured.extend((sample_ns, graph_size, moe_imbalance))

    def landed(self, *times: Sequence[int]) -> None:
        """Note when the oldest steps in flight ran and were processed; see `LANDING_FIELDS`."""
        for column, values in zip(self._landing, times, strict=True):
            column.extend(values)

    def landed_one(self, *times: int) -> None:
        """Note it of the oldest step alone."""
        for column, value in zip(self._landing, times, strict=True):
            column.append(value)

    def reported(
        self, report: Report, now_ns: int, due: Sequence[tuple[int, int]] = ()
    ) -> list[int]:
        """Book what the loop reports; return the trace rows of requests that ended.

        `due` counts arrivals that a loop polling every step would have queued by then: from which
        of the steps processed since the last poll on, and how many.
        """
        if report.advance is not None:
            self._note_advance(report.advance, due)
        ended = report.ended
        if report.outcome is not None:
            self._note_outcome(report.outcome, now_ns, due[-1][1] if due else 0)
            ended += report.outcome.ended
        return [self._note_end(ending, now_ns) for ending in ended]

    def closed(self, unfinished: tuple[tuple[int, int], ...], pool: tuple[int, int] | None) -> None:
        """Note the end of the run: (sequence id, output tokens) of live requests, free ids left.

        `pool` are `POOL_FIELDS`, None while the run goes on.
        """
        for seq_id, output_len in unfinished:
            self.requests[seq_id].output_len = output_len
        self.final_pool = pool

    def _note_stays(self, plan: StepPlan) -> None:
        stays = self.entries["stays"]
        for seq_id in plan.left:
            stays[self._stay_of.pop(seq_id) + 1] = self._num_decodes
        for member in plan.joined:
            self._stay_of[member.seq_id] = len(stays)
            stays.extend((self._num_decodes, NOT_YET, *member))

    def _note_advance(self, advance: Advance, due: Sequence[tuple[int, int]]) -> None:
        entries, row = self.entries, self.num_processed
        for seq_id in advance.dropped:
            entries["dropped"].extend((row, seq_id))
        if advance.processed:
            entries["queues"].extend((row, advance.n_waiting, advance.n_running))
            self.num_processed += advance.processed
        for index, count in due:
            if index < advance.processed:
                entries["queues"].extend(
                    (row + index, advance.n_waiting + count, advance.n_running)
                )
        first = self.num_launched - advance.repetitions - 1
        for step, free_blocks in advance.free_blocks:
            entries["pools"].extend((first + step, free_blocks, advance.free_slots))
        if advance.num_wanting:
            entries["stretches"][-1] = advance.num_wanting

    def _note_outcome(self, outcome: StepOutcome, now_ns: int, due: int) -> None:
        entries, row = self.entries, self.num_processed
        for index in outcome.dropped:
            entries["dropped"].extend((row, outcome.batch.members[index].seq_id))
        if outcome.is_prefill:
            self._note_first_tokens(outcome, now_ns)
        elif self.drafting:
            for seq_id, tokens in zip(outcome.seq_ids, outcome.tokens, strict=True):
                if len(tokens) > 1:
                    entries["accepted"].extend((row, seq_id, len(tokens) - 1))
        entries["queues"].extend((row, outcome.n_waiting + due, outcome.n_running))
        self.num_processed += 1

    def _note_hits(self, plan: StepPlan) -> None:
        for seq_id, tokens, known in plan.hits:
            log = self.requests[seq_id]
            if log.t_first_sched == NOT_YET:  # a preempted one finds what it left itself
                log.hit_tokens, log.known_tokens = tokens, known

    def _note_prompts(self, plan: StepPlan, row: int, now_ns: int) -> None:
        if not plan.prompts:
            return
        members = plan.batch.members[plan.num_decoding :]
        for member, (q, k, _) in zip(members, plan.prompts, strict=True):
            self.entries["prompts"].extend((row, member.seq_id, q, k))
            log = self.requests[member.seq_id]
            if log.t_first_sched == NOT_YET:
                log.t_first_sched = now_ns
            log.n_chunks += 1
            if log.n_preempt:
                log.n_recomputed_tokens += q

    def _note_first_tokens(self, outcome: StepOutcome, now_ns: int) -> None:
        for seq_id, tokens in zip(outcome.seq_ids, outcome.tokens, strict=True):
            log = self.requests[seq_id]
            if tokens and log.t_first_token == NOT_YET:
                log.t_first_token = now_ns

    def _note_end(self, ending: Ending, now_ns: int) -> int:
        log = self.requests[ending.seq_id]
        log.finish_reason = ending.reason
        log.output_len = ending.output_len
        log.t_finish = now_ns
        return log.row
