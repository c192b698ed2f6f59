"""Make published results again: `python -m experiments [NAME …] [--seeds N]` prints the table."""

import argparse

from experiments.shapes import SHAPES


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(SHAPES))
    parser.add_argument("--seeds", type=int, default=5, help="workloads of each (default: 5)")
    given = parser.parse_args()
    for name in given.names:
        if name not in SHAPES:
            parser.error(f"{name!r} is none of {', '.join(SHAPES)}")
    if given.seeds < 1:
        parser.error("--seeds must be at least 1")
    print("| experiment | claim | workload | what came out | as published |\n|---|---|---|---|---|")
    for name in given.names or SHAPES:
        shape = SHAPES[name]
        found = shape.run(given.seeds)
        claim = f"{shape.claim} ({shape.source})"
        print(f"| `{name}` | {claim} | {shape.workload} | {found.figures} | "
              f"{'yes' if found.holds else 'no'} |", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
