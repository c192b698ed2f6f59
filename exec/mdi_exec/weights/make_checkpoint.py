"""Makes checkpoints of random weights in the released format, of any size, without holding one.

What is true to the release: config form, tensor names, dtypes and shapes, scales, sharding and
index. What is not: the weights, the tokenizer, and Engram tables in a slice, which are smaller;
the checkpoint's README and config say so. Read next: `presets.py`, `weights/random.py`.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from mdi_exec.model.config_reader import read_config
from mdi_exec.model.engram import _next_prime
from mdi_exec.weights.checkpoint import CONFIG_FILE, INDEX_FILE, TOKENIZER_FILE, open_checkpoint
from mdi_exec.weights.names import DTYPE_BYTES, TensorSpec, expected_tensors
from mdi_exec.weights.presets import Config, preset_config
from mdi_exec.weights.random import tensor_data
from mdi_exec.weights.safetensors_header import header_bytes
from mdi_exec.weights.tokenizer import Tokenizer, compressed_vocab_map
from mdi_exec.weights.tokenizer_builder import build_tokenizer
from mdi_shared.errors import ConfigError

SHARD_BYTES = 5_000_000_000
SPARE_BYTES = 64 * 2**20  # index, tokenizer, and room to breathe
GIB = 2**30

Progress = Callable[[int, int], None]


def make_checkpoint(
    directory: str | Path,
    preset: str = "tiny",
    *,
    layers: int | None = None,
    seed: int = 0,
    num_experts: int | None = None,
    with_draft: bool | None = None,
    with_vision: bool | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Path:
    """Write a checkpoint into a new directory and return it; all of it appears, or nothing does.

    Presets: "tiny" (9 MB), "small" (a few hundred MB), "flash-slice" (the released dimensions with
    `layers` of 6 .. 40, 7 GB each; fewer with `num_experts`). Draft head and image tower come with
    the first two unless said otherwise. The same arguments give the same bytes. `progress` gets
    bytes written and bytes in all. Raises `ConfigError` for a directory that holds something, too
    little space, or a wrong option.
    """
    target = Path(directory).resolve()
    _require_vacant(target)
    if shard_bytes < 1:
        raise ConfigError("shard_bytes", shard_bytes, "must be at least 1")
    is_complete = preset != "flash-slice"
    config = preset_config(
        preset, layers=layers, num_experts=num_experts,
        with_draft=is_complete if with_draft is None else with_draft,
        with_vision=is_complete if with_vision is None else with_vision,
    )  # fmt: skip
    tokenizer = Tokenizer(build_tokenizer(config["text_config"]["vocab_size"], _specials(config)))
    _complete(config, tokenizer, preset=preset, seed=seed)
    shards = _shards(expected_tensors(read_config(config)), shard_bytes)
    target.parent.mkdir(parents=True, exist_ok=True)
    _require_space(target.parent, shards)
    partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        _write_texts(partial, config, tokenizer)
        _write_shards(partial, shards, seed, progress)
        open_checkpoint(partial).verify()
        if target.exists():
            target.rmdir()  # empty: checked above, and rmdir refuses anything else
        partial.rename(target)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _require_vacant(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError("directory", str(target), "exists and is not an empty directory; "
                          "checkpoints are never overwritten")  # fmt: skip


def _require_space(parent: Path, shards: list[dict[str, TensorSpec]]) -> None:
    needed = SPARE_BYTES + sum(spec.nbytes for shard in shards for spec in shard.values())
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise ConfigError("directory", str(parent), f"the checkpoint takes {needed / GIB:.1f} GiB "
                          f"and {free / GIB:.1f} GiB are free there")  # fmt: skip


def _specials(config: Config) -> dict[int, str]:
    text = config["text_config"]
    return {
        config["bos_token_id"]: "<｜begin▁of▁sentence｜>",
        config["eos_token_id"]: "<｜end▁of▁sentence｜>",
        config["pad_token_id"]: "<｜▁pad▁｜>",
        3: "<｜User｜>",
        4: "<｜Assistant｜>",
        5: "<think>",
        6: "</think>",
        config["image_token_id"]: "<｜image｜>",
        text["dspark_noise_token_id"]: "<｜noise｜>",
    }


def _complete(config: Config, tokenizer: Tokenizer, *, preset: str, seed: int) -> None:
    """Add what follows from the tokenizer and the Engram dimensions, and say what this is."""
    text = config["text_config"]
    text["engram_compressed_vocab_size"] = int(compressed_vocab_map(tokenizer).max()) + 1
    text["engram_num_embeddings"] = engram_table_rows(text)
    config["made_checkpoint"] = {
        "weights": "random",
        "preset": preset,
        "seed": seed,
        "engram_tables": f"{sum(text['engram_num_embeddings']):,} rows; the released model has "
                         "768,022,850",
    }  # fmt: skip


def engram_table_rows(text: Config) -> list[int]:
    """Return each Engram layer's table rows: sums of primes that are unique over all layers."""
    taken: set[int] = set()
    rows = []
    for _ in text["engram_layer_ids"]:
        rows.append(0)
        for _ in range(text["engram_max_ngram_size"] - 1):
            prime = text["engram_vocab_size"] - 1
            for _ in range(text["engram_n_heads"]):
                prime = _next_prime(prime, taken)
                taken.add(prime)
                rows[-1] += prime
    return rows


def _shards(tensors: Mapping[str, TensorSpec], most_bytes: int) -> list[dict[str, TensorSpec]]:
    """Part tensors into files, in order; wider dtypes come first in a file, which aligns them."""
    shards: list[dict[str, TensorSpec]] = [{}]
    filled = 0
    for name, spec in tensors.items():
        if filled + spec.nbytes > most_bytes and shards[-1]:
            shards.append({})
            filled = 0
        shards[-1][name] = spec
        filled += spec.nbytes
    return [
        dict(sorted(shard.items(), key=lambda item: -DTYPE_BYTES[item[1].dtype]))
        for shard in shards
    ]


def _write_shards(
    directory: Path, shards: list[dict[str, TensorSpec]], seed: int, progress: Progress | None
) -> None:
    everything = {name: spec for shard in shards for name, spec in shard.items()}
    total, written = sum(spec.nbytes for spec in everything.values()), 0
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        with (directory / file).open("wb") as out:
            out.write(header_bytes(shard))
            for name in shard:
                weight_map[name] = file
                for piece in tensor_data(name, everything, seed):
                    out.write(piece)
                    written += len(piece)
                    if progress is not None:
                        progress(written, total)
    assert written == total, f"wrote {written} bytes of {total}"
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(directory / INDEX_FILE, index)


def _write_texts(directory: Path, config: Config, tokenizer: Tokenizer) -> None:
    _write_json(directory / CONFIG_FILE, config)
    tokenizer.backend.save(str(directory / TOKENIZER_FILE))
    made = config["made_checkpoint"]
    (directory / "README.md").write_text(
        f"# Random weights, preset {made['preset']}, seed {made['seed']}\n\n"
        "Made by mini-DeepInfer in the format of DeepSeek-V4.1-Flash, to run and measure the code\n"
        "with. The weights are random numbers and the tokenizer is a toy: it writes nonsense.\n\n"
        f"Engram tables: {made['engram_tables']}.\n",
        encoding="utf-8",
    )


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
