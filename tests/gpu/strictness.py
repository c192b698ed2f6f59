"""Contexts that make a GPU test stricter: garbage in fresh tensors, no waiting for the device."""

import warnings
from contextlib import contextmanager

import torch


@contextmanager
def poisoned():
    """Fill what torch allocates without initialising with NaN or the largest integer."""
    assert torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def unawaited():
    """Raise where the host waits for the device; ops called before know their kernels."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
