"""The `mdi` command: finds the verb, and turns every mistake into one line and an exit code.

0: fine. 1: the data says no (a broken law, a broken trace, a deadlock). 2: asked wrongly (an
unknown option, a value out of range, no such file), or the system refused. 130: interrupted. 141:
nobody reads the output any more. A fault of our own is a traceback.

Read next: `commands/__init__.py` (the verbs).
"""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

from mdi_shared.errors import DeadlockError, MiniDeepInferError, TraceError
from minideepinfer.commands import VERBS, load_verb
from minideepinfer.commands.last_words import tell_once
from minideepinfer.commands.screen import tell

DATA_SAYS_NO, ASKED_WRONGLY, INTERRUPTED, UNREAD = 1, 2, 130, 141

# Newer typer carries its own copy of click and exports only this subclass of its UsageError.
UsageError: type[Exception] = typer.BadParameter.__bases__[0]

# Spellings that people know from earlier versions or other verbs, and the one there is.
SPELT = {
    "--plot": "--plots FOLDER", "--png": "--plots FOLDER", "--slo-ttft-ms": "--slo ttft=MS",
    "--slo-tpot-ms": "--slo tpot=MS", "--until-s": "--until S", "--num-requests": "--requests N",
    "--output": "--out PREFIX", "--data-parallel-size": "--ranks N",
}  # fmt: skip


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"mini-deepinfer {version('mini-deepinfer')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print version."),
    ] = False,
) -> None:
    """Options before the verb."""


def make_app(arguments: Sequence[str]) -> typer.Typer:
    """Return the command with the verb that `arguments` name; the others only have their help.

    Without a verb the list of them is shown, in plain text: drawing it takes longer than the rest.
    """
    wanted = next((each for each in arguments if each in VERBS), None)
    app = typer.Typer(
        help="mini-DeepInfer: replay, check and compare traces of a DeepSeek-V4.1 engine.",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None if wanted is None else "rich",
    )
    app.callback()(_root)
    for name, help in VERBS.items():
        if name == wanted:
            app.command(name)(load_verb(name))
        else:
            app.command(name, help=help, short_help=help)(_nothing)
    return app


def _nothing() -> None:
    """Stand for a verb that was not asked for."""


def run_command(arguments: Sequence[str]) -> int:
    """Run `mdi` with these arguments and return its exit code; without any, show the help."""
    if sys.stdout is None:
        tell("error: standard output is closed: send it to /dev/null if it is not wanted")
        return ASKED_WRONGLY
    command: Callable[..., object] = typer.main.get_command(make_app(arguments))
    try:
        result = command(args=list(arguments) or ["--help"], prog_name="mdi", standalone_mode=False)
        sys.stdout.flush()
    except MiniDeepInferError as error:
        tell_once(f"error: {error}", error)
        return DATA_SAYS_NO if isinstance(error, TraceError | DeadlockError) else ASKED_WRONGLY
    except UsageError as error:
        tell_once(f"error: {_usage_message(error)}", error)
        return ASKED_WRONGLY
    except (SystemExit, BrokenPipeError):  # the former is what click and rich make of the latter
        return UNREAD
    except OSError as error:
        line = f"error: {error.filename or 'standard output'}: {error.strerror or error}"
        tell_once(line, error)
        return ASKED_WRONGLY
    except (typer.Abort, KeyboardInterrupt):
        result = INTERRUPTED
    # Newer typer returns this code, older raises Abort. All ranks of a group hear the same Ctrl-C.
    if result == INTERRUPTED and os.environ.get("RANK", "0") == "0":
        tell("interrupted")
    if not arguments:
        return ASKED_WRONGLY
    return result if isinstance(result, int) else 0


def _usage_message(error: Exception) -> str:
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "mdi"
    spelt = SPELT.get(getattr(error, "option_name", ""))
    if spelt is not None:
        return f"No such option: {error.option_name}; it is {spelt} (see: {path} --help)"  # type: ignore[attr-defined]
    message = getattr(error, "format_message", error.__str__)()
    return f"{message} (see: {path} --help)"


def run_and_flush() -> int:
    """Run `mdi` with this process's arguments, to the last byte of output; return its exit code."""
    try:
        code = run_command(sys.argv[1:])
    except KeyboardInterrupt:  # while the verb was looked up
        return INTERRUPTED
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:  # told already; Python would try once more at exit, and complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    return code


def main() -> None:
    """Begin as `__main__.py` does: the script of installations that were made before it did."""
    from minideepinfer.__main__ import main

    main()
