"""Suites of random inputs, each case repeatable by its seed (docs/reliability.md).

    python -m tests.fuzz SUITE [--seconds 600] [--count N] [--seed 0]

A case that fails is printed with its seed; `--count 1 --seed N` repeats it, with the traceback.
The command ends with 1 when there was one.
"""

import argparse
import sys
import tempfile
import traceback
from collections import Counter
from importlib import import_module
from pathlib import Path

from tests.fuzz.suite import run

# Suite -> seconds of computing that one case may take.
SUITES = {"schedules": 60.0, "readers": 10.0, "commands": 40.0, "checkpoints": 20.0,
          "calls": 40.0, "groups": 20.0, "policies": 60.0}  # fmt: skip


def main():
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no case after so long")
    parser.add_argument("--count", type=int, default=10**9, help="most cases")
    parser.add_argument("--seed", type=int, default=0, help="the first one's")
    given = parser.parse_args()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        module = import_module(f"tests.fuzz.{given.suite}")
        case = getattr(module, given.suite)(Path(folder))
        seeds = range(given.seed, given.seed + given.count)
        failed = run(case, seeds, counts, limit_s=SUITES[given.suite], seconds=given.seconds,
                     tell=lambda line: print(line, flush=True))  # fmt: skip
    if given.count == 1:
        for error in failed.values():
            traceback.print_exception(error)
    for name, count in sorted(counts.items()):
        print(f"{name}: {count:,}")
    print(f"failed: {len(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
