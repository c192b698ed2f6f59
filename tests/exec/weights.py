"""The tests' model: a tiny one with one layer of each kind, and with other weights if asked.

    MDI_TEST_WEIGHTS=perturbed pytest tests/exec    # float weights moved to neighbouring numbers
    MDI_TEST_WEIGHTS=7 pytest tests/exec            # all weights drawn anew, from other seeds

Nothing may hang on what a model says. The first is what another processor's sums do to a model,
only more of it. Tests that compare with golden tensors keep the golden model and its weights.
Processes that a test starts read the same checkpoint, but draw random weights as always.
"""

import atexit
import json
import os
import tempfile
from pathlib import Path
from shutil import copyfile, rmtree

GOLDEN_TINY = Path(__file__).parent.parent / "golden" / "tiny"
WANTED = os.environ.get("MDI_TEST_WEIGHTS", "")
MADE = "MDI_TEST_CHECKPOINT"  # tells processes that a test starts where the checkpoint is
# The golden model's layers that stay: window with Engram, source, reuse; candidate source,
# re-index, reuse.
LAYERS = (1, 2, 3, 6, 8, 9)
CUT = {
    "num_hidden_layers": 6, "compress_ratios": [0, 2, 2, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3, 4],
    "candidate_source_layer_id": 3, "engram_layer_ids": [0], "engram_num_embeddings": [3144],
    "dspark_target_layer_ids": [3, 4, 5],
}  # fmt: skip


def small_checkpoint() -> Path:
    """Return the checkpoint of the tests that need no golden tensors."""
    if MADE in os.environ:
        return Path(os.environ[MADE])
    from safetensors.torch import load_file, save_file

    folder = tempfile.mkdtemp(prefix="mdi-tests-")
    atexit.register(rmtree, folder, ignore_errors=True)
    small = Path(folder) / "tiny"
    small.mkdir()
    config = json.loads((GOLDEN_TINY / "config.json").read_text())
    config["text_config"].update(CUT)
    (small / "config.json").write_text(json.dumps(config))
    copyfile(GOLDEN_TINY / "tokenizer.json", small / "tokenizer.json")
    tensors = cut(load_file(GOLDEN_TINY / "model.safetensors"))
    if WANTED == "perturbed":
        tensors = {name: moved(tensor) for name, tensor in tensors.items()}
    elif WANTED:
        tensors = drawn(config)
    save_file(tensors, small / "model.safetensors")
    index = {"weight_map": dict.fromkeys(tensors, "model.safetensors")}
    (small / "model.safetensors.index.json").write_text(json.dumps(index))
    os.environ[MADE] = str(small)
    return small


def cut(tensors):
    """Leave out the golden model's other layers and count anew."""
    kept = {}
    for name, tensor in tensors.items():
        place, _, rest = name.removeprefix("layers.").partition(".")
        if not name.startswith("layers."):
            kept[name] = tensor
        elif int(place) in LAYERS:
            kept[f"layers.{LAYERS.index(int(place))}.{rest}"] = tensor
    return kept


def drawn(config):
    """Draw all weights with the seed that is asked for."""
    from mdi_exec.model.config_reader import read_config
    from mdi_exec.weights.random import RandomSource

    source = RandomSource(read_config(config), int(WANTED), "cpu")
    return {name: source.get(name) for name in source.tensors}


def moved(tensor):
    """Move float32 and bfloat16 numbers to one of their two neighbours, at random."""
    import torch

    whole = {torch.float32: torch.int32, torch.bfloat16: torch.int16}.get(tensor.dtype)
    if whole is None:  # codes of FP8 and FP4, whose neighbours are far away
        return tensor
    dice = torch.Generator().manual_seed(tensor.numel())
    ways = torch.randint(0, 2, tensor.shape, generator=dice, dtype=whole) * 2 - 1
    return torch.where(tensor == 0, tensor, (tensor.view(whole) + ways).view(tensor.dtype))


def draw_otherwise() -> None:
    """From now on, "random:" models and `make_checkpoint` draw other weights than they would."""
    import torch

    from mdi_exec.weights import make_checkpoint, random

    data, get, generator = random.tensor_data, random.RandomSource.get, random.RandomSource._rng

    def moved_data(name, tensors, seed):
        for piece in data(name, tensors, seed):
            values = torch.frombuffer(piece, dtype=random.DTYPES[tensors[name].dtype])
            yield moved(values).view(torch.uint8).numpy().data

    if WANTED == "perturbed":
        make_checkpoint.tensor_data = moved_data
        random.RandomSource.get = lambda self, name: moved(get(self, name))
    else:
        make_checkpoint.tensor_data = lambda name, tensors, seed: data(
            name, tensors, f"{WANTED} {seed}"
        )
        random.RandomSource._rng = lambda self, name: generator(self, f"{WANTED} {name}")
