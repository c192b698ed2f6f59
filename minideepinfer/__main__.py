"""Where `mdi` and `python -m minideepinfer` begin: Ctrl-C is quiet from the first line on.

Importing what the command needs takes longer than a quick Ctrl-C; until it is there, and once
everything is printed, an interrupt ends the process at once, with nothing to clean up or to say.
"""

# What `signal` makes enumerations of, which takes ten times as long.
import _signal as signal  # type: ignore[import-not-found]
import os

INTERRUPTED = 130


def main() -> None:
    """Entry point of the `mdi` script."""
    # Something else than Python's own: whoever started it, such as nohup, wants no interrupts.
    heeds = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heeds:
        signal.signal(signal.SIGINT, _leave)
    from minideepinfer.cli import run_and_flush

    if heeds:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    code = run_and_flush()
    if heeds:
        signal.signal(signal.SIGINT, _leave)
    raise SystemExit(code)


def _leave(*_: object) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    main()
