"""The scheduler as a hypothesis state machine: any order of calls a loop could make.

Unlike the scripted workloads, the machine decides call by call, so it finds orders of submit,
abort and step that a script would not spell out.
"""

from types import MappingProxyType

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from mdi_shared.plan import StepResult
from mdi_shared.policies import NO_POLICY, new_policy
from mdi_shared.scheduler import Scheduler
from tests.fuzz.policies import fitting
from tests.shared.script import TOKEN, request, toy

EOS = 1


class SchedulerMachine(RuleBasedStateMachine):
    policy = NO_POLICY
    options = MappingProxyType({})  # of the scheduler, whatever is drawn

    @initialize(
        zos=st.booleans(), chunked=st.booleans(), nextn=st.integers(0, 2),
        num_blocks=st.integers(5, 20), seats=st.integers(1, 4), stop=st.booleans(),
        cp=st.sampled_from([1, 2, 3]),
    )  # fmt: skip
    def start(self, zos, chunked, nextn, num_blocks, seats, stop, cp):
        drawn = {
            "enable_zos": zos, "chunked_prefill": chunked, "num_draft_tokens": nextn,
            "max_model_len": 16, "context_parallel_size": cp, "num_blocks": num_blocks,
            "max_num_seqs": seats, "stop_preempted_request": stop,
            "prefill_any_attempt_interval": 1_000,
        }  # fmt: skip
        self.config = fitting(toy(**(drawn | self.options)), self.policy)
        self.scheduler = Scheduler(self.config, scheduling=new_policy(self.policy))
        self.flights = []
        self.live = {}
        self.emitted = {}
        self.ended = {}

    @rule(prompt=st.integers(1, 18), most=st.integers(1, 8))
    def submit(self, prompt, most):
        name = f"r{len(self.emitted)}"
        seq_id = self.scheduler.submit(self.request(name, prompt, most))
        self.live[name] = seq_id
        self.emitted[seq_id] = 0
        assert self.scheduler.has_unfinished()

    def request(self, name, prompt, most):
        return request(name, prompt, max_tokens=most)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def abort(self, data):
        name = data.draw(st.sampled_from(sorted(self.live)))
        ending = self.scheduler.abort(name)
        assert ending is not None
        assert ending.reason == "abort"
        self.note(ending)
        assert self.scheduler.abort(name) is None

    @precondition(lambda self: self.scheduler.has_unfinished() or self.flights)
    @rule(data=st.data())
    def turn(self, data):
        """One turn of the loop, prefill if it can be had and is drawn."""
        plan = self.plan(data.draw(st.booleans()))
        for ending in plan.ignored:
            if ending.reason != "abort":
                self.note(ending)
        self.flights.append(plan)
        keep = 1 if self.config.enable_zos and not plan.is_prefill else 0
        while len(self.flights) > keep:
            self.commit(self.flights.pop(0), data)
        self.scheduler.release()

    def plan(self, try_prefill):
        ballot = self.scheduler.ballot()
        if try_prefill and ballot.want:
            plan = self.scheduler.try_prefill(ballot)
            if plan is not None:
                return plan
        return self.scheduler.plan_decode(ballot)

    def commit(self, plan, data):
        tokens = []
        for item in plan.items:
            if not item.is_last_chunk:
                tokens.append(())
                continue
            count = data.draw(st.integers(1, 1 if plan.is_prefill else item.q))
            stops = data.draw(st.integers(0, 7)) == 0
            tokens.append((TOKEN,) * (count - 1) + (EOS if stops else TOKEN,))
        outcome = self.scheduler.commit(StepResult(tuple(tokens)))
        assert outcome.seq_ids == plan.seq_ids
        for index, (seq_id, new) in enumerate(zip(outcome.seq_ids, outcome.tokens, strict=True)):
            assert index not in outcome.dropped or new == ()
            assert not new or seq_id not in self.ended, "a token after the end"
            self.emitted[seq_id] += len(new)
        for ending in outcome.ended:
            self.note(ending)

    def note(self, ending):
        assert ending.seq_id not in self.ended, "ended twice"
        assert ending.output_len == self.emitted[ending.seq_id]
        self.ended[ending.seq_id] = ending.reason
        self.live = {name: s for name, s in self.live.items() if s != ending.seq_id}

    @invariant()
    def sound(self):
        if hasattr(self, "scheduler"):
            self.scheduler.check_integrity()
            assert sorted(self.scheduler.queues.live) == sorted(self.live)

    def teardown(self):
        """Whatever happened, running on ends everything and returns all memory."""
        if not hasattr(self, "scheduler"):
            return
        for _ in range(600):
            if not self.scheduler.has_unfinished():
                break
            plan = self.plan(True)
            for ending in plan.ignored:
                if ending.reason != "abort":
                    self.note(ending)
            self.flights.append(plan)
            while self.flights:
                flight = self.flights.pop(0)
                rows = [(TOKEN,) if item.is_last_chunk else () for item in flight.items]
                outcome = self.scheduler.commit(StepResult(tuple(rows)))
                for seq_id, new in zip(outcome.seq_ids, outcome.tokens, strict=True):
                    self.emitted[seq_id] += len(new)
                for ending in outcome.ended:
                    self.note(ending)
            self.scheduler.release()
        assert not self.scheduler.has_unfinished()
        assert not self.live
        for pool in (self.scheduler.queues.blocks, self.scheduler.queues.slots):
            assert pool.num_free == pool.num_total - 1


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
