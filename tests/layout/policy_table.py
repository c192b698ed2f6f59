"""The table of docs/policies.md, made of the policies' own docstrings and parameters.

    python -m tests.layout.policy_table

writes it anew.
"""

import inspect
from dataclasses import fields
from pathlib import Path

from mdi_shared.policies import POLICIES
from mdi_shared.policies.registry import AXES, names_of

DOC = Path(__file__).parents[2] / "docs" / "policies.md"
HEAD = "| name | answers | rule | parameters | source |\n|---|---|---|---|---|\n"


def table() -> str:
    """Return the table."""
    return HEAD + "".join(row(name) for name in POLICIES)


def row(name: str) -> str:
    """Return a policy's line of the table."""
    kind = POLICIES[name]
    text = " ".join((inspect.getdoc(kind) or "").split())
    rule, _, source = text.partition(" Source: ")
    axes = ", ".join(axis for axis in AXES if name in names_of(axis))
    given = ", ".join(f"`{each.name}` {each.default}" for each in fields(kind) if each.init)
    rule = rule.replace("`Predicting`", "below").replace("|", "\\|")
    return f"| `{name}` | {axes} | {rule} | {given.replace(' ,', ',')} | {source.rstrip('.')} |\n"


def put(text: str) -> str:
    """Return the document with its table replaced."""
    start = text.index(HEAD.splitlines()[0])
    end = start
    for line in text[start:].splitlines(keepends=True):
        if not line.startswith("|"):
            break
        end += len(line)
    return text[:start] + table() + text[end:]


if __name__ == "__main__":
    DOC.write_text(put(DOC.read_text(encoding="utf-8")), encoding="utf-8")
