"""The scheduler of one rank: requests in, step plans out, results in, tokens out.

It has no clock, no randomness, no I/O and no device. `plan_*` choose and book a step, `commit`
books what it produced; several decode steps may be in flight between the two (asynchronous
scheduling, ZOS: docs/rules.md, R24). Only `loop.py` calls these methods in a running engine.

Read next: `prefill.py` and `decode.py` (who is chosen), `queues.py` (memory), `loop.py`.
"""

from collections import deque

from mdi_shared.chunking import ChunkPolicy, TokenBudget
from mdi_shared.commit import InFlightStep, commit_step, dropped_rows
from mdi_shared.config import WATERMARK, SchedulerConfig
from mdi_shared.decisions import Decisions
from mdi_shared.decode import DecodeSelection, DecodeStep
from mdi_shared.errors import ConfigError, DeadlockError
from mdi_shared.plan import (
    DECODE,
    IDLE_DECODE,
    IDLE_MIXED,
    IDLE_PREFILL,
    MIXED,
    PREFILL,
    Advance,
    Batch,
    Ending,
    StepOutcome,
    StepPlan,
    StepResult,
)
from mdi_shared.policies.base import Policy
from mdi_shared.policies.phases import require_allowed
from mdi_shared.prefill import PrefillBatch, PrefillSelection
from mdi_shared.prefix.cache import PrefixCache
from mdi_shared.queues import Queues
from mdi_shared.repeat import Horizon, foretell, take_blocks
from mdi_shared.request import Request, Sequence, State
from mdi_shared.vote import ANY, NONE, Ballot, rule_at, steps_to_votes


class Scheduler:
    """Plans the steps of one rank.

    `policy` decides how many prompt tokens a chunk gets; left out, the token budget decides.
    `scheduling` decides who is next, who may take memory and who gives way; left out, the engine's
    own rules (docs/rules.md, R6, R8 and R17). Raises `ConfigError` for one that `config` does
    not allow. A prefix hit leaves at least `hit_margin` tokens to compute (bounded replay).
    """

    def __init__(
        self,
        config: SchedulerConfig,
        policy: ChunkPolicy | None = None,
        scheduling: Policy | None = None,
        *,
        hit_margin: int = 1,
    ) -> None:
        require_allowed(scheduling, config)
        self.config = config
        prefix = PrefixCache(config, max(hit_margin, 1)) if config.enable_prefix_cache else None
        self.queues = Queues(config, prefix)
        self.policy: ChunkPolicy = policy if policy is not None else TokenBudget()
        self.decode_step = 0  # decode steps since the last prefill step, idle ones included
        self.step = 0  # number of the newest step planned; the first is 1
        self.keep = int(config.enable_zos)  # decode steps in flight from one turn to the next
        self.num_preempted = 0
        self.decisions = None if scheduling is None else Decisions(scheduling, self.queues)
        self._evicts = self.decisions is not None and self.decisions.evicts
        self._prefill = PrefillSelection(self.queues, self.policy, self.decisions)
        self._decode = DecodeSelection(self.queues, self.decisions)
        self._chosen: DecodeStep | None = None  # who decodes, before it is known with whom
        self._mixes = self.decisions is not None and self.decisions.mixes
        self._in_flight: deque[InFlightStep] = deque()  # oldest first
        self._to_release: list[Sequence] = []
        self._next_seq_id = 0
        self._idle_turns = 0  # in a row, with the same head in the same state
        self._idle_head = (-1, 0)

    # ---- requests ------------------------------------------------------------------------------

    def submit(self, request: Request) -> int:
        """Queue a request and return the id its steps will carry.

        Raises `ConfigError` when a live request has the same `req_id`.
        """
        if request.req_id in self.queues.live:
            raise ConfigError("req_id", request.req_id, "is in use by an unfinished request")
        seq = Sequence(
            self._next_seq_id,
            request,
            eos_token_id=self.config.eos_token_id,
            max_model_len=self.config.max_model_len,
        )
        self._next_seq_id += 1
        self.queues.live[request.req_id] = seq
        self.queues.waiting.append(seq)
        return seq.seq_id

    def abort(self, req_id: str) -> Ending | None:
        """End a request; its memory returns with the next decode step and a token in flight drops.

        Returns its ending, or None when there is no such live request. (Upstream gives no final
        output to an aborted running request; a caller waiting for it would wait for ever.)
        """
        seq = self.queues.live.pop(req_id, None)
        if seq is None:
            return None
        is_waiting = seq.state is State.WAITING
        seq.become(State.ABORTED)
        if not is_waiting:
            return self.queues.end_running(seq)
        self.queues.num_dead_waiting += 1
        return Ending(seq.seq_id, seq.finish_reason, seq.output_len)

    def has_unfinished(self) -> bool:
        """Say whether a further step is due, if only to return memory."""
        return bool(self.queues.waiting or self.queues.running)

    @property
    def num_submitted(self) -> int:
        """Requests ever queued."""
        return self._next_seq_id

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    # ---- prefill or decode (R6) ---------------------------------------------------------------

    def ballot(self) -> Ballot:
        """Return the voting rule of this turn and what this rank wants; changes nothing."""
        config, decisions = self.config, self.decisions
        if decisions is not None and decisions.has_phase:
            return Ballot(ANY, self.want_prefill() and decisions.lets_prompts_go())
        rule = rule_at(
            self.decode_step, config.prefill_attempt_interval, config.prefill_any_attempt_interval
        )
        return Ballot(rule, rule != NONE and self.want_prefill())

    def want_prefill(self) -> bool:
        """Say whether this rank has a prompt to run and memory below the watermark.

        A policy that evicts is asked above it, too: it may bring the pool below.
        """
        queues = self.queues
        if not queues.waiting:
            return False
        return queues.below_watermark or self._evicts

    def try_prefill(self, ballot: Ballot) -> StepPlan | None:
        """Plan a step with prompts, or return None when nothing at all can be admitted."""
        if not self._mixes:
            batch = self._prefill.select()
            return None if batch is None else self._plan_prefill(batch, ballot)
        chosen = self._chosen = self._decode.select()  # who decodes comes first
        if chosen.preempted:
            return None  # memory is short
        shift = self.queues.clock.planned
        lengths = [shift - neg_base for neg_base, _, _, _ in chosen.batch.members]
        batch = self._prefill.select(tuple([(1, k, k) for k in lengths]))
        if batch is not None and batch.picked:
            return self._plan_mixed(batch, ballot)
        chosen.ignored += batch.ignored if batch is not None else ()
        return None

    def plan_idle_prefill(self, ballot: Ballot) -> StepPlan:
        """Plan a step without prompts of its own, for a rank whose group has some."""
        nothing = PrefillBatch(k_room=0)
        return (self._plan_mixed if self._mixes else self._plan_prefill)(nothing, ballot)

    def plan_decode(self, ballot: Ballot) -> StepPlan:
        """Plan a decode step, maybe an empty one; raises `DeadlockError` if none can ever help."""
        chosen = self._choose()
        plan = self._decode_plan(chosen, ballot)
        self._check_progress(plan)
        plan = self._put_in_flight(plan, chosen.seqs)
        self.decode_step += 1
        return plan

    def _choose(self) -> DecodeStep:
        """Choose who decodes, once in a turn."""
        chosen, self._chosen = self._chosen or self._decode.select(), None
        return chosen

    def _decode_plan(self, chosen: DecodeStep, ballot: Ballot) -> StepPlan:
        queues, batch, clock = self.queues, chosen.batch, self.queues.clock
        self.num_preempted += len(chosen.preempted)
        self._to_release += chosen.finished
        return StepPlan(
            step=self._next_step(),
            kind=DECODE if batch.members else IDLE_DECODE,
            is_prefill=False,
            batch=batch,
            shift=clock.done - 1 + (clock.planned - clock.done + 1) * clock.rows,
            rows_each=clock.rows,
            block_size=self.config.block_size,
            taken=tuple(chosen.taken),
            joined=chosen.joined,
            left=chosen.left,
            finished=tuple([seq.seq_id for seq in chosen.finished]),
            ignored=tuple(chosen.ignored),
            preempted=tuple([seq.seq_id for seq in chosen.preempted]),
            decode_step=self.decode_step,
            vote=ballot.rule,
            want=ballot.want,
            free_blocks=queues.blocks.num_free,
            free_slots=queues.slots.num_free,
            num_batched_tokens=clock.rows * len(batch.members),
        )

    def _plan_mixed(self, batch: PrefillBatch, ballot: Ballot) -> StepPlan:
        """Plan a decode step that carries prompts."""
        chosen = self._choose()
        plan = self._decode_plan(chosen, ballot)
        members = plan.batch.members + batch.members()
        plan = plan._replace(
            kind=MIXED if members else IDLE_MIXED,
            is_prefill=True,
            batch=Batch(members),
            prompts=tuple(batch.rows),
            taken=(*plan.taken, *batch.taken),
            is_partial=batch.is_partial,
            ignored=(*plan.ignored, *batch.ignored),
            free_blocks=self.queues.blocks.num_free,
            free_slots=self.queues.slots.num_free,
            target_ns=self.policy.target_ns,
        )
        plan = plan._replace(num_batched_tokens=plan.prompt_tokens)
        plan = self._put_in_flight(plan, [*chosen.seqs, *batch.picked])
        self._begin_anew()
        return plan

    def _begin_anew(self) -> None:
        """Count decode steps from here: prompts have gone."""
        self.decode_step = 0
        self._idle_turns = 0

    def _plan_prefill(self, batch: PrefillBatch, ballot: Ballot) -> StepPlan:
        picked = batch.picked
        self.num_preempted += len(batch.evicted)
        plan = StepPlan(
            step=self._next_step(),
            kind=PREFILL if picked else IDLE_PREFILL,
            is_prefill=True,
            batch=Batch(batch.members()),
            prompts=tuple(batch.rows),
            block_size=self.config.block_size,
            taken=tuple(batch.taken),
            is_partial=batch.is_partial,
            ignored=tuple(batch.ignored),
            preempted=tuple([seq.seq_id for seq in batch.evicted]),
            decode_step=self.decode_step,
            vote=ballot.rule,
            want=ballot.want,
            free_blocks=self.queues.blocks.num_free,
            free_slots=self.queues.slots.num_free,
            num_batched_tokens=batch.used_tokens,
            target_ns=self.policy.target_ns,
        )
        plan = self._put_in_flight(plan, picked)
        self._begin_anew()
        return plan

    def _next_step(self) -> int:
        self.step += 1
        return self.step

    def _put_in_flight(self, plan: StepPlan, seqs: list[Sequence]) -> StepPlan:
        """Note a plan as made and return it, with what prefix reuse has to be done before it."""
        prefix = self.queues.prefix
        if prefix is not None:
            plan = plan._replace(copies=prefix.take_copies(), hits=prefix.take_hits())
        self._in_flight.append(InFlightStep(plan, seqs, self.queues.num_departed))
        self.queues.clock.planned += plan.decodes
        return plan

    def _check_progress(self, plan: StepPlan) -> None:
        """Raise when this and every later step is an empty decode although requests wait."""
        queues = self.queues
        if (
            plan.batch.members
            or plan.finished
            or plan.ignored
            or plan.preempted
            or not queues.waiting
        ):
            self._idle_turns = 0
            return
        if queues.running:
            return
        # Without chunking each checkpoint costs the head one attempt: that is progress, too.
        head = (queues.waiting[0].seq_id, len(queues.waiting[0].checkpoints))
        self._idle_turns = self._idle_turns + 1 if head == self._idle_head else 1
        self._idle_head = head
        if self.config.strict_upstream and queues.blocks.usage > WATERMARK:
            raise self._deadlock(
                f"nothing runs and {queues.blocks.usage:.0%} of the KV pool is held, above the "
                f"{WATERMARK:.0%} up to which a prefill is wanted"
            )
        # By the second ANY point every rank has tried to prefill with nothing in its way.
        if self._idle_turns > 2 * self.config.prefill_any_attempt_interval:
            raise self._deadlock("nothing runs and the first waiting request cannot be admitted")

    def _deadlock(self, reason: str) -> DeadlockError:
        holders = [(s.request.req_id, len(s.block_table)) for s in self.queues.waiting]
        return DeadlockError(reason, [h for h in holders if h[1]], self.queues.leaked)

    # ---- results (R3) -------------------------------------------------------------------------

    def commit(self, result: StepResult) -> StepOutcome:
        """Book the result of the oldest step in flight and return what became visible.

        Rows of sequences that finished or were preempted meanwhile are dropped.
        """
        return commit_step(self.queues, self._in_flight.popleft(), result)

    def unfinished(self) -> tuple[tuple[int, int], ...]:
        """Return (sequence id, output tokens so far) of every live request."""
        return tuple((seq.seq_id, seq.output_len) for seq in self.queues.live.values())

    def release(self) -> None:
        """Return the memory of sequences the newest plan listed as finished (R21)."""
        for seq in self._to_release:
            self.queues.release(seq)
        self._to_release.clear()

    # ---- many equal decode steps as one (see repeat.py) ----------------------------------------

    def horizon(self, plan: StepPlan) -> Horizon:
        """Say how many steps, `plan` included, are certain to be the same batch.

        Asked right after `plan` was made.
        """
        queues, config = self.queues, self.config
        members, has_waiting = len(plan.batch.members), bool(queues.waiting)
        if plan.is_prefill or not queues.keeps_order:
            return Horizon(1, 1, 1, has_waiting, is_idle=False)
        to_vote, to_any = steps_to_votes(
            plan.decode_step, config.prefill_attempt_interval, config.prefill_any_attempt_interval
        )
        if self.decisions is not None and self.decisions.has_phase:
            to_vote = to_any = 1  # a policy is asked at each turn in which somebody waits
        steps = foretell(queues, members, keep=self.keep)
        return Horizon(steps, to_vote, to_any, has_waiting, not (members or has_waiting))

    def advance(self, count: int) -> Advance:
        """Book `count` more steps like the newest, and process the older ones they leave behind.

        The same as `count` times commit (of one token each, none of them a stop), release,
        ballot and plan_decode, where `horizon` promised more than `count` steps.
        """
        self.release()
        queues, clock, in_flight = self.queues, self.queues.clock, self._in_flight
        oldest, newest = in_flight[0], in_flight[-1]
        processed = len(in_flight) - self.keep + count - 1
        dropped: list[int] = []
        if processed and oldest.num_departed != queues.num_departed:
            members = oldest.plan.batch.members
            dropped = [members[i].seq_id for i in dropped_rows(queues, oldest)]
        wanted = bool(queues.waiting) and self.want_prefill()
        free_blocks = take_blocks(queues, count, newest.plan.free_blocks)
        clock.planned += count
        clock.done += processed
        self.step += count
        self.decode_step += count
        in_flight.clear()
        if self.keep:
            before = InFlightStep(newest.plan, newest.seqs, queues.num_departed)
            before.number = self.step - 1
            in_flight.append(before)
        newest.number = self.step
        in_flight.append(newest)
        num_wanting = self._wanting_steps(count, free_blocks) if wanted else 0
        return Advance(
            count, processed, tuple(dropped), free_blocks, queues.slots.num_free,
            len(queues.waiting), len(queues.running), num_wanting,
        )  # fmt: skip

    def _wanting_steps(self, count: int, free_blocks: tuple[tuple[int, int], ...]) -> int:
        """In how many of `count` repetitions a prefill is wanted: what they take may end it."""
        queues = self.queues
        if self._evicts or queues.waiting[0].block_table:
            return count
        above = [step for step, free in free_blocks if queues.blocks.usage_at(free) > WATERMARK]
        return min(above, default=count)

    def check_integrity(self) -> None:
        """Assert the invariants that hold between engine steps."""
        self.queues.check_integrity()
        rows = 1 + self.config.num_draft_tokens
        for seq in self.queues.running:
            name, touched = seq.request.req_id, seq.cached + seq.inflight_total
            if not seq.is_finished:
                assert seq.inflight_total in (0, rows), f"{name}: {seq.inflight_total} in flight"
                assert self.queues.capacity(seq) >= touched, f"{name}: rows have no block"
            assert seq.output_len <= seq.request.max_tokens, f"{name}: past max_tokens"
            assert touched <= self.config.runtime_max_model_len, f"{name}: past the last position"
