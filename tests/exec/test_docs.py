"""The executor's pages name things that exist, and list every option with its true default."""

import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from mdi_exec.engine import options
from mdi_exec.engine.options import EngineOptions
from mdi_shared.config import SchedulerConfig

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "exec" / "mdi_exec"
CORE = ROOT / "shared" / "mdi_shared"
ROOMS = [PACKAGE / name for name in ("engine", "weights", "ranks", "model")]
FOLDERS = (ROOT, PACKAGE, CORE, CORE / "cost", *ROOMS)  # what a path may be relative to
UPSTREAM = ("deepinfer/", "csrc/", "…/", "environ.py")  # another project's paths

# Where the executor's default is not the field's own.
EXECUTOR_DEFAULTS = {
    "max_model_len": f"{options.DEFAULT_MAX_MODEL_LEN:,}, or the model's positions if fewer",
    "num_blocks": "from the memory options",
    "eos_token_id": "the checkpoint's",
}


def page(name: str) -> str:
    """A page without its code blocks."""
    text = (ROOT / name).read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


def code_spans(name: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", page(name))


def defined_names() -> set[str]:
    """Functions and classes of the package, and their members as Class.member."""
    names: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                names.add(node.name)
            if isinstance(node, ast.ClassDef):
                names |= {f"{node.name}.{member}" for member in members(node)}
    return names


def members(node: ast.ClassDef) -> set[str]:
    """Methods, declared fields, and what methods assign to self."""
    found = set()
    for part in ast.walk(node):
        if isinstance(part, ast.FunctionDef):
            found.add(part.name)
        elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
            found.add(part.target.id)
        elif (
            isinstance(part, ast.Attribute)
            and isinstance(part.ctx, ast.Store)
            and isinstance(part.value, ast.Name)
            and part.value.id == "self"
        ):
            found.add(part.attr)
    return found


def is_path(span: str) -> bool:
    return bool(re.fullmatch(r"[\w./…]+(\.py|\.md|/)", span)) and not span.startswith(UPSTREAM)


@pytest.mark.parametrize(
    "name", ["docs/model.md", "docs/executor.md", "docs/deepinfer-map.md", "exec/README.md"]
)
def test_files_named_in_the_pages_exist(name):
    paths = [span for span in code_spans(name) if is_path(span)]
    assert len(paths) >= 5, "the page names files"
    missing = [p for p in paths if not any((folder / p).exists() for folder in FOLDERS)]
    assert not missing


def test_every_name_in_the_model_page_exists():
    known = defined_names()
    names = [span for span in code_spans("docs/model.md") if "/" not in span]
    assert len(names) > 50, "the page walks through the code by name"
    assert not [name for name in names if name not in known]


def test_every_part_of_the_model_is_walked_through():
    """Each module that holds one of the model's parts has a name on the page."""
    spans = {span.partition(".")[0] for span in code_spans("docs/model.md")}
    for module in ("attention", "compressor", "engram", "hyper_connections", "indexer", "moe",
                   "norm", "rope", "step_context", "transformer", "window"):  # fmt: skip
        tree = ast.parse((PACKAGE / "model" / f"{module}.py").read_text(encoding="utf-8"))
        classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
        assert classes & spans, module


def option_rows() -> dict[str, str]:
    """Option -> default, as the two tables of the page say."""
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| .+ \|$", page("docs/executor.md"), re.MULTILINE)
    assert len(rows) == len(dict(rows)), "an option is listed twice"
    return dict(rows)


def test_the_option_tables_are_complete_and_their_defaults_true():
    expected = {
        field.name: EXECUTOR_DEFAULTS.get(field.name, f"`{field.default!r}`".replace("'", '"'))
        for kind in (EngineOptions, SchedulerConfig)
        for field in fields(kind)
    }
    assert option_rows() == expected
