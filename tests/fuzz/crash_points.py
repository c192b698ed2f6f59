"""A disk that fails, or a program that is killed, at a chosen change of the file system.

Every change a program asks for in Python is counted: opening for writing, writing, syncing,
renaming, removing, making folders. At the chosen one the disk is full (`FULL`: that change fails,
the next ones work), or nothing changes any more (`KILLED`), as if the program had ended there.
"""

import builtins
import errno
import io
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

FULL, KILLED = "full", "killed"
CHANGES = ("rename", "replace", "unlink", "remove", "mkdir", "rmdir", "fsync")
WRITING = os.O_CREAT | os.O_WRONLY | os.O_RDWR


class Disk:
    """Counts changes; `fails_at` is the number, from 1, of the one that fails, 0 for none."""

    def __init__(self, fails_at: int = 0, how: str = FULL) -> None:
        self.fails_at = fails_at
        self.how = how
        self.changes = 0

    def change(self) -> None:
        self.changes += 1
        is_over = self.how == KILLED and 0 < self.fails_at < self.changes
        if self.changes == self.fails_at or is_over:
            raise OSError(errno.ENOSPC, "No space left on device")

    def counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def changing(*args: Any, **options: Any) -> Any:
            self.change()
            return call(*args, **options)

        return changing

    def low_open(self, path: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & WRITING:
            self.change()
        return _os_open(path, flags, *args, **options)

    def open(self, file: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if not set(mode) & set("wax+"):
            return _open(file, mode, *args, **options)
        self.change()
        opened = _open(file, mode, *args, **options)
        opened.write = self.counted(opened.write)
        return opened


_open, _os_open = io.open, os.open


@contextmanager
def disk(fails_at: int = 0, how: str = FULL) -> Iterator[Disk]:
    """Put such a disk under this process while the block runs."""
    made = Disk(fails_at, how)
    with (
        mock.patch.multiple(
            os, open=made.low_open, **{name: made.counted(getattr(os, name)) for name in CHANGES}
        ),
        mock.patch.object(io, "open", made.open),
        mock.patch.object(builtins, "open", made.open),
    ):
        yield made
