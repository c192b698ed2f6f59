"""What all suites share: cases by seed, each within a limit of time and memory, and counts.

A suite is a function of a seed and a counter. It tries one thing, or a few, counts what came of
it, and raises for what must not be; the same seed tries the same. `run` counts a case that takes
too long or too much memory as one that failed.
"""

import faulthandler
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import contextmanager

from mdi_shared.errors import MiniDeepInferError

Case = Callable[[int, Counter[str]], None]
MOST_LINE_BYTES = 2_000
MOST_GROWTH = 1 << 30  # bytes that one case may take beyond what all before it took


class Hang(BaseException):
    """A case took longer than it may. No `Exception`: what is tested may catch those."""


TIMERS = {signal.SIGPROF: signal.ITIMER_PROF, signal.SIGALRM: signal.ITIMER_REAL}


@contextmanager
def within(seconds):
    """Raise `Hang` in a block that computes for longer, or waits for 20 times as long.

    Ends the process in a block that cannot be stopped. Machines that others use, too, are slow:
    what counts is time on a processor.
    """

    def late(*_):
        raise Hang(f"no end within {seconds:g} s of computing, or {20 * seconds:g} s")

    before = {number: signal.signal(number, late) for number in TIMERS}
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, 20 * seconds)
    faulthandler.dump_traceback_later(30 * seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        for number, timer in TIMERS.items():
            signal.setitimer(timer, 0)
            signal.signal(number, before[number])


def run(case: Case, seeds: Iterable[int], counts, *, limit_s=30.0, seconds=float("inf"), tell=None):
    """Run the cases of `seeds` for so long; return what failed, by seed, and tell it at once."""
    failed: dict[int, BaseException] = {}
    start = time.monotonic()
    for seed in seeds:
        if time.monotonic() - start > seconds:
            break
        before = peak_bytes()
        try:
            with within(limit_s):
                case(seed, counts)
            grown = peak_bytes() - before
            assert grown <= MOST_GROWTH, f"took {grown:,} bytes of memory"
        except (Exception, Hang) as error:  # noqa: BLE001 - whatever it is, its seed is wanted
            failed[seed] = error
            if tell is not None:
                tell(f"seed {seed}: {type(error).__name__}: {error}")
        counts["cases"] += 1
    return failed


def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def refusal(action, *given):
    """Return (answer, None), or (None, the one line by which it was refused)."""
    try:
        return action(*given), None
    except MiniDeepInferError as error:
        return None, one_line(str(error))


def one_line(text, most=MOST_LINE_BYTES):
    """Return `text`, which must be what somebody can read at a glance."""
    assert text, "it is refused without a word"
    assert len(text.splitlines()) == 1, f"more than a line: {text!r}"
    assert len(text.encode("utf-8", "backslashreplace")) <= most, f"long: {text!r}"
    return text


def drawn(name, seed):
    """Return the random numbers of a suite's case."""
    return random.Random(f"{name} {seed}")
