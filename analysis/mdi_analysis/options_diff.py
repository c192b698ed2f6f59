"""In which options two runs differ, as their metadata tells.

Step times and model dimensions are named, not listed: a fitted model has hundreds of numbers.

Read next: `compare.py`, which puts it first.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from mdi_analysis.frames import RunLike

# Of use to programs, or told by a name.
LEFT_OUT = ("shape", "left_free", "assumed", "chunk_cost", "provenance")
SERVED = "served "
ABSENT = "-"


def option_differences(a: RunLike, b: RunLike) -> list[tuple[str, str, str]]:
    """Return name and both values of every option in which two runs differ.

    An option that one of them does not record is left out: it is of another version, or of an
    engine that the other has not. What is served is recorded where it was given.
    """
    first, second = (dict(_facts(run)) for run in (a, b))
    found = []
    for name in dict.fromkeys([*first, *second]):
        own, other = first.get(name, ABSENT), second.get(name, ABSENT)
        is_known = name.startswith(SERVED) or (name in first and name in second)
        if is_known and own != other:
            found.append((name, own, other))
    return found


def _facts(run: RunLike) -> Iterator[tuple[str, str]]:
    meta, config = run.metadata, run.metadata.config or {}
    for name in ("model", "hardware", "source", "seed"):
        yield name, _text(getattr(meta, name))
    cost = config.get("cost")
    if isinstance(cost, Mapping):
        yield "cost", _text({k: v for k, v in cost.items() if k in ("kind", "hardware", "ep")})
    for group, value in config.items():
        if group in LEFT_OUT or group in ("cost", "seed"):
            continue
        if isinstance(value, Mapping):
            yield from ((f"{group} {name}", _text(inner)) for name, inner in value.items())
        else:
            yield group, _text(value)


def _text(value: Any) -> str:  # noqa: ANN401 - any JSON value
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_text(inner)}" for name, inner in value.items())
    if value is None:
        return ABSENT
    return str(value).lower() if isinstance(value, bool) else str(value)
