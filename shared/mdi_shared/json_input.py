"""Reads files that describe something, JSON or TOML, and their parts into plain values.

Each refusal is one line that names the part. What is read is small, finite and plain.

Read next: `cost/linear.py` and `cost/predicted.py`, whose files these are.
"""

import json
import tomllib
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from stat import S_ISREG
from typing import Any

from mdi_shared.errors import ConfigError, require_int

MOST_BYTES = 64 << 20
MOST_DEPTH = 64
MOST_DIGITS = 20  # of 64 bits, with a sign
_Place = tuple[str | int, ...]


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


def read_int_pair(where: str, value: object, most: tuple[int, int]) -> tuple[int, int]:
    """Return two ints from 0 to `most`; raise `ConfigError` for anything else."""
    if not isinstance(value, list | tuple) or [type(v) for v in value] != [int, int]:
        raise ConfigError(where, value, "must be two ints")
    for each, limit in zip(value, most, strict=True):
        require_int(where, each, 0, limit)
    return value[0], value[1]


def read_int_pairs(
    where: str, values: object, most: tuple[int, int]
) -> tuple[tuple[int, int], ...]:
    """Return pairs of ints; raise `ConfigError` for anything else."""
    if not isinstance(values, list | tuple):
        raise ConfigError(where, values, "must be a list of pairs of ints")
    return tuple(read_int_pair(where, value, most) for value in values)


def require_texts(where: str, values: object) -> tuple[str, ...]:
    """Return texts; raise `ConfigError` for anything else."""
    if not isinstance(values, list | tuple) or not all(isinstance(each, str) for each in values):
        raise ConfigError(where, values, "must be a list of texts")
    return tuple(values)


def read_json(path: Path, what: str = "cost model") -> object:
    """Return what a JSON file holds; raise `ConfigError` naming `what` when it cannot be read."""
    text = read_text(path, what)
    try:
        return parse_json(text)
    except ValueError as error:
        raise ConfigError(what, str(path), f"is not JSON: {error}") from error


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """Return what a TOML file holds; raise `ConfigError` naming `what` when it cannot be read."""
    text = read_text(path, what)
    try:
        return parse_toml(text)
    except ValueError as error:
        raise ConfigError(what, str(path), f"is not TOML: {error}") from error


def read_text(path: Path, what: str) -> str:
    """Return the text of a file that describes something; raise `ConfigError` naming `what`.

    Folders, pipes and devices are refused before they are opened, and so are files larger than
    MOST_BYTES.
    """
    try:
        if not S_ISREG(path.stat().st_mode):
            raise ConfigError(what, str(path), "must be a regular file")
        with path.open("rb") as file:
            raw = file.read(MOST_BYTES + 1)
        if len(raw) > MOST_BYTES:
            allowed = f"is too large, must be at most {MOST_BYTES:,} bytes"
            raise ConfigError(what, str(path), allowed)
        return raw.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(what, str(path), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(what, str(path), f"is not UTF-8 text: {error}") from error
    except ValueError as error:  # a name with a NUL
        raise ConfigError(what, str(path), f"cannot be read: {error}") from error


def parse_json(text: str | bytes) -> object:
    """Return what JSON text holds. Raises `ValueError`, also for values as in `require_plain`."""
    try:
        found = json.loads(text, parse_int=_int, parse_constant=_no_number,
                           object_pairs_hook=_unique)  # fmt: skip
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    require_plain(found)
    return found


def parse_toml(text: str) -> dict[str, Any]:
    """Return what TOML text holds. Raises `ValueError`, also for values as in `require_plain`."""
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    require_plain(found)
    return found


def require_plain(document: object) -> None:
    """Raise `ValueError` for what no description needs and what breaks its readers later.

    That is nesting beyond MOST_DEPTH, numbers that are not finite or need more than 64 bits, half
    characters, and dates.
    """
    rest: list[tuple[object, _Place]] = [(document, ())]
    while rest:
        value, place = rest.pop()
        if isinstance(value, dict | list):
            if len(place) == MOST_DEPTH:
                raise ValueError(f"it is nested too deeply, more than {MOST_DEPTH} levels")
            inner = value.items() if isinstance(value, dict) else enumerate(value)
            rest.extend((each, (*place, key)) for key, each in inner)
            rest.extend((key, place) for key in value if isinstance(value, dict))
        elif isinstance(value, str):
            _require_characters(value, place)
        elif isinstance(value, float):
            if not isfinite(value):
                raise ValueError(f"{_at(place)} holds {value}, must be a finite number")
        elif isinstance(value, int):
            if not -(2**63) <= value < 2**64:
                raise ValueError(f"{_at(place)} holds a number that does not fit into 64 bits")
        elif value is not None:
            raise ValueError(f"{_at(place)} holds {value}: dates and times have no meaning here")


def _at(place: _Place) -> str:
    return ascii(".".join(map(str, place)))[1:-1] or "it"


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key comes twice in one object")
    return found


def _int(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"it holds a number of {len(digits)} digits, must fit into 64 bits")
    return int(digits)


def _require_characters(value: str, place: _Place) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{_at(place)} holds half a character, in {value[:60]!a}") from None


def _no_number(name: str) -> float:
    raise ValueError(f"it holds {name}, must be a finite number")
