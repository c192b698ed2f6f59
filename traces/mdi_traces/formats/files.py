"""What bytes a path holds: plain or packed files, folders of them, pipes.

A file is known by its first bytes, never by its name. gzip and zstd are unpacked while they are
read, a zip gives its members, a folder its files in natural order (part-2 before part-10); hidden
ones and those that begin with `_` are no data. Other packings are named, not read.

Read next: `containers.py`, which makes rows of the bytes.
"""

import codecs
import io
import os
import re
import select
import stat
import zipfile
import zlib
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa

from mdi_shared.errors import TraceError

PathLike = str | os.PathLike[str]

PIPE_WAIT_S = 300  # the longest that a pipe may bring nothing
_MOST_PACKINGS = 3  # a file packed into itself would unpack for ever
_PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_ZIP = (b"PK\x03\x04", b"PK\x05\x06")  # the second is an empty one
_TAR_AT, _TAR = 257, b"ustar"
_NOT_READ = {
    b"BZh": "is packed with bzip2", b"\xfd7zXZ": "is packed with xz",
    b"\x04\x22\x4d\x18": "is packed with lz4", b"7z\xbc\xaf": "is a 7z archive",
    b"ARROW1": "is an Arrow (Feather) file", b"ORC": "is an ORC file",
    b"Obj\x01": "is an Avro file",
    b"SQLite format 3": "is an SQLite database", b"\x89HDF": "is an HDF5 file",
}  # fmt: skip
_DAMAGED = (OSError, EOFError, NotImplementedError, pa.ArrowException, zipfile.BadZipFile,
            zlib.error)  # fmt: skip
_MARKS = (  # UTF-32 first: its mark begins like that of UTF-16
    (codecs.BOM_UTF32_LE, "utf-32"), (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"),
)  # fmt: skip


def contents(
    paths: PathLike | Iterable[PathLike],
) -> Generator[tuple[str, BinaryIO], None, None]:
    """Yield name and unpacked bytes of each file that one path, or several, stand for.

    Raises `TraceError` for what is not there, cannot be read, or is of a kind that is not read.
    """
    for path in [paths] if isinstance(paths, str | os.PathLike) else paths:
        with reading(str(path)):
            files = _files(Path(path))
        for file in files:
            with reading(str(file)), _open(file) as raw:
                yield from _unpacked(str(file), raw)


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn what goes wrong while reading `name` into a one-line `TraceError`."""
    try:
        yield
    except _DAMAGED as error:
        reason = (getattr(error, "strerror", None) or str(error)).splitlines() or ["damaged"]
        raise TraceError(name, f"cannot be read: {reason[0]}") from error


def as_utf8(name: str, stream: BinaryIO) -> BinaryIO:
    """Return text as UTF-8 without a byte order mark, which says what it was encoded in."""
    head = stream.peek(4)[:4]  # type: ignore[attr-defined]
    if head.startswith(codecs.BOM_UTF8):
        stream.read(len(codecs.BOM_UTF8))
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            try:
                return io.BytesIO(stream.read().decode(encoding).encode())
            except UnicodeError as error:
                raise TraceError(name, f"is not {encoding.upper()} text") from error
    return stream


def _files(path: Path) -> list[Path]:
    if "\0" in str(path) or not path.exists():
        raise TraceError(repr(str(path))[1:-1], "not found")
    if not path.is_dir():
        return [path]
    found = [file for file in path.rglob("*") if file.is_file() and not _hidden(file, path)]
    if not found:
        raise TraceError(str(path), "is a folder without files")
    return sorted(found, key=lambda file: _natural(str(file)))


def _hidden(file: Path, folder: Path) -> bool:
    return any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which numbers in names count as numbers."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


def _open(path: Path) -> io.BufferedReader:
    mode = path.stat().st_mode
    if stat.S_ISREG(mode):
        if path.stat().st_size == 0:
            raise TraceError(str(path), "is empty")
        return path.open("rb")
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if stat.S_ISCHR(mode) and not os.isatty(handle):
            raise TraceError(str(path), "is a device, not a file")
        return _buffered(io.BytesIO(_read_pipe(str(path), handle)))
    finally:
        os.close(handle)


def _read_pipe(name: str, handle: int) -> bytes:
    chunks: list[bytes] = []
    while select.select([handle], [], [], PIPE_WAIT_S)[0]:
        chunk = os.read(handle, 1 << 20)
        if not chunk:
            if not chunks:
                raise TraceError(name, "is empty")
            return b"".join(chunks)
        chunks.append(chunk)
    raise TraceError(name, f"nothing came through the pipe for {PIPE_WAIT_S} s")


def _unpacked(name: str, raw: BinaryIO, depth: int = 0) -> Iterator[tuple[str, BinaryIO]]:
    head = raw.peek(512)  # type: ignore[attr-defined]
    codec = next((codec for magic, codec in _PACKED.items() if head.startswith(magic)), None)
    if depth == _MOST_PACKINGS:
        raise TraceError(name, f"is packed more than {_MOST_PACKINGS} times")
    if codec is not None:
        with pa.CompressedInputStream(raw, codec) as stream:
            yield from _unpacked(name, _buffered(stream), depth + 1)
    elif head.startswith(_ZIP):
        yield from _members(name, raw, depth)
    else:
        kind = next((kind for magic, kind in _NOT_READ.items() if head.startswith(magic)), None)
        kind = "is a tar archive" if head.startswith(_TAR, _TAR_AT) else kind
        if kind is not None:
            raise TraceError(name, f"{kind}, which is not read: make it CSV, JSON lines or Parquet")
        yield name, raw


def _members(name: str, raw: BinaryIO, depth: int) -> Iterator[tuple[str, BinaryIO]]:
    with zipfile.ZipFile(raw) as archive:
        if not archive.namelist():
            raise TraceError(name, "is an archive without files")
        for member in sorted(archive.infolist(), key=lambda each: _natural(each.filename)):
            if member.is_dir() or member.filename.startswith("__MACOSX"):
                continue
            if member.flag_bits & 1:
                raise TraceError(f"{name}/{member.filename}", "is locked with a password")
            with archive.open(member) as file:
                yield from _unpacked(f"{name}/{member.filename}", _buffered(file), depth + 1)


def _buffered(raw: Any) -> io.BufferedReader:  # noqa: ANN401 - a stream, by what it can do
    return io.BufferedReader(raw)
