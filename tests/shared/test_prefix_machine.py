"""Prefix reuse under the scheduler's state machine: whatever is found is what was asked for.

The device of `prefix_device.py` follows every token. The machine checks memory and endings after
each call (`check_integrity` knows idle blocks and tails), and that all memory comes back.
"""

from types import MappingProxyType

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import initialize, rule, run_state_machine_as_test

from mdi_shared.policies import NO_POLICY
from tests.shared.prefix_device import PrefixDevice
from tests.shared.script import TOKEN, request
from tests.shared.test_scheduler_machine import SchedulerMachine

found = {"hits": 0, "copies": 0}
EVICTS, MIXES = "srpt:evict=2", "mixed+order=sjf"


class PrefixMachine(SchedulerMachine):
    options = MappingProxyType({"enable_prefix_cache": True, "max_model_len": 40})

    @initialize(
        zos=st.booleans(), chunked=st.booleans(), num_blocks=st.integers(11, 24),
        seats=st.integers(1, 4), stop=st.booleans(), cp=st.sampled_from([1, 1, 2]),
        tails=st.integers(1, 6), eviction=st.sampled_from(["lru", "flops"]),
        saves=st.sampled_from(["prompt+turn+branch", "prompt", "turn", "branch+prompt"]),
        margin=st.sampled_from([1, 1, 7]),
    )  # fmt: skip
    def start(self, zos, chunked, num_blocks, seats, stop, cp, tails, eviction, saves, margin):
        kept = {"prefix_tails": tails, "prefix_snapshots": saves, "prefix_eviction": eviction,
                "max_num_batched_tokens": 16 if chunked else 40}  # fmt: skip
        self.options = {**type(self).options, **kept, "num_draft_tokens": 0}
        SchedulerMachine.start(self, zos, chunked, 0, num_blocks, seats, stop, cp)
        self.scheduler.queues.prefix.margin = margin
        self.device = PrefixDevice(self.scheduler)

    @rule(
        first=st.sampled_from([0, 4, 9, 16, 20]), rest=st.integers(1, 18), most=st.integers(1, 14),
        again=st.booleans(), data=st.data(),
    )  # fmt: skip
    def submit(self, first, rest, most, again, data):
        """A new prompt with some tokens of a system prompt, or a further turn of somebody."""
        name, told = f"r{len(self.emitted)}", list(self.device.seen.values())
        prompt = [8, 9] * (first // 2) + [TOKEN] * rest
        if again and told:
            prompt = [*data.draw(st.sampled_from(told)), *prompt][:38]
        seq_id = len(self.emitted)
        contents = self.device.contents_of(seq_id, prompt)
        wanted = request(name, len(prompt), max_tokens=most, contents=contents)
        assert self.scheduler.submit(wanted) == seq_id
        self.live[name] = seq_id
        self.emitted[seq_id] = 0

    def teardown(self):
        super().teardown()
        if hasattr(self, "device"):
            found["hits"] += len(self.device.hits)
            found["copies"] += self.device.num_copies


@pytest.mark.parametrize("policy", [NO_POLICY, "lcfs+victim=newest", EVICTS, MIXES])
def test_a_hit_is_the_sequences_own_past(policy):
    machine = type("Machine", (PrefixMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(
        max_examples=40, stateful_step_count=50, deadline=None, derandomize=True,
        phases=[Phase.generate],
    ))  # fmt: skip
    assert found["hits"] > 20
    assert found["copies"] > found["hits"]
