"""RMS normalisation as a module: the learned weight and the model's epsilon."""

from torch import Tensor

from mdi_exec.model.weights import Weights
from mdi_exec.ops.quantise import Quantised
from mdi_exec.ops.rms_norm import rms_norm, rms_norm_round


class RmsNorm:
    """Normalises the last dimension; keeps the dtype."""

    def __init__(self, weights: Weights, name: str, width: int, eps: float) -> None:
        self.weight = weights.tensor(f"{name}.weight", width)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)

    def rounded(self, x: Tensor) -> tuple[Tensor, Quantised | Tensor]:
        """Return the norm, and the norm rounded for a quantised GEMM."""
        return rms_norm_round(x, self.weight, self.eps)
