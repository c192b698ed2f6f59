"""The tests' tiny models with other weights, if asked: nothing may hang on what a model says.

    MDI_TEST_WEIGHTS=perturbed pytest tests/exec    # float weights moved to neighbouring numbers
    MDI_TEST_WEIGHTS=7 pytest tests/exec            # all weights drawn anew, from other seeds

The first is what another processor's sums do to a model, only more of it. Golden tensors belong to
the golden weights: tests that compare with them are skipped then (`golden` of exec/conftest.py).
Processes that a test starts read the same checkpoint, but draw random weights as always.
"""

import atexit
import os
import tempfile
from pathlib import Path
from shutil import copytree, rmtree

GOLDEN_TINY = Path(__file__).parent / "golden" / "tiny"
WANTED = os.environ.get("MDI_TEST_WEIGHTS", "")
MADE = "MDI_TEST_CHECKPOINT"  # tells processes that a test starts where the checkpoint is


def tiny_checkpoint() -> Path:
    """Return the checkpoint for tests that need no golden tensors."""
    if not WANTED:
        return GOLDEN_TINY
    if MADE in os.environ:
        return Path(os.environ[MADE])
    from safetensors.torch import load_file, save_file

    from mdi_exec.model.config_reader import read_config_file
    from mdi_exec.weights.random import RandomSource

    folder = tempfile.mkdtemp(prefix="mdi-test-weights-")
    atexit.register(rmtree, folder, ignore_errors=True)
    tiny = Path(copytree(GOLDEN_TINY, Path(folder) / "tiny"))
    file = tiny / "model.safetensors"
    if WANTED == "perturbed":
        tensors = {name: moved(tensor) for name, tensor in load_file(file).items()}
    else:
        source = RandomSource(read_config_file(tiny / "config.json"), int(WANTED), "cpu")
        tensors = {name: source.get(name) for name in source.tensors}
    save_file(tensors, file)
    os.environ[MADE] = str(tiny)
    return tiny


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
