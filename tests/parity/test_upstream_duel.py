"""The duel with the production engine's scheduler: it says what it lacks, and a few rounds of it.

The rounds need the engine built, which downloads it: `python -m benchmarks.upstream_duel` does.
"""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the engine's scheduler is built with torch's headers")

from benchmarks import upstream_duel
from benchmarks.upstream import engine
from tests.shared.workloads import small, wide

BUILT = Path(__file__).parents[2] / "runs" / "duel"


@pytest.mark.parametrize(
    ("has_sources", "said", "told"),
    [(False, "ERROR: no network", "deepinfer 0.1.0 cannot be downloaded: ERROR: no network"),
     (True, "error: no header", "its scheduler does not compile: error: no header")],
    ids=["download", "compiler"],
)  # fmt: skip
def test_what_is_missing_is_said_in_one_line(
    has_sources, said, told, tmp_path, monkeypatch, capsys
):
    if has_sources:
        header = tmp_path / "pip-x" / "deepinfer-x" / "csrc" / "engine" / "scheduler.hpp"
        header.parent.mkdir(parents=True)
        header.touch()
    monkeypatch.setattr(engine, "_run", lambda command, **options: said)
    monkeypatch.setattr(sys, "argv", ["upstream_duel", "--build", str(tmp_path)])
    assert upstream_duel.main() == 2
    assert capsys.readouterr().err == f"no duel: {told}\n"


@pytest.mark.parametrize(("make", "count"), [(small, 60), (wide, 4)], ids=["small", "wide"])
def test_some_rounds(make, count):
    if not list(BUILT.glob(f"{engine.MODULE}*")):
        pytest.skip("the engine is not built here: run python -m benchmarks.upstream_duel")
    module = engine.build(engine.fetch(BUILT), BUILT)
    groups = {size: engine.make_groups(size) for size in range(1, 5)}
    differing, equal, _ = upstream_duel.duel(module, make, range(count), groups)
    assert differing == 0
    assert equal > 10 * count
