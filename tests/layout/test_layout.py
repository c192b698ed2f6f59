"""Style as a test: what every reader may rely on, checked by reading the source.

Exceptions stand in the lists here and may only become fewer.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "mdi_shared": "shared",
    "mdi_sim": "sim",
    "mdi_exec": "exec",
    "mdi_traces": "traces",
    "mdi_analysis": "analysis",
    "minideepinfer": ".",
}
SOURCES = sorted(
    path for name, folder in FOLDERS.items() for path in (ROOT / folder / name).rglob("*.py")
)
CORE = [path for path in SOURCES if "mdi_shared" in path.parts]

MOST_FUNCTION_LINES = 70
MOST_FILE_LINES = 400
LONG_FUNCTIONS: set[str] = set()
LONG_FILES: set[str] = set()

BANNED_IN_CORE = {
    "time", "datetime", "random", "os", "threading", "torch", "numpy", "pandas", "pyarrow",
    "simpy", "asyncio", "socket", "subprocess",
}  # fmt: skip


def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def functions(tree):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.partition(".")[0]


def test_functions_fit_a_screen():
    long = {
        f"{path.relative_to(ROOT)}:{node.name}"
        for path in SOURCES
        for node in functions(parsed(path))
        if node.end_lineno - node.lineno + 1 > MOST_FUNCTION_LINES
    }
    assert long == LONG_FUNCTIONS


def test_files_stay_readable():
    long = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        if len(path.read_text(encoding="utf-8").splitlines()) > MOST_FILE_LINES
    }
    assert long == LONG_FILES


@pytest.mark.parametrize("path", CORE, ids=lambda path: path.name)
def test_the_core_imports_the_standard_library_and_no_clock(path):
    names = set(imported(parsed(path)))
    assert not names & BANNED_IN_CORE
    assert all(name in sys.stdlib_module_names or name == "mdi_shared" for name in names)


def test_only_the_loop_plans_and_commits():
    """One loop: no other file calls what moves the scheduler on."""
    moves = {"plan_decode", "try_prefill", "plan_idle_prefill", "commit", "advance", "release"}
    callers = {
        str(path.relative_to(ROOT))
        for path in SOURCES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in moves
        and ast.unparse(node.func.value).split(".")[-1] == "scheduler"
    }
    assert callers == {"shared/mdi_shared/loop.py"}


def test_every_module_says_what_it_is():
    empty = {"__init__.py"}
    silent = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if path.read_text(encoding="utf-8").strip() and ast.get_docstring(parsed(path)) is None
        and path.name not in empty
    ]  # fmt: skip
    assert silent == []


def test_the_core_loads_without_torch_and_simpy():
    """A pure core dies by its parent's imports; a fresh interpreter shows it has none."""
    code = (
        "import sys, pkgutil, importlib\n"
        "for name in ('torch', 'simpy', 'numpy', 'pandas', 'pyarrow'): sys.modules[name] = None\n"
        "import mdi_shared\n"
        "names = [m.name for m in pkgutil.walk_packages(mdi_shared.__path__, 'mdi_shared.')]\n"
        "for name in names: importlib.import_module(name)\n"
        "print(len(names))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == len(CORE) - 1  # less __init__


def test_each_question_of_the_index_has_its_file():
    """At least twenty, each answered by a path that exists; no file answers two."""
    page = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| ") and "?" in line]
    answers = [re.findall(r"`([\w/]+(?:\.py|/))`", line.rsplit(" | ", 1)[1]) for line in rows]
    assert len(rows) >= 20
    assert all(answers)
    named = [path for paths in answers for path in paths]
    assert len(named) == len(set(named))
    assert [path for path in named if not (ROOT / path).exists()] == []
