"""One sublayer's hyper-connection coefficients, made from the streams it will write to."""

from torch import Tensor

from mdi_exec.model.config import ModelConfig
from mdi_exec.model.ranges import in_range
from mdi_exec.model.weights import Weights
from mdi_exec.ops.hyper_connections import HcCoefficients, HcProjection, hc_coefficients


class HyperConnection:
    """A coefficient set: `name` is hc_attn or hc_ffn; all float32."""

    def __init__(self, config: ModelConfig, weights: Weights, name: str) -> None:
        n, width = config.hc_mult, config.hc_width
        self.projection = HcProjection(weights.tensor(f"{name}_fn", width, n * config.hidden_size))
        self.base = weights.tensor(f"{name}_base", width)
        self.scale = weights.tensor(f"{name}_scale", 3)
        self.config = config

    @in_range("coefficients")
    def __call__(self, streams: Tensor) -> HcCoefficients:
        """Return the coefficients of streams [T, n, D]."""
        config = self.config
        return hc_coefficients(
            streams, self.projection, self.base, self.scale, norm_eps=config.rms_norm_eps,
            iterations=config.hc_sinkhorn_iters, eps=config.hc_eps,
        )  # fmt: skip
