"""RMS normalisation as a module: the learned weight and the model's epsilon."""

from torch import Tensor

from mdi_exec.model.weights import Weights
from mdi_exec.ops.rms_norm import rms_norm


class RmsNorm:
    """Normalises the last dimension; keeps the dtype."""

    def __init__(self, weights: Weights, name: str, width: int, eps: float) -> None:
        self.weight = weights.tensor(f"{name}.weight", width)
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
