"""What `model` names: a checkpoint directory, a hub id, or random weights that need no files.

"random:flash-slice,layers=8" is the preset "flash-slice" of `presets.py` with weights drawn on the
device; `layers`, `experts` and `seed` may follow. The image tower is left out, and so is the draft
head unless it is asked for. It has no tokenizer: prompts are token ids. Read next: `checkpoint.py`,
`random.py`.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mdi_exec.model.config import ModelConfig
from mdi_exec.model.config_reader import read_config
from mdi_exec.weights.checkpoint import Checkpoint, checkpoint_fingerprint, open_checkpoint
from mdi_exec.weights.make_checkpoint import engram_table_rows
from mdi_exec.weights.presets import preset_config, released_config
from mdi_exec.weights.random import RandomSource, random_token_map
from mdi_exec.weights.tokenizer import Tokenizer, compressed_vocab_map
from mdi_shared.errors import ConfigError

RANDOM = "random:"
_NUMBERS = ("layers", "experts", "seed")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that can be loaded: its config, its tensors by released name, and its tokenizer.

    `token_map` int64 [vocab_size] leads to Engram's compressed ids (None only without tokenizer
    and without Engram layers).
    """

    name: str
    config: ModelConfig
    tensors: Checkpoint | RandomSource
    tokenizer: Tokenizer | None
    token_map: Tensor | None

    @property
    def fingerprint(self) -> str:
        """What tells this model's weights from others': a hash, or what they are drawn from."""
        if isinstance(self.tensors, Checkpoint):
            return checkpoint_fingerprint(self.tensors.directory)
        return f"random:{self.name}"

    @property
    def weight_bytes(self) -> int:
        """Bytes of all tensors the config asks for."""
        return self.tensors.weight_bytes


def open_model(
    model: str | Path, device: torch.device | str = "cpu", revision: str | None = None, *,
    with_draft: bool = False,
) -> ModelSource:  # fmt: skip
    """Open what `model` names; random weights will be drawn on `device`.

    They have a draft head `with_draft`; a checkpoint has what it has.

    Raises `ConfigError` for a model, preset or size that does not exist, `CheckpointError` for a
    checkpoint that is not what its config says.
    """
    if isinstance(model, str) and model.startswith(RANDOM):
        if revision is not None:
            raise ConfigError("revision", revision, f"{model} has no revisions")
        return _open_random(model, device, with_draft)
    checkpoint = open_checkpoint(model, revision)
    checkpoint.verify()
    file = checkpoint.tokenizer_file
    tokenizer = Tokenizer.from_file(file) if file.exists() else None
    return ModelSource(checkpoint.name, checkpoint.config, checkpoint, tokenizer,
                       _token_map(checkpoint.config, tokenizer))  # fmt: skip


def _token_map(config: ModelConfig, tokenizer: Tokenizer | None) -> Tensor | None:
    if tokenizer is None:
        return None
    token_map = compressed_vocab_map(tokenizer, config.vocab_size)
    found, wanted = int(token_map.max()) + 1, config.engram_compressed_vocab_size
    if config.engram_layer_ids and found != wanted:
        raise ConfigError("engram_compressed_vocab_size", wanted,
                          f"the checkpoint's tokenizer gives {found}")  # fmt: skip
    return token_map


def _open_random(model: str, device: torch.device | str, with_draft: bool) -> ModelSource:
    preset, *pairs = model.removeprefix(RANDOM).split(",")
    numbers: dict[str, int] = {}
    for pair in pairs:
        name, _, value = pair.partition("=")
        if name not in _NUMBERS or not value.isdecimal():
            raise ConfigError("model", model, f"after the preset come {', '.join(_NUMBERS)}, each "
                              "as name=number, parted by commas")  # fmt: skip
        numbers[name] = int(value)
    config = random_config(preset, layers=numbers.get("layers"), experts=numbers.get("experts"),
                           with_draft=with_draft)  # fmt: skip
    seed = numbers.get("seed", 0)
    source = RandomSource(config, seed, device)
    return ModelSource(model.removeprefix(RANDOM), config, source, None,
                       random_token_map(config, seed))  # fmt: skip


def random_config(
    preset: str, *, layers: int | None = None, experts: int | None = None,
    with_draft: bool = False,
) -> ModelConfig:  # fmt: skip
    """Return a preset's text model, complete without a tokenizer.

    Engram's compressed vocabulary is the share of the vocabulary that it is in the release. Raises
    `ConfigError` for an unknown preset or a wrong size.
    """
    config = preset_config(preset, layers=layers, num_experts=experts, with_draft=with_draft,
                           with_vision=False)  # fmt: skip
    text, released = config["text_config"], released_config()["text_config"]
    text["engram_compressed_vocab_size"] = (
        text["vocab_size"] * released["engram_compressed_vocab_size"] // released["vocab_size"]
    )
    text["engram_num_embeddings"] = engram_table_rows(text)
    return read_config(config)
