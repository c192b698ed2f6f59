"""Linear layers: weights stay in their checkpoint format, only activations are converted."""

from torch import Tensor

from mdi_exec.model.weights import Weights
from mdi_exec.ops.gemm import Partial, matmul, partial_gemm, partial_matmul, quantised_gemm
from mdi_exec.ops.quantise import Quantised


class QLinear:
    """An FP8 weight [out, in]; takes a rounded input, returns the activation dtype."""

    def __init__(self, weights: Weights, name: str, out_width: int, in_width: int) -> None:
        self.weight = weights.fp8(name, out_width, in_width)

    def __call__(self, x: Quantised | Tensor) -> Tensor:
        return quantised_gemm(x, self.weight)

    def partial(self, x: Quantised | Tensor) -> Partial:
        """Return the product for what adds up its parts."""
        return partial_gemm(x, self.weight)


class Linear:
    """A bfloat16 weight [out, in], promoted to float32."""

    def __init__(self, weights: Weights, name: str, out_width: int, in_width: int) -> None:
        self.weight = weights.tensor(f"{name}.weight", out_width, in_width)

    def float32(self, x: Tensor) -> Tensor:
        """Return the unrounded product, float32 [T, out]."""
        return matmul(x, self.weight)

    def partial(self, x: Tensor) -> Partial:
        """Return the product for what adds up its parts."""
        return partial_matmul(x, self.weight)
