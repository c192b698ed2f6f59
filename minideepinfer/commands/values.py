"""Option values from text and TOML, by their declared types. No default replaces a bad value.

Read next: `declare.py`, which puts the values together.
"""

import difflib
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, get_args

from mdi_shared.errors import ConfigError, require_int
from mdi_shared.json_input import read_toml
from mdi_shared.run_description import RunDescription
from mdi_shared.toml_text import NONE, without_none
from minideepinfer.commands.files import is_run, read_run

Types = Mapping[str, Any]  # option name -> its declared type, as `typing.get_type_hints` gives it
BOOLS = {"true": True, "false": False}


def read_config(path: Path, tables: Mapping[str, Types]) -> dict[str, dict[str, Any]]:
    """Read a TOML file of `tables`; each value must have its option's type.

    TOML has no null, so "none" stands for None. Raises `ConfigError` naming file, table and key.
    """
    document = read_toml(path, "config")
    known = ", ".join(f"[{name}]" for name in tables)
    found = {}
    for name, table in document.items():
        if name not in tables or not isinstance(table, dict):
            raise ConfigError(f"{path}: {name}", table, f"unknown table; known: {known}")
        found[name] = {
            key: _typed(f"{path}: {name}.{key}", value, _declared(tables[name], key, value, path))
            for key, value in table.items()
        }
    return found


def read_description(path: Path) -> RunDescription | None:
    """Return the description in a saved run's metadata, or in a TOML file that holds one.

    None for another TOML file: it has options. Raises `ConfigError`.
    """
    if is_run(path):
        found = read_run(path).metadata
        return RunDescription.from_metadata(found.config, found.seed)
    document = read_toml(path, "config")
    if not {"served", "shape"} & set(document):
        return None
    try:
        return RunDescription.from_json(without_none(document))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error.field}", error.value, error.allowed) from error


def parse_pairs(pairs: Sequence[str], types: Types) -> dict[str, Any]:
    """Read `key=value` texts. Raises `ConfigError` naming the option."""
    found: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError("set", pair, "must be key=value")
        name, text = name.strip(), text.strip()
        if name in found:
            raise ConfigError("set", pair, f"{name} is set twice")
        found[name] = _parsed(name, text, _declared(types, name, text))
    return found


def _declared(types: Types, name: str, value: object, path: Path | None = None) -> tuple[type, ...]:
    if name not in types:
        near = difflib.get_close_matches(name, types, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        where = name if path is None else f"{path}: {name}"
        raise ConfigError(where, value, f"unknown option; {hint}known: {', '.join(types)}")
    declared: Any = types[name]
    return (
        (declared,)
        if getattr(declared, "__origin__", None) is list
        else get_args(declared) or (declared,)
    )


def _wanted(kinds: tuple[type, ...]) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text",
             Path: "a path", list[Path]: "a path, or several", list[str]: "a text, or several",
             NoneType: NONE}  # fmt: skip
    return f"must be {' or '.join(names[kind] for kind in kinds)}"


def _typed(where: str, value: object, kinds: tuple[type, ...]) -> Any:  # noqa: ANN401
    """Return a TOML value as its option wants it."""
    if value == NONE and NoneType in kinds:
        return None
    if type(value) is float and float in kinds and math.isfinite(value):
        return value
    if type(value) is int and float in kinds and int not in kinds:
        return float(value)
    if type(value) is str and Path in kinds:
        return Path(value)
    if list[Path] in kinds and isinstance(value, str | list):
        texts = [value] if isinstance(value, str) else value
        if texts and all(isinstance(text, str) for text in texts):
            return [Path(text) for text in texts]
    if list[str] in kinds and isinstance(value, str | int | float | list):
        values = value if isinstance(value, list) else [value]
        if values and all(type(each) in (str, int, float) for each in values):
            return [str(each) for each in values]
    if type(value) is not float and type(value) in kinds:
        return value
    raise ConfigError(where, value, _wanted(kinds))


def _parsed(name: str, text: str, kinds: tuple[type, ...]) -> Any:  # noqa: ANN401
    """Return the value that a text stands for."""
    if text == NONE and NoneType in kinds:
        return None
    if bool in kinds and text in BOOLS:
        return BOOLS[text]
    if str in kinds:
        return text
    for kind in (int, float):
        if kind in kinds:
            try:
                number = kind(text)
            except ValueError:
                continue
            if math.isfinite(number):
                return number
    raise ConfigError(name, text, _wanted(kinds))


def num_jobs(given: int | None) -> int:
    """Return how many processes to use: as many as said, else one per core."""
    if given is None:
        return os.cpu_count() or 1
    require_int("jobs", given, 1)
    return given
