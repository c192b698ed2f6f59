"""Collects what one rank does into flat integer arrays; `tables.py` turns them into Parquet tables.

Both drivers use it, so a simulated and a real run leave the same columns. Recording must cost
little next to a step: no object is kept per step, only integers in arrays. A run of repeated
decode steps is stored once, with a count, and spread out when the tables are made.
"""

from array import array

from mdi_shared.loop import Report
from mdi_shared.plan import STEP_KINDS, Emission, StepPlan
from mdi_shared.vote import ALL, ANY, NONE
from mdi_shared.work import StepWork

VOTES = (NONE, ALL, ANY)
NOT_YET = -1

# One group of integers per planned batch, per step, and so on; names in the order of storage.
BATCH_FIELDS = (
    "row", "kind", "step", "decode_step", "vote", "want", "n_items", "n_tokens_padded",
    "n_chunked", "n_finished", "n_ignored", "n_preempted", "target_ns",
)  # fmt: skip
ITEM_FIELDS = ("seq_id", "q", "k", "is_last_chunk")
LAUNCH_FIELDS = ("t_sched", "t_planned", "t_launch", "wait_ns", "pred_ns")
DEVICE_FIELDS = ("t_dev_start", "t_dev_end", "t_done", "process_ns")
OUTCOME_FIELDS = ("n_waiting", "n_running", "n_dropped", "n_accepted")
POOL_FIELDS = ("free_blocks", "free_slots")
REQUEST_FIELDS = (
    "rank", "t_first_sched", "t_first_token", "t_last_token", "t_finish", "output_len",
    "n_chunks", "n_preempt", "n_recomputed_tokens",
)  # fmt: skip


class RequestLog:
    """What became of one request; times are ns since the run's start, NOT_YET where none."""

    __slots__ = (*REQUEST_FIELDS, "finish_reason", "row")

    def __init__(self, row: int, rank: int) -> None:
        self.row = row
        self.rank = rank
        self.t_first_sched = NOT_YET
        self.t_first_token = NOT_YET
        self.t_last_token = NOT_YET
        self.t_finish = NOT_YET
        self.output_len = 0
        self.n_chunks = 0
        self.n_preempt = 0
        self.n_recomputed_tokens = 0
        self.finish_reason: str | None = None


class RankRecorder:
    """Records the steps and requests of one rank, in the order the driver meets them.

    Steps are launched and land in the same order. Calls: `submitted` per request, `launched` per
    step (or `repeated` for each further step of the same batch), `landed` per step once its
    results are processed, `reported` per report of the loop.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.requests: list[RequestLog] = []  # by sequence id
        self.batches = array("q")
        self.items = array("q")
        self.launches = array("q")
        self.works = array("q")
        self.devices = array("q")
        self.outcomes = array("q")
        self.pools = array("q")
        self.dropped = array("q")  # pairs (row, item index)
        self.accepted = array("q")  # triples (row, item index, accepted drafts)
        self._num_rows = 0
        self._num_processed = 0
        self._last_items: tuple[int, ...] = ()  # sequence ids of the newest batch
        self._in_flight: list[tuple[int, ...]] = []

    def submitted(self, row: int) -> int:
        """Note that trace row `row` goes to the scheduler; return its sequence id there."""
        self.requests.append(RequestLog(row, self.rank))
        return len(self.requests) - 1

    def launched(self, plan: StepPlan, work: StepWork, times: tuple[int, ...]) -> None:
        """Note a planned step. `times` are `LAUNCH_FIELDS`, in ns."""
        items = plan.items
        ids = tuple([item.seq_id for item in items])
        chunked = 0
        if plan.is_prefill:
            chunked = sum(not item.is_last_chunk for item in items)
            self._note_prefill(plan, times[0])
        for seq_id in plan.preempted:
            self.requests[seq_id].n_preempt += 1
        self.batches.extend((
            self._num_rows, STEP_KINDS.index(plan.kind), plan.step, plan.decode_step,
            VOTES.index(plan.vote), plan.want, len(items), plan.num_batched_tokens,
            chunked, len(plan.finished), len(plan.ignored), len(plan.preempted), plan.target_ns,
        ))  # fmt: skip
        self.items.extend(ids)
        self.items.extend([item.q for item in items])
        self.items.extend([item.k for item in items])
        self.items.extend([item.is_last_chunk for item in items])
        self.pools.extend((plan.free_blocks, plan.free_slots))
        self._last_items = ids
        self.repeated(work, times)

    def repeated(self, work: StepWork, times: tuple[int, ...]) -> None:
        """Note one more step of the newest batch, every context one token longer."""
        self.works.extend(work)
        self.launches.extend(times)
        self._in_flight.append(self._last_items)
        self._num_rows += 1

    def landed(self, start_ns: int, end_ns: int, done_ns: int, process_ns: int) -> None:
        """Note when the oldest step in flight ran and when its results were processed."""
        self.devices.extend((start_ns, end_ns, done_ns, process_ns))

    def reported(self, report: Report, now_ns: int, due_waiting: list[int]) -> list[int]:
        """Book what the loop reports; return the trace rows of requests that ended.

        `due_waiting` counts, per repeated step since the last poll, the arrivals that a loop
        polling every step would have queued by then.
        """
        if report.advance is not None:
            advance = report.advance
            for index in advance.dropped:
                self.dropped.extend((self._num_processed, index))
            for i, free in enumerate(advance.free_blocks):
                dropped = len(advance.dropped) if i == 0 else 0
                waiting = advance.n_waiting + due_waiting[i - 1] if i else advance.n_waiting
                self.outcomes.extend((waiting, advance.n_running, dropped, 0))
                self.pools.extend((free, advance.free_slots))
            self._num_processed += advance.count
            del self._in_flight[: advance.count]
        ended = self._note_emissions(report.emissions, now_ns)
        outcome = report.outcome
        if outcome is not None:
            ids = self._in_flight.pop(0)
            for index in outcome.dropped:
                self.dropped.extend((self._num_processed, index))
            accepted = self._note_accepted(ids, outcome.emissions)
            waiting = outcome.n_waiting + (due_waiting[-1] if due_waiting else 0)
            self.outcomes.extend((waiting, outcome.n_running, len(outcome.dropped), accepted))
            self._num_processed += 1
        return ended

    def output_len(self, seq_id: int) -> int:
        """Output tokens a sequence had at its newest report."""
        return self.requests[seq_id].output_len

    def _note_prefill(self, plan: StepPlan, now_ns: int) -> None:
        for item in plan.items:
            log = self.requests[item.seq_id]
            if log.t_first_sched == NOT_YET:
                log.t_first_sched = now_ns
            log.n_chunks += 1
            if log.n_preempt:
                log.n_recomputed_tokens += item.q

    def _note_emissions(self, emissions: tuple[Emission, ...], now_ns: int) -> list[int]:
        ended = []
        for seq_id, tokens, output_len, finish_reason in emissions:
            log = self.requests[seq_id]
            log.output_len = output_len
            if tokens:
                log.t_last_token = now_ns
                if log.t_first_token == NOT_YET:
                    log.t_first_token = now_ns
            if finish_reason is not None:
                log.finish_reason = finish_reason
                log.t_finish = now_ns
                ended.append(log.row)
        return ended

    def _note_accepted(self, ids: tuple[int, ...], emissions: tuple[Emission, ...]) -> int:
        """Store how many drafts each row got accepted; most rows carry none."""
        total = 0
        if any(len(emission.tokens) > 1 for emission in emissions):
            index_of = {seq_id: index for index, seq_id in enumerate(ids)}
            for emission in emissions:
                extra = len(emission.tokens) - 1
                if extra > 0:
                    self.accepted.extend((self._num_processed, index_of[emission.seq_id], extra))
                    total += extra
        return total
