"""The `mdi` command: finds the verb, and turns every mistake into one line and an exit code.

0: fine. 1: the data says no (a broken law, a broken trace, a deadlock). 2: asked wrongly (an
unknown option, a value out of range, no such file). 130: interrupted. A fault of our own is a
traceback.

Read next: `commands/__init__.py` (the verbs).
"""

import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from mdi_shared.errors import DeadlockError, MiniDeepInferError, TraceError
from minideepinfer.commands import VERBS
from minideepinfer.commands.screen import tell

DATA_SAYS_NO, ASKED_WRONGLY, INTERRUPTED = 1, 2, 130

# Newer typer carries its own copy of click and exports only this subclass of its UsageError.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    help="mini-DeepInfer: replay, check and compare traces of a DeepSeek-V4.1 engine.",
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"mini-deepinfer {version('mini-deepinfer')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print version."),
    ] = False,
) -> None:
    """Options before the verb."""


for _name, _verb in VERBS.items():
    app.command(_name)(_verb)


def run_command(arguments: Sequence[str]) -> int:
    """Run `mdi` with these arguments and return its exit code; without any, show the help."""
    command = typer.main.get_command(app)
    try:
        result = command(args=list(arguments) or ["--help"], prog_name="mdi", standalone_mode=False)
    except MiniDeepInferError as error:
        tell(f"error: {error}")
        return DATA_SAYS_NO if isinstance(error, TraceError | DeadlockError) else ASKED_WRONGLY
    except UsageError as error:
        tell(f"error: {_usage_message(error)}")
        return ASKED_WRONGLY
    except (typer.Abort, KeyboardInterrupt):
        result = INTERRUPTED
    if result == INTERRUPTED:  # newer typer returns this code, older raises Abort
        tell("interrupted")
    if not arguments:
        return ASKED_WRONGLY
    return result if isinstance(result, int) else 0


def _usage_message(error: Exception) -> str:
    message = getattr(error, "format_message", error.__str__)()
    context = getattr(error, "ctx", None)
    return f"{message} (see: {context.command_path if context else 'mdi'} --help)"


def main() -> None:
    """Entry point of the `mdi` script."""
    sys.exit(run_command(sys.argv[1:]))
