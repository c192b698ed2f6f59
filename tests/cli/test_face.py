"""The package as users import it: cheap, complete, and the same results as the command."""

import ast
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest
from pandas.testing import assert_frame_equal

import minideepinfer as mdi_package
from minideepinfer import SLO, TINY, generate_workload, load_run, simulate
from minideepinfer.commands import VERBS, load_verb

NOTHING_HEAVY = """
import sys
import minideepinfer
heavy = {"numpy", "pandas", "pyarrow", "matplotlib", "simpy", "rich", "typer", "torch"}
assert not heavy & set(sys.modules), heavy & set(sys.modules)
from minideepinfer import SchedulerConfig, H200, TINY, RooflineCost, LinearCost
assert not heavy & set(sys.modules), heavy & set(sys.modules)
import minideepinfer.cli
assert not (heavy - {"rich", "typer"}) & set(sys.modules), "the command line imports too much"
run = minideepinfer.simulate(
    minideepinfer.generate_workload("azure-conv", num_requests=5, seed=1), shape=TINY
)
assert not {"pandas", "matplotlib"} & set(sys.modules), "a simulation needs no pandas"
run.summary()
assert "matplotlib" not in sys.modules, "a summary draws nothing"
"""


@pytest.fixture(scope="module")
def run():
    work = generate_workload("azure-conv", num_requests=20, seed=3)
    return simulate(work, shape=TINY, seed=3)


def test_importing_costs_next_to_nothing():
    done = subprocess.run(
        [sys.executable, "-c", NOTHING_HEAVY], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_package_has_what_it_names():
    for name in mdi_package.__all__:
        assert getattr(mdi_package, name) is not None
    assert set(dir(mdi_package)) == set(mdi_package.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nope'"):
        _ = mdi_package.nope


def test_the_stub_says_where_every_name_is():
    """Editors, type checkers and the lazy import read the same list."""
    tree = ast.parse(Path(mdi_package.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    seen = {alias.name: node.module for node in imports for alias in node.names}
    assert all(alias.name == alias.asname for node in imports for alias in node.names)
    assert seen == mdi_package._HOME
    assert sorted(seen) == mdi_package.__all__


def test_every_verb_has_the_help_that_the_list_shows():
    for name, listed in VERBS.items():
        lines = inspect.cleandoc(load_verb(name).__doc__).split("\n\n")[0]
        assert " ".join(lines.split()) == listed


LIST_VERBS = """
import sys
from minideepinfer.cli import run_command
assert run_command(["--help"]) == 0
ours = {name for name in sys.modules if name.startswith(("mdi_", "minideepinfer."))}
assert ours <= {"minideepinfer.cli", "minideepinfer.commands", "minideepinfer.commands.screen",
                "minideepinfer.commands.last_words", "mdi_shared", "mdi_shared.errors"}, ours
others = {"rich", "numpy", "pandas", "pyarrow", "torch", "simpy", "matplotlib"} & set(sys.modules)
assert not others, others
"""


def test_the_list_of_verbs_imports_no_verb():
    """`mdi --help` takes little longer than importing typer: nothing else is imported."""
    done = subprocess.run(
        [sys.executable, "-c", LIST_VERBS], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_run_sums_itself_up(run):
    text = str(run.summary(SLO(ttft_ms=1e9)))
    assert "20 requests: 20 completed" in text
    assert "goodput" in text
    assert "times as fast" in text
    assert text.endswith("uncalibrated: peak rates times assumed efficiencies")
    assert "itl_ms" not in str(run.summary(itl=False))
    assert run.summary().to_dict()["basis"].startswith("simulated")
    assert len(run.steps) == len(run.steps_table)
    assert len(run.items) > len(run.requests) == 20


def test_a_run_is_saved_and_drawn(run, tmp_path):
    paths = run.save(tmp_path / "r")
    assert [path.name for path in paths] == [
        "r.items.parquet", "r.steps.parquet", "r.requests.parquet",
    ]  # fmt: skip
    assert_frame_equal(load_run(tmp_path / "r").steps, run.steps)
    run.save(tmp_path / "r", items=False)
    assert load_run(tmp_path / "r").items_table is None
    assert all(path.exists() for path in run.plot(tmp_path / "plots"))


def test_simulate_takes_a_path_and_a_trace(run, mdi, small):
    mdi("generate-workload", "azure-conv", "w.parquet", "-n", 20, "--seed", 3)
    mdi("simulate", *small, "--out", "r")
    from_path = simulate("w.parquet", shape=TINY, seed=3)
    assert_frame_equal(from_path.steps, run.steps)
    assert_frame_equal(load_run("r").steps, run.steps)


def test_a_terminal_sees_progress(tmp_path):
    """The bar goes to standard error when that is a terminal, and to nothing else."""
    leader, follower = os.openpty()
    command = "from minideepinfer.cli import main; main()"
    options = ["simulate", "--model", "tiny", "--workload", "azure-conv", "-n", "50", "--json"]
    done = subprocess.run(
        [sys.executable, "-c", command, *options],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=follower, check=True,
        env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(follower)
    assert b"50" in os.read(leader, 65_536)
    os.close(leader)
    assert done.stdout.startswith(b"{\n")
