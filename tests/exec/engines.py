"""Engines for tests: the tiny model's, watched from inside, and one whose device is made up."""

import random
import time
from collections import deque
from concurrent.futures import Future

from mdi_exec.engine.engine import LLMEngine
from mdi_exec.engine.llm import LLM
from mdi_exec.engine.step_tokens import StepTokens
from mdi_exec.numerics import Numerics
from mdi_shared.config import SchedulerConfig
from mdi_shared.policies import NO_POLICY, new_policy
from mdi_shared.scheduler import Scheduler
from tests.exec.weights import small_checkpoint

CHECKPOINT = small_checkpoint()
# The numerics that golden data exists in; the folded one has its own comparison.
GOLDEN_MODES = (Numerics.QUANTISED, Numerics.FLOAT32)
# Who comes late waits few decode steps: each is a step of the model.
SMALL = {"max_model_len": 640, "max_num_seqs": 16, "num_blocks": 40,
         "prefill_attempt_interval": 2, "prefill_any_attempt_interval": 3}  # fmt: skip


class Watch:
    """Notes a running LLM's plans and every row of logits its model computes.

    `rows` maps (prompt length, context length) to the rows computed there: one, or more when a
    preempted request was computed again. Requests are told apart by the length of their prompt.
    """

    def __init__(self, llm: LLM) -> None:
        self.plans, self.rows = [], {}
        self._contexts = deque()
        self._launch = llm.engine.runner.launch
        llm.engine.runner.launch = self.launch
        llm.engine.runner.on_logits = self.keep

    def launch(self, plan, requests):
        self.plans.append(plan)
        sampled = [item.k for item in plan.items if item.is_last_chunk]
        if sampled:
            self._contexts.append(sampled)
        return self._launch(plan, requests)

    def keep(self, requests, logits):
        for request, k, row in zip(requests, self._contexts.popleft(), logits, strict=True):
            self.rows.setdefault((request.prompt_len, k), []).append(row.clone())


class FakeRunner:
    """Samples the next of a counter's numbers at once, and checks what a real device relies on.

    A sequence's rows must be contiguous, its memory its own, and no step may be run twice. Of
    drafts it accepts any number.
    """

    def __init__(self, vocab_size: int = 8, seed: int = 0) -> None:
        self.dice, self.vocab_size = random.Random(seed), vocab_size
        self.is_closed = False
        self.num_steps = 0
        self.fail_at = None  # step whose future fails

    def launch(self, plan, requests):
        assert not self.is_closed, "a step after the end"
        assert len(plan.seq_ids) == len(requests)
        self.num_steps += 1
        slots = [slot for slot in plan.slots if slot]
        assert len(slots) == len(set(slots)) == len(requests), "a slot has two owners"
        future, now_ns = Future(), time.monotonic_ns()
        counts, sampled = None, len(plan.seq_ids) - plan.is_partial
        if plan.rows_each > 1 and not plan.is_prefill:
            counts = [self.dice.randint(1, plan.rows_each) for _ in plan.seq_ids]
            sampled = sum(counts)
        tokens = [self.dice.randrange(self.vocab_size) for _ in range(sampled)]
        if self.num_steps == self.fail_at:
            future.set_exception(RuntimeError("the device is gone"))
        else:
            logprobs = [{token: -1.0} for token in tokens]
            future.set_result(StepTokens(tokens, logprobs, now_ns, now_ns, counts=counts))
        return future, now_ns

    def close(self):
        self.is_closed = True


def fake_engine(*, seed: int = 0, policy: str = NO_POLICY, **options) -> LLMEngine:
    """An engine on a made-up device; tokens are random numbers from 0 (1 is EOS) to 7."""
    defaults = {"block_size": 4, "num_blocks": 24, "max_num_seqs": 4, "max_model_len": 64,
                "max_num_batched_tokens": 16}  # fmt: skip
    config = SchedulerConfig(**{**defaults, **options})
    scheduler = Scheduler(config, scheduling=new_policy(policy))
    return LLMEngine(scheduler, FakeRunner(seed=seed), vocab_size=8)


def is_empty(engine: LLMEngine) -> bool:
    """Say whether every block and slot is back and nobody is waited for."""
    queues = engine.scheduler.queues
    return (
        queues.blocks.num_free == queues.blocks.num_total - 1
        and queues.slots.num_free == queues.slots.num_total - 1
        and not queues.live
        and not engine.has_unfinished_requests()
    )


def report(line: str) -> None:
    """Say what a test measured; pytest shows it with -s, or when the test fails."""
    print(line)  # noqa: T201
