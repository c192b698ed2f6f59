"""`docs/rules.md`: numbered without gaps, code and tests that exist, citations that lead there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RULES = (ROOT / "docs" / "rules.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`([\w/.]+\.py)::([\w.]+)`")
SOURCES = [
    path
    for folder in ("shared", "exec", "sim", "traces", "analysis", "minideepinfer", "tests",
                   "benchmarks", "examples", "docs")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".py", ".md", ".h", ".cpp"}
]  # fmt: skip


def rules():
    """Return each rule's number and text."""
    parts = re.split(r"^\*\*R(\d+)\. ", RULES, flags=re.MULTILINE)
    return [(int(number), text) for number, text in zip(parts[1::2], parts[2::2], strict=True)]


def defined(path):
    """Return what a file defines, methods as `Class.method`."""
    names = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{member.name}" for member in node.body
                      if isinstance(member, ast.FunctionDef)}  # fmt: skip
    return names


def test_rules_are_numbered_without_gaps():
    assert [number for number, _ in rules()] == list(range(1, len(rules()) + 1))


@pytest.mark.parametrize(("number", "text"), rules(), ids=lambda part: str(part)[:3])
def test_a_rule_names_code_and_a_test_that_exist(number, text):
    code, _, test = text.partition("Test: ")
    assert NAMED.search(code), f"R{number} names no code"
    assert NAMED.search(test), f"R{number} names no test"
    for path, name in NAMED.findall(text):
        assert name in defined(path), f"R{number}: {path} does not define {name}"
    assert all(path.startswith("tests/") for path, _ in NAMED.findall(test))


def test_citations_lead_to_a_rule():
    last = len(rules())
    cited = {
        (str(path.relative_to(ROOT)), int(number))
        for path in SOURCES
        for number in re.findall(r"\bR(\d+)\b", path.read_text(encoding="utf-8"))
    }
    assert cited, "nothing cites a rule"
    assert {(path, number) for path, number in cited if not 1 <= number <= last} == set()


def test_nothing_points_to_a_text_that_is_not_here():
    gone = re.compile(
        "engine-" + "semantics|architecture" + " spec|v41-" + "architecture|" + "\xa7"
    )
    pointing = [
        str(path.relative_to(ROOT))
        for path in SOURCES
        if gone.search(path.read_text(encoding="utf-8"))
    ]
    assert pointing == []
