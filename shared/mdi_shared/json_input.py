"""Reads parts of a JSON file into plain values, each refusal one line that names the part.

Read next: `cost/linear.py` and `cost/predicted.py`, whose files these are.
"""

import json
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from mdi_shared.errors import ConfigError, is_number, require


def require_number(name: str, value: object) -> None:
    """Raise `ConfigError` unless `value` is a finite number of at least 0."""
    require(is_number(value) and 0 <= value < inf, name, value,
            "must be a finite number of at least 0")  # fmt: skip


def require_mapping(where: str, data: object) -> dict[str, Any]:
    """Return `data` as a dict when it is an object; raise `ConfigError` naming `where` if not."""
    if not isinstance(data, Mapping):
        raise ConfigError(where, data, "must be an object")
    return dict(data)


def require_object(
    where: str, data: object, required: tuple[str, ...], optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Return `data` when it is an object with just these keys; raise `ConfigError` if not."""
    checked = require_mapping(where, data)
    for name in required:
        if name not in checked:
            raise ConfigError(f"{where}.{name}", None, "is missing")
    for name, value in checked.items():
        if name not in required and name not in optional:
            raise ConfigError(f"{where}.{name}", value,
                              f"unknown; known: {', '.join((*required, *optional))}")  # fmt: skip
    return checked


def read_numbers(name: str, value: object) -> tuple[float, ...]:
    """Return a list as a tuple; its entries are not looked at."""
    if not isinstance(value, list | tuple):
        raise ConfigError(name, value, "must be a list of numbers")
    return tuple(value)


def read_int_pair(where: str, value: object) -> tuple[int, int]:
    """Return two ints; raise `ConfigError` for anything else."""
    if not isinstance(value, list | tuple) or [type(v) for v in value] != [int, int]:
        raise ConfigError(where, value, "must be two ints")
    return value[0], value[1]


def read_int_pairs(where: str, values: object) -> tuple[tuple[int, int], ...]:
    """Return pairs of ints; raise `ConfigError` for anything else."""
    if not isinstance(values, list | tuple):
        raise ConfigError(where, values, "must be a list of pairs of ints")
    return tuple(read_int_pair(where, value) for value in values)


def read_json(path: Path, what: str = "cost model") -> object:
    """Return what a JSON file holds; raise `ConfigError` naming `what` when it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(what, str(path), f"cannot be read: {error.strerror}") from error
    except ValueError as error:  # neither text nor JSON
        raise ConfigError(what, str(path), f"is not JSON: {error}") from error
