"""The cost core's view of a model: the dimensions that decide what a step computes."""

from dataclasses import fields

from mdi_exec.model.config import ModelConfig
from mdi_shared.cost.shape import ModelShape

# A model has one shared expert everywhere (architecture spec, §2); the config says so elsewhere.
_SHARED_EXPERTS = 1


def shape_of(config: ModelConfig, name: str, *, replay_keep_tokens: int = 0) -> ModelShape:
    """Return the shape of `config`'s backbone, for `mdi_shared.cost.work` and cost models."""
    own = {"name", "compress_ratios", "n_shared_experts", "replay_keep_tokens"}
    same = {f.name: getattr(config, f.name) for f in fields(ModelShape) if f.name not in own}
    return ModelShape(
        name=name,
        compress_ratios=config.compress_ratios[: config.num_hidden_layers],
        n_shared_experts=_SHARED_EXPERTS,
        replay_keep_tokens=replay_keep_tokens,
        **same,
    )
