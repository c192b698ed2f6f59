"""Published results come out in the same shape, each on one small workload."""

import subprocess
import sys
from pathlib import Path

import pytest

from experiments.shapes import SHAPES

ROOT = Path(__file__).parents[2]
SLOW = {"hindsight"}  # minutes of an integer programme; test_bounds.py has it smaller


@pytest.mark.parametrize("name", sorted(SHAPES.keys() - SLOW))
def test_the_shape_is_the_published_one(name):
    found = SHAPES[name].run(1)
    assert found.holds, found.figures


def test_the_table_has_every_experiment():
    page = (ROOT / "docs/policies.md").read_text(encoding="utf-8")
    assert [name for name in SHAPES if f"| `{name}` |" not in page] == []


def test_an_unknown_name_is_refused():
    done = subprocess.run([sys.executable, "-m", "experiments", "hindsigt"], cwd=ROOT,
                          capture_output=True, text=True, check=False, timeout=60)  # fmt: skip
    assert done.returncode == 2
    assert "'hindsigt' is none of hindsight, slope," in done.stderr
