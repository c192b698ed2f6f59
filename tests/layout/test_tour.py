"""docs/tour.md names every function of the project that the two plain paths run, and no other."""

import re
import subprocess
import sys

import pytest

from tests.layout.tour import ROOT, Visited

MOST_LINES = 2600
# Whether these run hangs on which of two threads is first, not on the path.
MAY_REST = {
    ("exec/mdi_exec/engine/engine.py", "LLMEngine._await_arrival"),
}  # fmt: skip


def named(heading: str) -> set[tuple[str, str]]:
    """Return the functions, by file, that a part of the page lists."""
    page = (ROOT / "docs/tour.md").read_text(encoding="utf-8")
    part = page.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    found = set()
    for entry in re.split(r"^- ", part, flags=re.MULTILINE)[1:]:
        path, *names = re.findall(r"`([^`]+)`", entry.split("\n\n")[0])
        found |= {(path, name) for name in names}
    return found


def walked(name: str) -> list[Visited]:
    """Take a walk in a fresh interpreter, where nothing has been imported or cached before."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.layout.tour", name],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    stops = re.findall(r"^ *(\d+) (\S+): (\S+)$", done.stdout, flags=re.MULTILINE)
    return [Visited(path, function, int(lines)) for lines, path, function in stops]


@pytest.mark.parametrize(
    ("heading", "walk"),
    [("From `LLM.generate` to the last token", "generate"),
     ("From `mdi simulate` to its tables", "simulate")],
    ids=["generate", "simulate"],
)  # fmt: skip
def test_the_tour_is_what_runs(heading: str, walk: str) -> None:
    visited = walked(walk)
    ran, told = {(stop.path, stop.name) for stop in visited}, named(heading)
    assert ran - told - MAY_REST == set(), "the tour misses what runs"
    assert told - ran - MAY_REST == set(), "the tour names what does not run"
    assert sum(stop.lines for stop in visited) <= MOST_LINES
