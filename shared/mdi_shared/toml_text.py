"""Plain data as TOML text; the standard library only reads it.

TOML has no null, so None is written as "none". Only what JSON holds can be written.

Read next: `run_description.py`, the user of this.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

NONE = "none"
_BARE = re.compile(r"[A-Za-z0-9_-]+")


def to_toml(data: Mapping[str, Any]) -> str:
    """Return a document: values first, then a table for each object."""
    plain = {name: value for name, value in data.items() if not isinstance(value, Mapping)}
    lines = [f"{_key(name)} = {_value(value)}" for name, value in plain.items()]
    for name, table in data.items():
        if name not in plain:
            lines += ["", f"[{_key(name)}]"]
            lines += [f"{_key(inner)} = {_value(value)}" for inner, value in table.items()]
    return "\n".join(lines) + "\n"


def without_none(value: Any) -> Any:  # noqa: ANN401 - any TOML value
    """Return what was read from TOML with None where "none" stands."""
    if isinstance(value, dict):
        return {name: without_none(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [without_none(inner) for inner in value]
    return None if value == NONE else value


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name)


def _value(value: object) -> str:
    if value is None:
        return f'"{NONE}"'
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(name)} = {_value(v)}' for name, v in value.items())} }}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    # JSON's texts, booleans and numbers are TOML's, but for an exponent without a point.
    return json.dumps(value, allow_nan=False)
