"""The promise as a property: a request's tokens and log-probabilities depend on nothing beside it.

Requests of a fixed set are served one by one, launched op by op and without overlap. Then random
scenarios serve many of them at once, some several times: any batch, arrivals between steps, chunks
of any size, graphs captured before or on the way or not at all, overlapped scheduling or not,
pools so small that requests are preempted. Every answer must be the lonely one's, bit for bit. A
failing scenario is named by its number, and repeats. Requests that filter tokens are left out: a
plain row beside them is sampled by the reference (test_runner.py).
"""

import random
from functools import cache

import pytest

from mdi_exec.engine.llm import LLM
from mdi_exec.engine.sampling import SamplingParams
from mdi_exec.numerics import Numerics
from tests.exec.engines import CHECKPOINT, SMALL
from tests.gpu.marks import gpu

pytestmark = gpu

# Around blocks of 128 tokens, the window of 128, expert tiles and few-row products of 64.
LENGTHS = (1, 2, 33, 63, 65, 127, 128, 129, 200, 257, 390, 520)
NUMERICS = (Numerics.QUANTISED, Numerics.FOLDED)
SCENARIOS = 24
REQUESTS = 14
MOST_TURNS = 5_000  # some hundred are needed


def prompt(number: int) -> list[int]:
    dice = random.Random(f"prompt {number}")
    return [dice.randrange(3, 1000) for _ in range(LENGTHS[number])]


def params(number: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=1 + 5 * number % 17, ignore_eos=True, seq_seed=number,
        temperature=0.8 * (number % 3),
    )  # fmt: skip


def open_llm(numerics: Numerics, **options) -> LLM:
    """All within the reach of `SMALL`, whose kernels `alone` has had compiled first."""
    given = {**SMALL, "numerics": numerics.value, **options}
    return LLM(CHECKPOINT, device="cuda", **given)


@cache
def alone(numerics: Numerics) -> list[tuple[object, object]]:
    """What each request gives by itself."""
    with open_llm(numerics, compile_ahead=True, use_cuda_graphs=False, enable_zos=False) as llm:
        return [
            (output.token_ids, output.logprobs)
            for number in range(len(LENGTHS))
            for output in llm.generate([prompt(number)], params(number))
        ]


def options_of(dice: random.Random) -> dict[str, object]:
    """Draw options of an engine; now and then a pool that is too small for what will run."""
    seats = dice.choice([2, 5, 16])
    return {
        "use_cuda_graphs": dice.random() < 0.7, "enable_zos": dice.random() < 0.7,
        "max_num_seqs": seats,
        "max_num_batched_tokens": dice.choice([2 * seats, 61, 128, 200, 513, 8192]),
        "prefill_attempt_interval": dice.choice([1, 3, 70]),
        "num_blocks": dice.choice([8, 9, 12, 40]), "compile_ahead": False,
    }  # fmt: skip


def serve(llm: LLM, dice: random.Random) -> list[tuple[int, object]]:
    """Serve requests that come between steps; returns each one's number and output."""
    engine, coming = llm.engine, [dice.randrange(len(LENGTHS)) for _ in range(REQUESTS)]
    numbers, outputs = dict(enumerate(coming)), {}
    patience = dice.choice([0.0, 0.5, 0.9])
    for _ in range(MOST_TURNS):
        while coming and dice.random() >= patience:
            at = len(numbers) - len(coming)
            engine.add_request(prompt(numbers[at]), params(numbers[at]), str(at))
            coming.pop()
        for output in engine.step():
            outputs[output.req_id] = output
        if not coming and not engine.has_unfinished_requests():
            break
    return [(number, outputs[str(at)]) for at, number in numbers.items()]


@pytest.mark.parametrize("scenario", range(SCENARIOS))
def test_nothing_beside_a_request_shows_in_it(scenario):
    dice = random.Random(f"scenario {scenario}")
    # Neighbouring scenarios, which one process runs, have the same numerics.
    numerics, options = NUMERICS[scenario * len(NUMERICS) // SCENARIOS], options_of(dice)
    expected = alone(numerics)
    with open_llm(numerics, **options) as llm:
        if options["use_cuda_graphs"] and dice.random() < 0.2:
            llm.warm_up()
        for number, output in serve(llm, dice):
            found = (output.token_ids, output.logprobs)
            assert found == expected[number], f"request {number}, {options}"
