"""Objects that users name, with parameters: `srpt:sigma=0.5`, `power_of_two:seed=3`.

A class that can be named is a dataclass whose parameters are declared by `number` (or are texts).
"""

from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass
from math import inf, isnan
from typing import Any, TypeVar

from mdi_shared.errors import ConfigError

Named = TypeVar("Named")


def number(
    default: float, *, least: float = 0, above: float | None = None, most: float = inf
) -> Any:  # noqa: ANN401 - a dataclass field of the parameter's own type
    """Declare a parameter: a number from `least` (or greater than `above`) to `most`."""
    return field(default=default, metadata={"least": least, "above": above, "most": most})


def check_parameters(kind: str, owner: object) -> None:
    """Raise `ConfigError` for a parameter of `owner`, a policy or whatever `kind` says, beyond its
    bounds."""
    if is_dataclass(owner):
        for each in fields(owner):
            _check(f"{kind} parameter {each.name}", getattr(owner, each.name), each.metadata)


def _check(name: str, value: object, bounds: Any) -> None:  # noqa: ANN401 - a field's metadata
    if not bounds or not isinstance(value, int | float):
        return
    least, above, most = bounds["least"], bounds["above"], bounds["most"]
    low = f"above {above:g}" if above is not None else f"at least {least:g}"
    high = "" if most == inf else f" and at most {most:g}"
    holds = not isnan(value) and (value >= least if above is None else value > above)
    if not holds or value > most:
        raise ConfigError(name, value, f"must be {low}{high}")


def named(
    option: str, spec: str, text: str, known: Mapping[str, type[Named]], what: str
) -> Named:  # fmt: skip
    """Make what NAME or NAME:PARAMETER=VALUE,… says, of the classes in `known`.

    `text` is that part of `spec`, the value of `option`. Raises `ConfigError` that quotes it.
    """
    name, _, rest = text.partition(":")
    if name not in known:
        raise ConfigError(option, spec, f"{name!r} is not {what}; known: {', '.join(known)}")
    kind = known[name]
    types = {each.name: each.type for each in fields(kind) if each.init}  # type: ignore[arg-type]
    found: dict[str, object] = {}
    for pair in rest.split(",") if rest else ():
        parameter, equals, value = pair.partition("=")
        if parameter not in types or not equals:
            takes = ", ".join(types) if types else "none"
            raise ConfigError(option, spec, f"{parameter!r} is not a parameter of {name}; it "
                              f"takes: {takes}")  # fmt: skip
        if parameter in found:
            raise ConfigError(option, spec, f"gives {parameter} of {name} twice")
        if types[parameter] is str:
            found[parameter] = value
        else:
            whole = types[parameter] is int
            found[parameter] = read_number(option, spec, parameter, value, int if whole else float)
    return kind(**found)


def read_number(
    option: str, spec: str, name: str, text: str, kind: type[int] | type[float]
) -> float:  # fmt: skip
    """Return the number that `text`, the value of `name` in `spec`, stands for."""
    try:
        value = kind(text)
    except ValueError:
        value = float("nan")
    if value != value:
        what = "a whole number" if kind is int else "a number"
        raise ConfigError(option, spec, f"{name} = {text!r} must be {what}")
    return value
