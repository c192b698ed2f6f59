"""Drives the serving loop of one or more ranks from a script keyed by step number.

A plain, clockless driver for unit tests: requests and aborts appear before a given step, every
launched step is logged with the state it left behind.
"""

from collections import Counter, deque
from dataclasses import dataclass, field

from mdi_shared.config import SchedulerConfig
from mdi_shared.loop import (
    AwaitArrival,
    AwaitStep,
    Launch,
    News,
    Poll,
    Report,
    Vote,
    serve,
)
from mdi_shared.plan import Ending, StepItem, StepPlan, StepResult
from mdi_shared.repeat import common_repeats
from mdi_shared.request import Request
from mdi_shared.scheduler import Scheduler
from mdi_shared.vote import decide

TOKEN = 7  # any id that is not the end-of-sequence token
STEP_NS = 10_000_000  # what a step takes on the clock that scheduling policies see


def toy(**options) -> SchedulerConfig:
    """Toy settings of the worked traces: blocks of 4 tokens, votes at every step."""
    defaults = {
        "block_size": 4,
        "num_blocks": 20,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 64,
        "prefill_attempt_interval": 1,
        "prefill_any_attempt_interval": 1,
        "enable_zos": True,
    }
    return SchedulerConfig(**(defaults | options))


@dataclass
class Turn:
    """One launched step and what the rank looked like once the turn was over."""

    plan: StepPlan
    names: dict[int, str]
    taken: int = 1  # steps of this batch taken at once
    reports: list[Report] = field(default_factory=list)
    free_after: int = -1
    state: dict[str, str] = field(default_factory=dict)
    tables: dict[str, list[int]] = field(default_factory=dict)
    dead: set[str] = field(default_factory=set)  # finished, and not yet out of the queues
    waiting: str = ""
    running: str = ""

    @property
    def row(self) -> str:
        """Kind and batch in the notation of the worked traces."""
        kind = "P" if self.plan.is_prefill else "D"
        items = [f"({self.names[i.seq_id]},{i.q},{i.k})" for i in self.plan.items]
        return " ".join([kind, *(items or ["-"])])

    @property
    def emitted(self) -> dict[str, int]:
        """Tokens that became visible in this turn, by request; rows without any are left out."""
        out: dict[str, int] = {}
        for report in self.reports:
            if report.outcome is not None:
                columns = zip(report.outcome.seq_ids, report.outcome.tokens, strict=True)
                for seq_id, tokens in columns:
                    if tokens:
                        name = self.names[seq_id]
                        out[name] = out.get(name, 0) + len(tokens)
        return out

    @property
    def reasons(self) -> dict[str, str]:
        return {self.names[e.seq_id]: e.reason for e in endings(self.reports)}


def endings(reports: list[Report]) -> list[Ending]:
    """All endings of these reports, in order."""
    out: list[Ending] = []
    for report in reports:
        out += report.ended
        out += report.outcome.ended if report.outcome is not None else ()
    return out


class ScriptedRank:
    """One rank: `script[step]` lists requests and abort names that come up before that step."""

    def __init__(
        self, config, script, *, num_ranks=1, accepted=None, stops=None, policy=None, repeat=1,
        scheduling=None,
    ):  # fmt: skip
        self.scheduler = Scheduler(config, policy, scheduling)
        self.script = dict(script)
        self.accepted = accepted or {}
        self.stops = stops or {}  # request name -> output length at which it says end of sequence
        self.output_len: dict[str, int] = {}
        self.repeat = repeat  # most steps taken per launch
        self.tables: dict[int, list[int]] = {}  # of blocks, by sequence id
        self.flights: deque[tuple[StepPlan, int]] = deque()
        self.names: dict[int, str] = {}
        self.arrived_ns: dict[str, int] = {}
        self.turns: list[Turn] = []
        self.reports: list[Report] = []
        self.early: list[Report] = []  # reports that belong to no step, like a flush's
        self.loop = serve(self.scheduler, num_ranks=num_ranks)
        self.in_group = num_ranks > 1
        self.pending: Vote | AwaitArrival | None = None
        self.done = False
        self.answer = None

    def advance(self, max_steps: int) -> None:
        """Run until the group must meet, the script is over, or `max_steps` were launched."""
        while not self.done:
            try:
                effect = self.loop.send(self.answer)
            except StopIteration:
                self.done = True
                return
            if isinstance(effect, Vote) or (isinstance(effect, AwaitArrival) and self.in_group):
                self.pending = effect
                return
            self.answer = self._answer(effect, max_steps)

    def _answer(self, effect, max_steps):
        if isinstance(effect, Poll):
            self._close_turn()
            if self.scheduler.step >= max_steps:
                self.done = True
                self.loop.close()
                return None
            return self._news()
        if isinstance(effect, Report):
            self._note(effect)
            return None
        if isinstance(effect, AwaitArrival):
            return self.wake()
        if isinstance(effect, AwaitStep):
            return self._result(*self.flights.popleft())
        assert isinstance(effect, Launch)
        return self._launch(effect)

    def wake(self) -> bool:
        """Bring what comes first in the script forward to now; False when nothing is left."""
        if not self.script:
            return False
        self.script[self.scheduler.step + 1] = self.script.pop(min(self.script))
        return True

    def _launch(self, effect: Launch) -> int:
        taken = min(self.repeat, self._certain(effect))
        for shift in range(taken):
            self.flights.append((effect.plan, shift))
        while taken > 1 and len(self.flights) > 1 + self.scheduler.config.enable_zos:
            self.flights.popleft()  # processed with the next one, whose tokens depend on it
            for seq_id in effect.plan.seq_ids:
                self.output_len[self.names[seq_id]] += 1
        if self.repeat == 1:
            self._keep_tables(effect.plan)
        self.turns.append(Turn(effect.plan, self.names, taken=taken))
        return taken

    def _keep_tables(self, plan: StepPlan) -> None:
        """Keep block tables as a driver does, by what plans say alone; they must be the core's."""
        live = self.scheduler.queues.live
        for item in plan.items:
            table = self.tables.setdefault(item.seq_id, [])
            table[item.num_blocks - len(item.new_blocks) :] = item.new_blocks
            name = self.names[item.seq_id]
            assert table == live[name].block_table, f"{name}: another table, step {plan.step}"

    def _certain(self, effect: Launch) -> int:
        """How many steps a driver that knows the script may take at once."""
        step = effect.plan.step
        coming = [key - step for key in self.script if key > step]
        repeats, if_quiet = common_repeats([effect.horizon])
        most = max(repeats, min([if_quiet, *coming])) if coming else if_quiet
        aborts = [
            key - step
            for key, entries in self.script.items()
            if key > step and any(isinstance(entry, str) for entry in entries)
        ]
        ends = [
            self.stops[name] - self.output_len.get(name, 0)
            for item in effect.plan.items
            if (name := self.names[item.seq_id]) in self.stops
        ]
        return max(1, min([most, *aborts, *ends]))

    def _news(self) -> News:
        due = sorted(key for key in self.script if key <= self.scheduler.step + 1)
        entries = [entry for key in due for entry in self.script.pop(key)]
        requests = tuple(e for e in entries if isinstance(e, Request))
        for request in requests:
            self.names[len(self.names)] = request.req_id
            self.arrived_ns[request.req_id] = request.arrived_ns
        aborts = tuple(e for e in entries if isinstance(e, str))
        return News(requests, aborts, self.scheduler.step * STEP_NS)

    def _note(self, report: Report) -> None:
        self.reports.append(report)
        if report.outcome is not None:
            columns = zip(report.outcome.seq_ids, report.outcome.tokens, strict=True)
            for seq_id, tokens in columns:
                name = self.names[seq_id]
                self.output_len[name] = self.output_len.get(name, 0) + len(tokens)
        for ending in endings([report]):
            assert ending.output_len == self.output_len.get(self.names[ending.seq_id], 0)

    def _result(self, plan: StepPlan, shift: int) -> StepResult:
        return StepResult(tuple(self._tokens(plan, item, shift) for item in plan.items))

    def _tokens(self, plan: StepPlan, item: StepItem, shift: int) -> tuple[int, ...]:
        if not item.is_last_chunk:
            return ()
        name = self.names[item.seq_id]
        accepted = min(self.accepted.get((name, plan.step + shift), 0), item.q - 1)
        tokens = [TOKEN] * (1 + (0 if plan.is_prefill else accepted))
        left = self.stops.get(name, 1 << 30) - self.output_len.get(name, 0)
        if 1 <= left <= len(tokens):
            tokens[left - 1] = self.scheduler.config.eos_token_id
        return tuple(tokens)

    def _close_turn(self) -> None:
        """Log the state the last turn left; reports of this turn belong to it."""
        if not self.turns or self.turns[-1].free_after >= 0:
            self.early += self.reports
            self.reports.clear()
            return
        turn, queues = self.turns[-1], self.scheduler.queues
        self.scheduler.check_integrity()
        turn.reports = list(self.reports)
        self.reports.clear()
        turn.free_after = queues.blocks.num_free
        turn.waiting = ",".join(s.request.req_id for s in queues.waiting)
        turn.running = ",".join(s.request.req_id for s in queues.running)
        for seq in (*queues.waiting, *queues.running):
            name = seq.request.req_id
            turn.state[name] = f"{seq.num_tokens}/{seq.cached}/{seq.inflight_total}"
            if seq.is_finished:
                turn.dead.add(name)
            turn.tables[name] = list(seq.block_table)


def play(config, script, steps, **options) -> list[Turn]:
    """Run one rank for at most `steps` steps; return its turns."""
    rank = ScriptedRank(config, script, **options)
    rank.advance(steps)
    rank._close_turn()
    return rank.turns


def play_group_ranks(configs, scripts, steps, stops=None, policy=None) -> list[ScriptedRank]:
    """Run several ranks in lockstep, carrying their ballots."""
    ranks = [
        ScriptedRank(
            config, script, num_ranks=len(configs), stops=stops[i] if stops else None, policy=policy
        )
        for i, (config, script) in enumerate(zip(configs, scripts, strict=True))
    ]
    return run_together(ranks, steps)


def run_together(ranks: list[ScriptedRank], steps: int) -> list[ScriptedRank]:
    """Run the ranks of a group, or a single one, for at most so many steps."""
    while not all(rank.done for rank in ranks):
        for rank in ranks:
            rank.advance(steps)
        if any(rank.done for rank in ranks):
            assert all(rank.done for rank in ranks), "a rank left while others go on"
            break
        if len(ranks) > 1:
            _meet(ranks)
    for rank in ranks:
        rank._close_turn()
    return ranks


def _meet(ranks: list[ScriptedRank]) -> None:
    """Answer what all ranks wait for: a vote, or the next arrival on any of them."""
    kinds = {type(rank.pending) for rank in ranks}
    assert len(kinds) == 1, "ranks wait for different things"
    if kinds == {AwaitArrival}:
        awake = [rank.wake() for rank in ranks]
        answer = any(awake)
    else:
        votes = [rank.pending for rank in ranks]
        assert len({vote.topic for vote in votes}) == 1, "ranks vote on different things"
        assert len({vote.ballot.rule for vote in votes}) == 1, "ranks vote by different rules"
        answer = decide(votes[0].ballot.rule, [vote.ballot.want for vote in votes])
    for rank in ranks:
        rank.answer, rank.pending = answer, None


def play_group(configs, scripts, steps) -> list[list[Turn]]:
    """Run several ranks in lockstep; return each one's turns."""
    return [rank.turns for rank in play_group_ranks(configs, scripts, steps)]


def ended(rank: ScriptedRank) -> dict[str, str]:
    """Check that every request ended once and all memory is back; return the reasons.

    What strict mode loses by an abort, as upstream does, it must know.
    """
    queues = rank.scheduler.queues
    assert rank.done, "the run did not end"
    assert not queues.waiting
    assert not queues.running
    assert not queues.live
    assert rank.scheduler.num_in_flight == 0
    lost, slots_lost = sum(blocks for _, blocks in queues.leaked), len(queues.leaked)
    assert queues.blocks.num_free + lost == queues.blocks.num_total - 1, "blocks are missing"
    assert queues.slots.num_free + slots_lost == queues.slots.num_total - 1, "slots are missing"
    reasons: Counter = Counter()
    for ending in endings([*rank.early, *[r for t in rank.turns for r in t.reports]]):
        reasons[rank.names[ending.seq_id], ending.reason] += 1
    names = [name for name, _ in reasons]
    assert sorted(names) == sorted(rank.names.values()), "a request is lost"
    assert set(reasons.values()) <= {1}, "a request ended twice"
    return dict(reasons.keys())


def request(name: str, prompt_len: int, max_tokens: int = 16, **options) -> Request:
    return Request(req_id=name, prompt_len=prompt_len, max_tokens=max_tokens, **options)
