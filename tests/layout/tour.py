"""Which functions of the project a call runs: what `docs/tour.md` is held against.

`python -m tests.layout.tour generate` (or `simulate`) lists them in the order of their first call,
with the lines of their bodies. Blank lines, comments, docstrings and signatures do not count.
"""

import ast
import contextlib
import io
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = [ROOT / folder for folder in (
    "minideepinfer", "shared/mdi_shared", "exec/mdi_exec", "sim/mdi_sim", "traces/mdi_traces",
)]  # fmt: skip
STATISTICS = ("run_summary.py", "mdi_analysis")  # behind the tables: the tour ends there


class Visited(NamedTuple):
    """A function that ran: its file, its qualified name, and the lines of its body."""

    path: str
    name: str
    lines: int


def visited(work: Callable[[], object]) -> list[Visited]:
    """Run `work` and return the project's functions it called, in order of their first call."""
    codes: dict[CodeType, None] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        if any(part in frame.f_code.co_filename for part in STATISTICS):
            sys.setprofile(None)
            threading.setprofile(None)
            return
        codes[frame.f_code] = None

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return list(dict.fromkeys(each for code in codes if (each := _function(code)) is not None))


def _function(code: CodeType) -> Visited | None:
    """Return the function a code object belongs to; None for others' code, lambdas and modules."""
    path = Path(code.co_filename)
    if not any(path.is_relative_to(package) for package in PACKAGES):
        return None
    return _functions(path).get(code.co_firstlineno)


@cache
def _functions(path: Path) -> dict[int, Visited]:
    """Return a file's functions by the line their code begins at; methods with their class."""
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    found: dict[int, Visited] = {}

    def walk(node: ast.AST, scope: str, inside: Visited | None) -> Iterator[None]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from walk(child, f"{scope}{child.name}.", inside)
            elif isinstance(child, ast.FunctionDef):
                own = inside or Visited(
                    str(path.relative_to(ROOT)), scope + child.name, _body_lines(child, lines)
                )
                first = min([child.lineno, *(d.lineno for d in child.decorator_list)])
                found[first] = found[child.lineno] = own  # a nested function is part of its outer
                yield from walk(child, scope, own)
            else:
                yield from walk(child, scope, inside)

    list(walk(ast.parse(text), "", None))
    return found


def _body_lines(function: ast.FunctionDef, lines: list[str]) -> int:
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if not body:
        return 0
    inside = lines[body[0].lineno - 1 : function.end_lineno]
    return sum(1 for line in inside if line.strip() and not line.strip().startswith("#"))


def generate() -> list[Visited]:
    """One prompt, greedy, one rank, reference ops: from `LLM.generate` to its last token."""
    from minideepinfer import LLM, SamplingParams

    with LLM(ROOT / "tests/golden/tiny", max_model_len=512, kv_cache_memory_gb=0.1) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        return visited(lambda: llm.generate([[100, 200, 300]], params))


def simulate() -> list[Visited]:
    """One request, from `mdi simulate` until its tables stand."""
    from minideepinfer.cli import run_and_flush

    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            run_and_flush()

    argv, sys.argv = sys.argv, ["mdi", "simulate", "--workload", "azure-conv", "-n", "1"]
    try:
        return visited(run)
    finally:
        sys.argv = argv


if __name__ == "__main__":
    stops = {"generate": generate, "simulate": simulate}[sys.argv[1]]()
    for stop in stops:
        print(f"{stop.lines:4} {stop.path}: {stop.name}")  # noqa: T201
    print(sum(stop.lines for stop in stops), "lines")  # noqa: T201
