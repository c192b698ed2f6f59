"""Options as fields of a dataclass: the command line over a TOML file over defaults.

A field's annotation declares its flag (`options.py` has those that several verbs share); the same
field serves the command line and a table of a TOML file, so neither can have an option the other
lacks. A flag that was not given is absent, not its default: only so can the command line override
the file, and the file the defaults. Paths count from the current folder.

Read next: `options.py`, the declarations; `values.py`, which reads the TOML file.
"""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from inspect import Parameter, Signature
from typing import Annotated, Any, TypeVar, get_type_hints

from mdi_shared.config import SchedulerConfig
from mdi_shared.run_description import RunDescription
from minideepinfer.commands.options import ConfigFile, Pairs
from minideepinfer.commands.values import parse_pairs, read_config, read_description

Options = TypeVar("Options")
NOT_IN_FILE = ("config", "set", "json")
FROM_FILE = ("scheduler", "base")
SOURCES = {"trace": ("workload", "requests", "rate"),
           "workload": ("trace", "format", "limit", "sort")}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """`--config` and `--set`; the file comes to scheduler options, or to a run to start from."""

    config: ConfigFile = None
    set: Pairs = None
    scheduler: dict[str, Any] = field(default_factory=dict)
    base: RunDescription | None = None


def takes_options(
    kind: type[Options],
) -> Callable[[Callable[[Options], None]], Callable[..., None]]:
    """Give a command a parameter for each field of `kind`; it is called with one of them.

    A kind of `FileOptions` is read from the table named like the command, and `[scheduler]`.
    """

    def decorate(command: Callable[[Options], None]) -> Callable[..., None]:
        def wrapped(**values: Any) -> None:  # noqa: ANN401 - one type per option
            given = {name: v for name, v in values.items() if v is not None and v != []}
            if issubclass(kind, FileOptions):
                given = _with_file(kind, command.__name__, given)
            command(kind(**given))

        wrapped.__signature__ = Signature(_parameters(kind))  # type: ignore[attr-defined]
        wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
        return wrapped

    return decorate


def _parameters(kind: Any) -> list[Parameter]:  # noqa: ANN401 - a dataclass
    types = get_type_hints(kind, include_extras=True)
    found = []
    for each in fields(kind):
        if each.name in FROM_FILE:
            continue
        is_needed = each.default is MISSING
        declared = types[each.name]
        if not is_needed:  # absent is None, whatever the default
            declared = Annotated[declared.__origin__ | None, *declared.__metadata__]
        found.append(Parameter(
            each.name, Parameter.KEYWORD_ONLY, annotation=declared,
            default=Parameter.empty if is_needed else None,
        ))  # fmt: skip
    return found


def _with_file(kind: Any, verb: str, given: dict[str, Any]) -> dict[str, Any]:  # noqa: ANN401
    """Put the options given over those of the file, and `--set` over its scheduler's.

    A source of requests that is given replaces the file's with all that belongs to it; `--set`
    takes the verb's own memory options, too.
    """
    if "config" not in given:
        return given
    base = read_description(given["config"])
    if base is not None:
        return {**given, "base": base}
    own = {name: hint for name, hint in get_type_hints(kind).items()
           if name not in (*NOT_IN_FILE, *FROM_FILE)}  # fmt: skip
    from_file = read_config(
        given["config"], {"scheduler": get_type_hints(SchedulerConfig), verb: own}
    )
    options = from_file.get(verb, {})
    for source, others in SOURCES.items():
        if source in given:
            options = {name: v for name, v in options.items() if name not in others}
    return {**options, **given, "scheduler": from_file.get("scheduler", {})}


def scheduler_options(options: FileOptions, also: dict[str, Any]) -> dict[str, Any]:
    """Return the options of `[scheduler]` and `--set`, which may name those of `also`, too.

    `also` maps names to types; raises `ConfigError` for others.
    """
    types = {**also, **get_type_hints(SchedulerConfig)}
    return {**options.scheduler, **parse_pairs(options.set or (), types)}
