"""Named ranges of a forward pass, for whoever looks at its time: layers, and the parts of one.

A range is opened around a function that `in_range` marks. Nobody looks as a rule; then a marked
call costs a test of one variable. Ranges nest: what a part does outside the parts within it is its
own. On a GPU a range holds what was *launched* in it, which is the same in the order of a stream.
Read next: `mdi_exec/engine/profiling.py`.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

Opener = Callable[[str], AbstractContextManager[object]]
Function = TypeVar("Function", bound=Callable[..., Any])

_opener: Opener | None = None


def in_range(name: str | Callable[[Any], str]) -> Callable[[Function], Function]:
    """Mark a method whose calls are a range; a function makes the name from its object."""

    def mark(function: Function) -> Function:
        @functools.wraps(function)
        def run(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - whatever the function has
            if _opener is None:
                return function(*args, **options)
            with _opener(name if isinstance(name, str) else name(args[0])):
                return function(*args, **options)

        return run  # type: ignore[return-value]

    return mark


@contextmanager
def watching(opener: Opener) -> Iterator[None]:
    """Open every range with `opener` meanwhile. Not while a step is captured: replays have none."""
    global _opener
    assert _opener is None, "one looks at a time"
    _opener = opener
    try:
        yield
    finally:
        _opener = None
