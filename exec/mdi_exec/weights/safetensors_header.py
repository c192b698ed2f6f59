"""The header of a safetensors file, read and written without touching the tensor data.

A file is an 8-byte little-endian header length, a JSON header (name -> dtype, shape, byte range
behind the header), then the data without gaps. Reading data is the `safetensors` library's job;
this module exists because the library cannot say *what* is wrong with a damaged file, and cannot
write a file larger than memory. Read next: `checkpoint.py`, `make_checkpoint.py`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mdi_exec.weights.names import DTYPE_BYTES, TensorSpec
from mdi_shared.errors import MiniDeepInferError
from mdi_shared.json_input import parse_json

LENGTH_BYTES = 8
METADATA_KEY = "__metadata__"
MOST_HEADER_BYTES = 100_000_000  # the format's own limit
MOST_SHOWN, MOST_SHOWN_CHARS = 4, 300  # problems quoted in one message, and of each


class CheckpointError(MiniDeepInferError):
    """A checkpoint cannot be used; the message names file and, where there is one, tensor.

    `problems` has everything that was found; the message quotes the first few.
    """

    def __init__(self, where: str, problems: str | list[str]) -> None:
        self.where = where
        self.problems = [problems] if isinstance(problems, str) else problems
        shown = "; ".join(_shortened(problem) for problem in self.problems[:MOST_SHOWN])
        rest = len(self.problems) - MOST_SHOWN
        counted = f"{len(self.problems)} problems: " if len(self.problems) > 1 else ""
        super().__init__(f"{where}: {counted}{shown}{f'; and {rest} more' if rest > 0 else ''}")


def _shortened(text: str) -> str:
    return text if len(text) <= MOST_SHOWN_CHARS else f"{text[:MOST_SHOWN_CHARS]}…"


def read_header(path: Path) -> dict[str, TensorSpec]:
    """Return the tensors of a file, checked against the file's length.

    Raises `CheckpointError` for a file that is absent, damaged or cut short.
    """
    try:
        if path.exists() and not path.is_file():
            raise CheckpointError(path.name, "must be a regular file")
        with path.open("rb") as file:
            size = path.stat().st_size
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if size < LENGTH_BYTES or length > min(size - LENGTH_BYTES, MOST_HEADER_BYTES):
                raise CheckpointError(path.name, f"is no safetensors file or is cut short: "
                                      f"{size:,} bytes, header of {length:,}")  # fmt: skip
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(path.name, f"cannot be read: {error.strerror}") from error
    try:
        header = parse_json(text)
    except ValueError as error:
        raise CheckpointError(path.name, f"its header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CheckpointError(path.name, "its header is not a JSON object")
    header.pop(METADATA_KEY, None)
    spans: list[tuple[int, int, str]] = []
    tensors = {name: _read_entry(path.name, name, value, spans) for name, value in header.items()}
    _check_spans(path.name, spans, size - LENGTH_BYTES - length)
    return tensors


def _read_entry(
    file: str, name: str, value: Mapping[str, Any], spans: list[tuple[int, int, str]]
) -> TensorSpec:
    try:
        dtype, shape = str(value["dtype"]), tuple(int(side) for side in value["shape"])
        begin, end = (int(offset) for offset in value["data_offsets"])
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            file, f"tensor {name!r}: its header entry lacks a usable dtype, shape or data_offsets"
        ) from error
    spec = TensorSpec(dtype, shape)
    if dtype in DTYPE_BYTES and end - begin != spec.nbytes:
        raise CheckpointError(file, f"tensor {name!r}: {end - begin:,} bytes, but {dtype} of shape "
                              f"{list(shape)} takes {spec.nbytes:,}")  # fmt: skip
    spans.append((begin, end, name))
    return spec


def _check_spans(file: str, spans: list[tuple[int, int, str]], data_bytes: int) -> None:
    """Tensors must cover the data without gap or overlap."""
    reached = 0
    for begin, end, name in sorted(spans):
        if begin != reached:
            raise CheckpointError(file, f"tensor {name!r}: starts at byte {begin:,}, but the one "
                                  f"before it ends at {reached:,}")  # fmt: skip
        reached = end
        if reached > data_bytes:
            raise CheckpointError(file, f"tensor {name!r}: is cut short: it ends at byte "
                                  f"{end:,} of {data_bytes:,} present")  # fmt: skip
    if reached != data_bytes:
        raise CheckpointError(file, f"has {data_bytes - reached:,} bytes behind its last tensor")


def header_bytes(tensors: Mapping[str, TensorSpec]) -> bytes:
    """Return length and header of a file that holds `tensors` in this order."""
    entries: dict[str, object] = {METADATA_KEY: {"format": "pt"}}
    begin = 0
    for name, spec in tensors.items():
        end = begin + spec.nbytes
        entries[name] = {"dtype": spec.dtype, "shape": spec.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % LENGTH_BYTES)  # data starts aligned
    return len(text).to_bytes(LENGTH_BYTES, "little") + text
