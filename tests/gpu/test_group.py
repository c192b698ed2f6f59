"""Ranks on GPUs of their own serve what one GPU does: the same tokens and logprobs, bit for bit."""

import pytest
import torch

pytest.importorskip("tilelang", reason="kernels are written in TileLang, which is not installed")

from mdi_exec.ranks.exchange import KINDS
from tests.gpu.test_runner import serve

GPUS = 2
pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < GPUS,
    reason=f"needs {GPUS} CUDA GPUs; docs/gpu-testing.md has the command",
)
PREEMPTED = {"num_blocks": 8, "max_model_len": 300}  # too few blocks for a rank's requests at once


@pytest.fixture(scope="module")
def one_gpu():
    return serve()


@pytest.mark.parametrize("exchange", KINDS)
@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 61}, {"enable_zos": False}, PREEMPTED],
    ids=["plain", "chunks", "synchronous", "few blocks"],
)  # fmt: skip
def test_a_group_serves_what_one_gpu_does(one_gpu, exchange, options):
    assert serve(data_parallel_size=GPUS, exchange=exchange, **options) == one_gpu
