"""Opening a checkpoint: a local directory or a hub id, one safetensors file or many.

Nothing is loaded until it is asked for: `get` returns a memory-mapped tensor, `verify` compares
headers with what the config asks for and reads no data. Placing tensors on devices is the model's
business (`model/weights.py`). Read next: `weights/names.py`, `safetensors_header.py`.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from safetensors import SafetensorError, safe_open

from mdi_exec.model.config import ModelConfig
from mdi_exec.model.config_reader import read_config_file
from mdi_exec.weights.names import TensorSpec, expected_tensors
from mdi_exec.weights.safetensors_header import CheckpointError, read_header
from mdi_shared.errors import ConfigError
from mdi_shared.json_input import read_json

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
TOKENIZER_FILE = "tokenizer.json"
PREFIX = "model."  # some exports put it before every name
_SAMPLE_BYTES = 1 << 20  # of the beginning, which holds the header, and of the end
HUB_FILES = ["*.json", "*.safetensors"]


def open_checkpoint(path_or_hub_id: str | Path, revision: str | None = None) -> "Checkpoint":
    """Open a directory, or download (or find in the local cache) a hub repository.

    `revision` is a branch, tag or commit of a hub repository. Raises `ConfigError` when there is
    no such directory or repository, or its config.json is not usable; `CheckpointError` when it
    has no weight files.
    """
    path = Path(path_or_hub_id)
    if path.is_dir():
        if revision is not None:
            raise ConfigError("revision", revision, f"{path} is a directory and has no revisions")
        return Checkpoint(path, path.resolve().name)
    if path.exists():
        raise ConfigError("checkpoint", str(path), "must be a directory or a hub id, not a file")
    hub_id = str(path_or_hub_id)
    return Checkpoint(_download(hub_id, revision), hub_id)


def _download(hub_id: str, revision: str | None) -> Path:
    try:
        return Path(snapshot_download(hub_id, revision=revision, allow_patterns=HUB_FILES))
    except HFValidationError as error:
        raise ConfigError("checkpoint", hub_id, "is no directory here and no hub id "
                          "(namespace/name)") from error  # fmt: skip
    except (HfHubHTTPError, OSError) as error:
        at = f" at revision {revision}" if revision else ""
        reason = str(error).split("\n")[0].strip() or type(error).__name__
        raise ConfigError("checkpoint", hub_id, f"is no directory here, and the hub did not give "
                          f"it{at}: {reason}") from error  # fmt: skip


class Checkpoint:
    """Tensors by their released names, wherever they lie under `directory`.

    `config` is its parsed config.json, `name` the directory's name or the hub id. Handles stay open
    as long as the checkpoint lives; tensors from `get` share the file's pages, and writing to one
    does not reach the file.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory
        self.name = name
        self.config = read_config_file(directory / CONFIG_FILE)
        self._stored = self._locate()
        self._handles: dict[str, Any] = {}

    @property
    def tokenizer_file(self) -> Path:
        """Where the tokenizer lies; it need not exist."""
        return self.directory / TOKENIZER_FILE

    @property
    def names(self) -> list[str]:
        """Tensor names without prefix, sorted."""
        return sorted(self._stored)

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors the config asks for."""
        return sum(spec.nbytes for spec in expected_tensors(self.config).values())

    def get(self, name: str) -> torch.Tensor:
        """Return a tensor, memory-mapped. Raises `CheckpointError` when it cannot be read."""
        file, stored_name = self._find(name)
        try:
            tensor: torch.Tensor = self._handle(file).get_tensor(stored_name)
        except SafetensorError as error:
            raise CheckpointError(file, f"tensor {stored_name!r}: {error}") from error
        return tensor

    def get_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Return rows start .. stop-1 of a tensor's first dimension, memory-mapped too.

        Raises `CheckpointError` when it cannot be read, `ConfigError` for rows it does not have.
        """
        file, stored_name = self._find(name)
        try:
            found = self._handle(file).get_slice(stored_name)
            num_rows = found.get_shape()[0]
            if not 0 <= start <= stop <= num_rows:
                raise ConfigError(f"rows of {name}", (start, stop), f"must lie in 0 .. {num_rows}")
            rows: torch.Tensor = found[start:stop]
        except SafetensorError as error:
            raise CheckpointError(file, f"tensor {stored_name!r}: {error}") from error
        return rows

    def verify(self) -> None:
        """Compare every file's header with the config and the index; reads no tensor data.

        Raises one `CheckpointError` that counts the problems and names the first few: a file that
        is absent, damaged or cut short; a tensor that is missing, unknown, misplaced, misshapen
        or of the wrong dtype.
        """
        for count, what in _many_tensors(self.config):  # before they are all named
            if count > len(self._stored):
                raise CheckpointError(str(self.directory), f"has {len(self._stored):,} tensors, "
                                      f"too few for {what}")  # fmt: skip
        problems = list(_compare(self.directory, self._stored, expected_tensors(self.config)))
        if problems:
            raise CheckpointError(str(self.directory), problems)

    def _locate(self) -> dict[str, tuple[str, str]]:
        """Return name -> (file, name in the file)."""
        index = self.directory / INDEX_FILE
        if index.exists():
            return _without_prefix(INDEX_FILE, _read_index(index))
        files = sorted(path.name for path in self.directory.glob("*.safetensors"))
        if len(files) != 1:
            raise CheckpointError(str(self.directory), f"has {len(files)} .safetensors files and "
                                  f"no {INDEX_FILE}; one file needs no index")  # fmt: skip
        header = read_header(self.directory / files[0])
        return _without_prefix(files[0], dict.fromkeys(header, files[0]))

    def _find(self, name: str) -> tuple[str, str]:
        if name not in self._stored:
            raise CheckpointError(str(self.directory), f"has no tensor {name!r}")
        return self._stored[name]

    def _handle(self, file: str) -> Any:  # noqa: ANN401 (the library's handle has no type)
        if file not in self._handles:
            try:
                self._handles[file] = safe_open(self.directory / file, framework="pt")
            except (OSError, RuntimeError, SafetensorError) as error:  # torch maps the file
                read_header(self.directory / file)  # raises what is wrong, in our words
                raise CheckpointError(file, f"cannot be mapped: {error}") from error
        return self._handles[file]


def _many_tensors(c: ModelConfig) -> Iterator[tuple[int, str]]:
    """Yield how many tensors the parts need at least that have many, and what says so."""
    for experts, layers in (("n_routed_experts", "num_hidden_layers"),
                            ("dspark_n_routed_experts", "num_nextn_predict_layers")):  # fmt: skip
        width, depth = getattr(c, experts), getattr(c, layers)
        # Three weights with scales for each expert.
        yield 6 * width * depth, f"{experts} = {width:,} in {layers} = {depth:,}"
    blocks = 0 if c.vision is None else c.vision.num_hidden_layers
    yield blocks, f"vision_config.num_hidden_layers = {blocks:,}"


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = read_json(path, "index")
    except ConfigError as error:
        raise CheckpointError(path.name, error.allowed) from error
    if not isinstance(index, dict) or "weight_map" not in index:
        raise CheckpointError(path.name, "is not a JSON object with a weight_map")
    weight_map = index["weight_map"]
    if not isinstance(weight_map, dict) or not all(isinstance(f, str) for f in weight_map.values()):
        raise CheckpointError(path.name, "its weight_map must map tensor names to file names")
    outside = [file for file in weight_map.values() if Path(file).name != file or "\0" in file]
    if outside:
        raise CheckpointError(path.name, f"names a file outside the directory: {outside[0]!r}")
    return weight_map


def _without_prefix(source: str, files: dict[str, str]) -> dict[str, tuple[str, str]]:
    stored: dict[str, tuple[str, str]] = {}
    for stored_name, file in files.items():
        name = stored_name.removeprefix(PREFIX)
        if name in stored:
            raise CheckpointError(source, f"tensor {name!r}: is there with and without the "
                                  f"{PREFIX!r} prefix")  # fmt: skip
        stored[name] = (file, stored_name)
    return stored


def _compare(
    directory: Path, stored: dict[str, tuple[str, str]], expected: dict[str, TensorSpec]
) -> Iterator[str]:
    """Yield one line per problem, file by file, then what no file was said to hold."""
    by_file: dict[str, dict[str, str]] = {}
    for name, (file, stored_name) in stored.items():
        by_file.setdefault(file, {})[stored_name] = name
    for file in sorted(by_file):
        try:
            header = read_header(directory / file)
        except CheckpointError as error:
            yield str(error)
            continue
        listed = by_file[file]
        for stored_name in sorted(listed.keys() - header.keys()):
            yield f"{file}: tensor {stored_name!r}: the index places it here, but it is not"
        for stored_name in sorted(header.keys() - listed.keys()):
            yield f"{file}: tensor {stored_name!r}: is here, but the index does not say so"
        for stored_name in sorted(header.keys() & listed.keys()):
            problem = _mismatch(header[stored_name], expected.get(listed[stored_name]))
            if problem:
                yield f"{file}: tensor {stored_name!r}: {problem}"
    for name in expected:
        if name not in stored:
            yield f"tensor {name!r}: is in no file, but the config asks for it"


def _mismatch(found: TensorSpec, wanted: TensorSpec | None) -> str | None:
    if wanted is None:
        return "the config knows no such tensor"
    if found.dtype != wanted.dtype:
        return f"is {found.dtype}, must be {wanted.dtype}"
    if found.shape != wanted.shape:
        return f"has shape {list(found.shape)}, must be {list(wanted.shape)}"
    return None


def checkpoint_fingerprint(directory: Path) -> str:
    """Hash names and sizes of a checkpoint's files, and the first and last MiB of each.

    Two checkpoints of one architecture differ in their weights almost everywhere, so the samples
    tell them apart. Returns 16 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for file in sorted(p for p in directory.iterdir() if p.suffix in (".json", ".safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as data:
            digest.update(data.read(_SAMPLE_BYTES))
            data.seek(max(size - _SAMPLE_BYTES, 0))
            digest.update(data.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]
