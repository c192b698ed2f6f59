"""Options declared once, as fields of a dataclass: flag, type, default, help.

The same field serves the command line and a table of a TOML file, so neither can have an option
the other lacks. A flag that was not given is absent, not its default: only so can the command
line override the file, and the file the defaults.

Read next: `simulate_options.py`, the user of this; `values.py`, which reads the TOML file.
"""

from collections.abc import Callable
from dataclasses import field, fields
from inspect import Parameter, Signature
from typing import Annotated, Any, get_type_hints

import typer

Given = dict[str, Any]


def option(
    default: Any,  # noqa: ANN401 - the field's own type
    *flags: str,
    help: str,
    metavar: str | None = None,
    panel: str | None = None,
    in_file: bool = True,
) -> Any:  # noqa: ANN401 - becomes the field's type
    """Return a dataclass field with its command-line option; `in_file` allows it in TOML, too."""
    if default is not None and not isinstance(default, bool | tuple):
        help = f"{help.rstrip('.')} (default: {default})."
    declared = typer.Option(*flags, help=help, metavar=metavar, rich_help_panel=panel)
    return field(default=default, metadata={"declared": declared, "in_file": in_file})


def argument(*, help: str) -> Any:  # noqa: ANN401 - becomes the field's type
    """Return a dataclass field for a positional argument that may be left out."""
    declared = typer.Argument(help=help, show_default=False)
    return field(default=None, metadata={"declared": declared, "in_file": True})


def takes_options(options: type) -> Callable[[Callable[[Given], None]], Callable[..., None]]:
    """Give a command a parameter for each field of `options`; it is called with those given."""

    def decorate(command: Callable[[Given], None]) -> Callable[..., None]:
        def wrapped(**values: Any) -> None:  # noqa: ANN401 - one type per option
            command({name: v for name, v in values.items() if v is not None and v != []})

        types = get_type_hints(options)
        parameters = [
            Parameter(
                each.name,
                Parameter.KEYWORD_ONLY,
                default=None,
                annotation=Annotated[types[each.name] | None, each.metadata["declared"]],
            )
            for each in fields(options)
        ]
        wrapped.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        wrapped.__name__, wrapped.__doc__ = command.__name__, command.__doc__
        return wrapped

    return decorate
