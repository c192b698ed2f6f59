"""Examples, and what README.md and docs/ show, do run.

Every script of examples/ runs in a fresh interpreter, the cells of a notebook in order. Of each
document the fenced `python` blocks run in order, in one namespace per document, and so do the lines
of its `bash` blocks. A block after a line `<!-- not run: reason -->` is skipped; commands anywhere
else than in a `bash` block fail.
They run in a folder that holds what the documents speak of: a saved run `run`, a trace
`conversation.jsonl`, checkpoints `tiny` and `first-run/tiny`, this repository's `traces`, a fitted
`model.json`, recordings `recorded/NAME`, and runs `one_rank/prefill`, `one_rank/decode` and
`group/run` of one and of two ranks; `run` is a name in Python blocks, too.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import rich

import minideepinfer as mdi
from tests.sim.recorded import CONFIG, TRUTH, Noisy, noisy_run, requests

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    path for path in sorted(ROOT.glob("**/*.md"))
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
]  # fmt: skip
COMMAND = re.compile(r"(\$ )?(\.venv/bin/)?(mdi|python3?|pip|pytest|torchrun) [^|]*")
NOT_RUN = re.compile(r"<!-- not run: (.+) -->")
FENCE = re.compile(r"^(\s*)```(\w*)\s*$")

SAYS = {
    "replay_a_trace": r"laws broken: 0\n",
    "compare_token_budgets": r"plans: identical for \d+ steps, then step .*itl_ms p99: \d",
    "sweep_attempt_interval": r"interval .*\n +1 +\d+ .*\n +10 .*\n +70 .*\n +300 ",
    "tune_for_an_slo": r"default .*goodput \d.*\nbest .*goodput \d.*\nthe model's error: not known",
    "closed_loop_sessions": r"closed loop: 400 of 400 completed .*\nopen loop  : 400 of 400 ",
    "compare_policies": r"fcfs +[\d,]+ .*shortest_prompt +[\d,]+ .*mcsf +[\d,]+ .* 0 +0\n",
    "ranks_and_placement": r"FirstRank   : TTFT .* busiest rank 4\.00 times the mean",
    "step_timings": r"prefill +decode .*roofline_share .*step \d+, .* rows, .*first use of",
    "read_step_tables": r"decode +\d+ .*the slowest prefill steps\n.*n_cached",
}


class Block(NamedTuple):
    """A fenced block: where it begins, its language and text, and why it is not run."""

    document: Path
    line: int
    language: str
    text: str
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def blocks(document: Path) -> Iterator[Block]:
    lines = iter(enumerate(document.read_text(encoding="utf-8").splitlines(), start=1))
    before = ""
    for number, line in lines:
        fence = FENCE.match(line)
        if fence is None:
            before = line if line.strip() else before
            continue
        indent, language = fence.groups()
        text = []
        for _, inside in lines:
            if inside.strip() == "```":
                break
            text.append(inside.removeprefix(indent))
        skip = NOT_RUN.fullmatch(before.strip())
        yield Block(document, number, language, "\n".join(text), skip and skip[1])
        before = ""


def commands(block: Block) -> list[str]:
    """Return the block's command lines, continued lines joined."""
    whole = block.text.replace("\\\n", " ").splitlines()
    bare = [line.strip().removeprefix("$ ").removeprefix(".venv/bin/") for line in whole]
    return [line for line in bare if line and not line.startswith("#")]


ALL = [block for document in DOCUMENTS for block in blocks(document)]
SHELL = [
    pytest.param(block, id=str(block), marks=pytest.mark.skipif(bool(block.not_run), reason=str(
        block.not_run)))
    for block in ALL if block.language == "bash"
]  # fmt: skip
PYTHON = [
    document
    for document in DOCUMENTS
    if any(block.language == "python" for block in blocks(document))
]  # fmt: skip


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """What the documents speak of, made once."""
    where = tmp_path_factory.mktemp("prepared")
    work = mdi.generate_workload("mooncake-conversation", num_requests=20, seed=1)
    mdi.simulate(work).save(where / "run")
    work.save(where / "conversation.jsonl")
    mdi.make_checkpoint(where / "tiny")
    save_runs_of_ranks(where)
    return where


def save_runs_of_ranks(where):
    """Runs to fit a group to: two of one rank, one of two."""
    for seed, name in enumerate(("one_rank/prefill", "one_rank/decode")):
        (where / name).parent.mkdir(exist_ok=True)
        noisy_run(trace=requests(seed=seed), seed=seed).save(where / name)
    both = mdi.simulate(requests(seed=2), scheduler=CONFIG, cost=Noisy(TRUTH), ranks=2)
    (where / "group").mkdir()
    both.save(where / "group/run")


@pytest.fixture
def folder(prepared, tmp_path, monkeypatch):
    """A folder that holds what the documents speak of, and is current."""
    for path in (*prepared.glob("run.*"), prepared / "conversation.jsonl"):
        shutil.copy(path, tmp_path)
    (tmp_path / "first-run").mkdir()
    traces = ROOT / "traces"
    for name, target in (("traces", traces), ("recorded", traces / "recorded/h200-flash-slice"),
                         ("one_rank", prepared / "one_rank"), ("group", prepared / "group"),
                         ("tiny", prepared / "tiny"), ("first-run/tiny", prepared / "tiny"),
                         ("model.json", traces / "models/h200-flash-slice.json")):  # fmt: skip
        (tmp_path / name).symlink_to(target)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_both_readmes_give_the_same_commands():
    """The English and the Chinese one; only the drawing differs, whose words are translated."""
    english, chinese = (
        [(block.language, block.text, block.not_run) for block in blocks(ROOT / name)]
        for name in ("README.md", "README.zh.md")
    )
    assert english[0][0] == ""
    assert english[1:] == chinese[1:]


def test_the_readme_fits_a_few_screens():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_examples_run(path, tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", path],
        capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(SAYS[path.stem], done.stdout, re.DOTALL), done.stdout
    assert 20 <= len(path.read_text(encoding="utf-8").splitlines()) <= 45


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebooks_run(path, tmp_path, monkeypatch):
    """Their code cells in order, as a kernel would, and saved without what came out."""
    monkeypatch.chdir(tmp_path)
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]
             if cell["cell_type"] == "code"]  # fmt: skip
    namespace = {}
    for number, cell in enumerate(cells, 1):
        assert cell["outputs"] == []
        exec(compile("".join(cell["source"]), f"{path.name} cell {number}", "exec"), namespace)


@pytest.mark.parametrize("document", PYTHON, ids=lambda p: p.name)
def test_python_blocks_run(document, folder):
    namespace = {"run": mdi.load_run("run"), "rich": rich}
    runnable = [b for b in blocks(document) if b.language == "python" and b.not_run is None]
    assert runnable, f"{document.name} has Python blocks, but none is run"
    for block in runnable:
        code = compile("\n" * block.line + block.text, str(document), "exec")
        exec(code, namespace)


@pytest.mark.parametrize("block", SHELL)
def test_commands_run(block, folder):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for line in commands(block):
        done = subprocess.run(
            line, shell=True, capture_output=True, text=True, check=False, cwd=folder,
            env={**os.environ, "PATH": path}, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}\n{done.stderr}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_commands_stand_where_they_are_run(document):
    """No command in a block of another language, or indented as one, where nothing would run it."""
    hidden = [f"{block}: {line.strip()}" for block in blocks(document)
              if block.language != "bash" for line in block.text.splitlines()
              if COMMAND.fullmatch(line.strip())]  # fmt: skip
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.S | re.M)
    hidden += [line for line in text.splitlines()
               if line.startswith("    ") and COMMAND.fullmatch(line.strip())]  # fmt: skip
    assert hidden == []
    reasons = [block.not_run for block in blocks(document) if block.not_run is not None]
    assert all(len(reason.split()) >= 2 for reason in reasons), "say why it is not run"


def test_blocks_and_commands_are_found(tmp_path):
    """The reader of documents itself, on a document made for it."""
    document = tmp_path / "d.md"
    document.write_text(
        "text\n```bash\npython3 -m venv .venv\n.venv/bin/mdi show run \\\n  --head 1  # why\n```\n"
        "<!-- not run: needs a GPU -->\n```python\nx = 1\n```\n```python\nx = 2\n```\n"
    )
    found = list(blocks(document))
    assert [(b.line, b.language, b.not_run) for b in found] == [
        (2, "bash", None), (8, "python", "needs a GPU"), (11, "python", None),
    ]  # fmt: skip
    assert commands(found[0]) == ["python3 -m venv .venv", "mdi show run    --head 1  # why"]
