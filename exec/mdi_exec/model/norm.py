"""RMS normalisation as a module: the learned weight and the model's epsilon."""

from torch import Tensor

from mdi_exec.model.weights import Weights
from mdi_exec.ops.gemm import Partial
from mdi_exec.ops.norm_store import norm_store
from mdi_exec.ops.quantise import Quantised
from mdi_exec.ops.rms_norm import rms_norm, rms_norm_round_sum
from mdi_exec.ops.rope import Rotation
from mdi_exec.ops.row_pool import RowPool


class RmsNorm:
    """Normalises the last dimension; keeps the dtype."""

    def __init__(self, weights: Weights, name: str, width: int, eps: float) -> None:
        self.weight = weights.tensor(f"{name}.weight", width)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def rounded(self, product: Partial) -> Quantised | Tensor:
        """Return a product's norm, rounded for a quantised GEMM."""
        return rms_norm_round_sum(product, self.weight, self.eps)

    def store(self, product: Partial, rotation: Rotation, pool: RowPool, index: Tensor) -> Tensor:
        """Store a product's norm, rotated, at pool rows `index`; return it as it was before."""
        return norm_store(product, self.weight, self.eps, rotation, pool, index)
