"""`LLM` and its engine called by several threads, some of them hostile; the others notice nothing.

The model is made up: a token is a function of its request's seed and its place, so what an honest
request must get is known beforehand. All else is real: checks, streams, scheduler, text, recording.
A case ends by itself, or by closing the engine in the middle; then whoever waits gets a last
output. One case in 100 has the real model, which must give what it gives without the others.

A seed repeats what is asked for, not how the threads take turns.
"""

import random
import threading
import time
from collections import Counter
from concurrent.futures import Future
from pathlib import Path

from mdi_exec.engine.llm import LLM
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.engine.step_tokens import StepTokens
from mdi_exec.errors import EngineStoppedError
from mdi_shared.errors import MiniDeepInferError
from mdi_traces.check import check_run
from mdi_traces.run import load_run
from tests.fuzz.hostile import VALUES, hostile_options, hostile_params, hostile_prompts
from tests.fuzz.suite import drawn, one_line, refusal

TINY = Path(__file__).parent.parent / "golden" / "tiny"
REAL_SHARE, STOP_SHARE, RECORD_SHARE = 0.01, 0.3, 0.3
HONEST, HOSTILE, REQUESTS, CALLS = 2, 2, 3, 6
LONGEST_S = 300.0
REFUSED = (MiniDeepInferError,)


class MadeUpRunner:
    """Draws tokens without a model."""

    def __init__(self, vocab_size, real):
        self.vocab_size, self.real = vocab_size, real

    def launch(self, plan, requests):
        tokens = [token_of(state.params.rng_seed, item.k, self.vocab_size)
                  for item, state in zip(plan.items, requests, strict=True)
                  if item.is_last_chunk]  # fmt: skip
        now_ns = time.monotonic_ns()
        done = Future()
        done.set_result(StepTokens(tokens, [{token: -1.0} for token in tokens], now_ns, now_ns))
        return done, now_ns

    def warm_up(self, most_rows):
        pass

    def close(self):
        self.real.close()


def token_of(seed, context, vocab_size):
    return random.Random(seed * 1_000_003 + context).randrange(vocab_size)


def calls(folder):
    """Return the suite; recordings go to `folder`."""
    llm = LLM(TINY, max_model_len=640, num_blocks=24, max_num_seqs=4)

    def case(seed, counts: Counter[str]):
        rng = drawn("calls", seed)
        record = str(folder / "run") if rng.random() < RECORD_SHARE else None
        is_real = rng.random() < REAL_SHARE
        _, refused = refusal(lambda: llm.reopen(**hostile_options(rng)))
        counts["calls refused" if refused else "calls served"] += 1
        llm.reopen(
            max_model_len=64 if is_real else 640, num_blocks=rng.choice((8, 24, 40)), record=record,
            max_num_seqs=rng.choice((1, 4, 16)), enable_zos=rng.random() < 0.7,
            prefill_attempt_interval=rng.choice((1, 7)),
            max_num_batched_tokens=rng.choice((16, 512)),
        )  # fmt: skip
        if not is_real:
            llm.engine.runner = MadeUpRunner(llm.config.vocab_size, llm.engine.runner)
        party = Party(llm, rng, counts, is_real)
        party.run(stops=rng.random() < STOP_SHARE)
        if record is not None:
            broken = [each for each in check_run(load_run(record)) if not each.skipped]
            assert not broken, f"the recording breaks a law: {broken[0]}"

    return case


class Party:
    """The threads of one case and what they ask for."""

    def __init__(self, llm, rng, counts, is_real):
        self.llm, self.engine, self.counts = llm, llm.engine, counts
        self.failed: list[BaseException] = []
        self.is_stopped = False
        self.seen: list[str] = []  # names that others may try to abort
        honest = [self._requests(rng, most=4 if is_real else 60) for _ in range(HONEST)]
        self.wanted = [self._wanted(llm, *each, is_real) for each in honest]
        self.threads = [threading.Thread(target=self._guarded, args=(self._ask, *each, wanted))
                        for each, wanted in zip(honest, self.wanted, strict=True)]  # fmt: skip
        self.threads += [threading.Thread(target=self._guarded, args=(self._annoy, seed))
                         for seed in (rng.getrandbits(60) for _ in range(HOSTILE))]  # fmt: skip

    def run(self, *, stops):
        for thread in self.threads:
            thread.start()
        if stops:
            time.sleep(0.02)
            self.is_stopped = True
            self.llm.reopen()
            self.counts["engines stopped in the middle"] += 1
        deadline = time.monotonic() + LONGEST_S
        for thread in self.threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
            assert not thread.is_alive(), "a thread waits without end"
        if self.failed:
            raise self.failed[0]
        if not stops:
            queues = self.engine.scheduler.queues
            self.engine.drain()
            self.engine.take_outputs()
            assert not queues.live
            assert queues.blocks.num_free == queues.blocks.num_total - 1, "blocks are lost"
            assert queues.slots.num_free == queues.slots.num_total - 1, "slots are lost"
        assert not self.engine.book.live, "somebody still waits"

    def _guarded(self, work, *given):
        try:
            work(*given)
        except BaseException as error:  # noqa: BLE001 - the main thread raises it
            self.failed.append(error)

    def require_stopped(self):
        assert self.is_stopped, "the engine has stopped, and nobody asked for that"

    # ---- honest ones ---------------------------------------------------------------------------

    def _requests(self, rng, most):
        prompts = [
            [rng.randrange(3, 500) for _ in range(rng.randint(1, most))] for _ in range(REQUESTS)
        ]
        params = [SamplingParams(seq_seed=rng.getrandbits(60), max_tokens=rng.randint(1, most),
                                 ignore_eos=rng.random() < 0.5) for _ in prompts]  # fmt: skip
        return prompts, params

    def _wanted(self, llm, prompts, params, is_real):
        if is_real:
            return [output.token_ids for output in llm.generate(prompts, params)]
        eos, vocab = llm.scheduler_config.eos_token_id, llm.config.vocab_size
        found = []
        for prompt, one in zip(prompts, params, strict=True):
            tokens = []
            while len(tokens) < one.max_tokens and (one.ignore_eos or eos not in tokens):
                tokens.append(token_of(one.rng_seed, len(prompt) + len(tokens), vocab))
            found.append(tuple(tokens))
        return found

    def _ask(self, prompts, params, wanted):
        last = {}
        try:
            for output in self.llm.stream(prompts, params):
                self.seen.append(output.req_id)
                assert output.prompt_index not in last, "an output behind the last one"
                if output.finished:
                    last[output.prompt_index] = output
                self.counts["outputs of honest requests"] += 1
        except EngineStoppedError:
            self.require_stopped()
        else:
            assert len(last) == len(prompts) or self.is_stopped, "a request has no last output"
        for index, output in last.items():
            expected = wanted[index]
            if output.finish_reason in ("error", "abort"):
                assert self.is_stopped or output.finish_reason == "abort", output
                assert output.token_ids == expected[: len(output.token_ids)], "other tokens"
            else:
                assert output.token_ids == expected, f"{output.token_ids} instead of {expected}"
        self.counts["honest requests answered"] += len(last)

    # ---- hostile ones --------------------------------------------------------------------------

    def _annoy(self, seed):
        rng = random.Random(seed)
        acts = (self._generate, self._generate, self._leave, self._add, self._abort, self._make)
        for _ in range(CALLS):
            try:
                rng.choice(acts)(rng)
            except EngineStoppedError:
                self.require_stopped()
            except REFUSED as error:
                one_line(str(error))
                self.counts["calls refused"] += 1
            else:
                self.counts["calls served"] += 1

    def _generate(self, rng):
        self.llm.save_recording()
        prompts, names = hostile_prompts(rng), ("prompts", "prompt_token_ids")
        outputs = self.llm.generate(
            **{rng.choice(names): prompts}, sampling_params=hostile_params(rng)
        )
        assert all(output.finished for output in outputs), outputs
        assert all(isinstance(output.text, str) for output in outputs), outputs

    def _leave(self, rng):
        """Begin a stream and go away in one of the ways there are."""
        params = SamplingParams(max_tokens=rng.choice((1, 600)), n=rng.choice((1, 3)))
        stream = self.llm.stream([[5, 6, 7], "Hello"], params)
        for _ in range(rng.randrange(5)):
            next(stream, None)
        how = rng.randrange(4)
        if how == 0:
            stream.close()
            stream.close()
            assert next(stream, None) is None
        elif how == 1:
            with stream:
                next(stream, None)
        elif how == 2:
            try:
                with stream:
                    raise KeyError("the caller's own")
            except KeyError:
                pass
        del stream

    def _add(self, rng):
        engine, sink = self.engine, []
        given = {"prompt_token_ids": [1, 2], "params": SamplingParams(max_tokens=2), "sink": sink,
                 "req_id": None, "arrival_ns": None}  # fmt: skip
        name = rng.choice(list(given))
        value = rng.choice(VALUES)
        if name == "sink" and hasattr(value, "append"):
            return
        req_id = engine.add_request(**{**given, name: value})
        engine.abort_request(req_id)

    def _abort(self, rng):
        self.engine.abort_request(rng.choice((*VALUES, "0", "999", "")))

    def _make(self, rng):
        hostile_params(rng)
