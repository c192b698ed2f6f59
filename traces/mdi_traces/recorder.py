"""Collects what one rank does into flat integer arrays; `tables.py` turns them into Parquet tables.

Both drivers use it, so a simulated and a real run leave the same columns. Recording must cost
little next to a step: no object is kept per step, only integers in arrays. A run of repeated
decode steps is stored once, with a count, and spread out when the tables are made.
"""

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from mdi_shared.cost.work import StepWork
from mdi_shared.loop import Report
from mdi_shared.plan import STEP_KINDS, Advance, Ending, StepOutcome, StepPlan
from mdi_shared.vote import ALL, ANY, NONE

VOTES = (NONE, ALL, ANY)
NOT_YET = -1

# One group of integers per planned batch, per step, and so on; names in the order of storage.
BATCH_FIELDS = (
    "row", "kind", "step", "decode_step", "vote", "want", "n_items", "n_tokens_padded",
    "n_chunked", "n_finished", "n_ignored", "n_preempted", "target_ns",
)  # fmt: skip
ITEM_FIELDS = ("seq_id", "q", "k")
POOL_FIELDS = ("free_blocks", "free_slots")
# What a step has of its own, by the array that holds it. No name stands in two of them.
STEP_FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType({
    "launches": ("t_sched", "t_planned", "t_launch", "wait_ns", "pred_ns"),
    "works": StepWork._fields,
    "devices": ("t_dev_start", "t_dev_end", "t_done", "process_ns"),
    "hosts": ("ingress_ns", "t_enqueued"),  # at launch; of a real run only
    "outcomes": ("n_waiting", "n_running", "n_dropped", "n_accepted"),
    "pools": POOL_FIELDS,
})  # fmt: skip
MEASURED_FIELDS = ("sample_ns", "graph_size", "moe_imbalance")  # by a real device
REQUEST_FIELDS = (
    "rank", "t_first_sched", "t_first_token", "t_finish", "output_len",
    "n_chunks", "n_preempt", "n_recomputed_tokens",
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
    finish_reason: str | None = None


class RankRecorder:
    """Records the steps and requests of one rank, in the order the driver meets them.

    Steps are launched and land in the same order. Calls: `submitted` per request, `launched` per
    step (or `repeated` for each further step of the same batch), `landed` per step once its
    results are processed, `reported` per report of the loop.
    """

    def __init__(self, rank: int, *, drafting: bool = False) -> None:
        self.rank = rank
        self.drafting = drafting  # decode steps may yield more than one token
        self.requests: list[RequestLog] = []  # by sequence id
        self.batches = array("q")
        self.items = array("q")
        self.launches = array("q")
        self.works = array("q")
        self.devices = array("q")
        self.hosts = array("q")  # empty in a simulated run
        self.measured = array("d")  # likewise
        self.outcomes = array("q")
        self.pools = array("q")
        self.dropped = array("q")  # pairs (row, item index)
        self.accepted = array("q")  # triples (row, item index, accepted drafts)
        self.final_pool: tuple[int, int] | None = None

    @property
    def num_launched(self) -> int:
        return len(self.launches) // len(STEP_FIELDS["launches"])

    @property
    def num_processed(self) -> int:
        return len(self.outcomes) // len(STEP_FIELDS["outcomes"])

    def submitted(self, row: int) -> int:
        """Note that trace row `row` goes to the scheduler; return its sequence id there."""
        self.requests.append(RequestLog(row, self.rank))
        return len(self.requests) - 1

    def launched(self, plan: StepPlan, work: StepWork, times: tuple[int, ...]) -> None:
        """Note a planned step. `times` are those of `launches`, see `STEP_FIELDS`."""
        size = len(plan.seq_ids)
        if plan.is_prefill:
            self._note_prefill(plan, times[0])
        for seq_id in plan.preempted:
            self.requests[seq_id].n_preempt += 1
        self.batches.extend((
            self.num_launched, STEP_KINDS.index(plan.kind), plan.step, plan.decode_step,
            VOTES.index(plan.vote), plan.want, size, plan.num_batched_tokens, plan.is_partial,
            len(plan.finished), len(plan.ignored), len(plan.preempted), plan.target_ns,
        ))  # fmt: skip
        for of_items in (plan.seq_ids, plan.qs, plan.ks):
            self.items.extend(of_items)
        self.pools.extend((plan.free_blocks, plan.free_slots))
        self.repeated(work, times)

    def repeated(self, work: StepWork, times: tuple[int, ...]) -> None:
        """Note one more step of the newest batch, every context one token longer."""
        self.works.extend(work)
        self.launches.extend(times)

    def hosted(self, ingress_ns: int, enqueued_ns: int) -> None:
        """Note a real launch: the newest arrival's wait (NOT_YET = none), and when it was done."""
        self.hosts.extend((ingress_ns, enqueued_ns))

    def measure(self, sample_ns: int, graph_size: int, moe_imbalance: float) -> None:
        """Note what a real device measured in the oldest step in flight; see `MEASURED_FIELDS`."""
        self.measured.extend((sample_ns, graph_size, moe_imbalance))

    def landed(self, start_ns: int, end_ns: int, done_ns: int, process_ns: int) -> None:
        """Note when the oldest step in flight ran and when its results were processed."""
        self.devices.extend((start_ns, end_ns, done_ns, process_ns))

    def reported(self, report: Report, now_ns: int, due_waiting: list[int]) -> list[int]:
        """Book what the loop reports; return the trace rows of requests that ended.

        `due_waiting` counts, per repeated step since the last poll, the arrivals that a loop
        polling every step would have queued by then.
        """
        if report.advance is not None:
            self._note_advance(report.advance, due_waiting)
        ended = report.ended
        if report.outcome is not None:
            self._note_outcome(report.outcome, now_ns, due_waiting[-1] if due_waiting else 0)
            ended += report.outcome.ended
        return [self._note_end(ending, now_ns) for ending in ended]

    def closed(self, unfinished: tuple[tuple[int, int], ...], pool: tuple[int, int] | None) -> None:
        """Note the end of the run: (sequence id, output tokens) of live requests, free ids left.

        `pool` are `POOL_FIELDS`, None while the run goes on.
        """
        for seq_id, output_len in unfinished:
            self.requests[seq_id].output_len = output_len
        self.final_pool = pool

    def _note_advance(self, advance: Advance, due_waiting: list[int]) -> None:
        self._note_dropped(advance.dropped)
        for i, free in enumerate(advance.free_blocks):
            waiting = advance.n_waiting + (due_waiting[i - 1] if i else 0)
            dropped = 0 if i else len(advance.dropped)
            self.outcomes.extend((waiting, advance.n_running, dropped, 0))
            self.pools.extend((free, advance.free_slots))

    def _note_outcome(self, outcome: StepOutcome, now_ns: int, due: int) -> None:
        self._note_dropped(outcome.dropped)
        accepted = 0
        if outcome.is_prefill:
            self._note_first_tokens(outcome, now_ns)
        elif self.drafting:
            for index, tokens in enumerate(outcome.tokens):
                if len(tokens) > 1:
                    self.accepted.extend((self.num_processed, index, len(tokens) - 1))
                    accepted += len(tokens) - 1
        waiting, dropped = outcome.n_waiting + due, len(outcome.dropped)
        self.outcomes.extend((waiting, outcome.n_running, dropped, accepted))

    def _note_dropped(self, indices: tuple[int, ...]) -> None:
        for index in indices:
            self.dropped.extend((self.num_processed, index))

    def _note_prefill(self, plan: StepPlan, now_ns: int) -> None:
        for seq_id, q in zip(plan.seq_ids, plan.qs, strict=True):
            log = self.requests[seq_id]
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
