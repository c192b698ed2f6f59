"""Marks of tests that need a GPU."""

import pytest
import torch

gpu = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA GPU; docs/gpu-testing.md has the command"
)
