"""The model that benchmarks of the model are about: a preset with random weights on the device."""

import argparse

import torch

from mdi_exec.model.transformer import Transformer
from mdi_exec.model.weights import ExpansionBudget, Weights
from mdi_exec.ranks.exchange import NO_EXCHANGE, WHOLE, ExpertExchange, ExpertShard
from mdi_exec.weights.source import ModelSource, open_model


def build(
    options: argparse.Namespace,
    device: torch.device,
    shard: ExpertShard = WHOLE,
    exchange: ExpertExchange = NO_EXCHANGE,
) -> tuple[ModelSource, Transformer]:
    """Draw the weights of a preset on the device and load them, packed where kernels run.

    Of `options`: preset, layers, experts, and copies_gb for bfloat16 copies of dense weights. In a
    group of ranks only `shard` is loaded, and `exchange` reaches the rest.
    """
    numbers = {"layers": options.layers, "experts": options.experts}
    given = "".join(f",{name}={n}" for name, n in numbers.items() if n is not None)
    source = open_model(f"random:{options.preset}{given}", device)
    is_cuda = device.type == "cuda"
    budget = ExpansionBudget(options.copies_gb * 1e9 if is_cuda else 0.0, for_kernels=is_cuda)
    weights = Weights(source.tensors, device, budget=budget, shard=shard)
    model = Transformer(source.config, weights, token_map=source.token_map, exchange=exchange)
    return source, model
