"""Every scheduling policy under the scheduler's state machine: what a policy cannot break.

The machine checks memory, queues and endings after each call and that all ends in the end. Added
here: nobody is preempted again without a token in between, and where nothing runs the head of the
queue is served if its memory is free, whatever the policy says.
"""

import zlib

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import rule, run_state_machine_as_test

from mdi_shared.blocks import Fit
from mdi_shared.policies import POLICIES
from mdi_shared.request import Hints
from tests.fuzz.policies import PARAMETERS
from tests.shared.script import request
from tests.shared.test_scheduler_machine import SchedulerMachine

COMBINED = (
    "order=srpt+admit=past_future+victim=newest+max_wait_s=0.05",
    "order=lcfs+admit=wait:threshold=3,width=4+victim=least_computed",
    "vtc+admit=conservative+victim=cost_aware",
    "order=srpt+phase=mixed:budget=6+victim=newest",
)
SPECS = [f"{name}:{PARAMETERS[name]}" if name in PARAMETERS else name for name in POLICIES]


class PolicyMachine(SchedulerMachine):
    def __init__(self):
        super().__init__()
        self.now_ns = 0
        self.at_preemption = {}

    def request(self, name, prompt, most):
        draw = zlib.crc32(name.encode())
        hints = Hints(
            predicted_len=1 + draw % 9 if draw % 4 else None, priority=draw % 3,
            client=[None, "a", "b"][draw % 5 % 3], program=[None, "p", "q"][draw % 7 % 3],
            deadline_ns=1_000_000 * (1 + draw % 50) if draw % 2 else None,
        )  # fmt: skip
        return request(name, prompt, max_tokens=most, arrived_ns=self.now_ns, hints=hints)

    @rule(ms=st.sampled_from([1, 10, 200]))
    def time_goes_by(self, ms):
        self.now_ns += ms * 1_000_000
        if hasattr(self, "scheduler") and self.scheduler.decisions is not None:
            self.scheduler.decisions.view.now_ns = self.now_ns

    def plan(self, try_prefill):
        queues = self.scheduler.queues
        if try_prefill and queues.waiting and not queues.running:
            ballot = self.scheduler.ballot()
            plan = self.scheduler.try_prefill(ballot) if ballot.want else None
            if plan is not None:
                return plan
            head = queues.waiting[0] if queues.waiting else None
            idle = ballot.want and head is not None and not head.checkpoints
            assert not idle or queues.fits(head) is not Fit.OK, "it could have been served"
        plan = super().plan(try_prefill)
        for seq_id in plan.preempted:
            assert self.at_preemption.get(seq_id, -1) < self.emitted[seq_id], "for nothing"
            self.at_preemption[seq_id] = self.emitted[seq_id]
        return plan


@pytest.mark.parametrize("spec", [*SPECS, *COMBINED])
def test_whatever_the_policy_the_core_holds(spec):
    machine = type("Machine", (PolicyMachine,), {"policy": spec})
    run_state_machine_as_test(machine, settings=settings(
        max_examples=12, stateful_step_count=30, deadline=None, derandomize=True
    ))  # fmt: skip
