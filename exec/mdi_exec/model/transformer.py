"""The complete text model: embedding, layers, head. One call runs one step's ragged batch.

Reading order: `Layer.__call__` (one layer in a dozen lines), `Transformer.forward`, then a part's
own file. The draft head is in `dspark.py`, the image tower is not here; what ranks of a group do
together is in `exchange.py`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from mdi_exec.model.attention import Attention
from mdi_exec.model.batch import Batch
from mdi_exec.model.cache import DeviceCache
from mdi_exec.model.config import LayerPlan, ModelConfig, require
from mdi_exec.model.engram import Engram, EngramHash, EngramIds, engram_hashes
from mdi_exec.model.hyper_connections import HyperConnection
from mdi_exec.model.linear import Linear
from mdi_exec.model.moe import Moe
from mdi_exec.model.norm import RmsNorm
from mdi_exec.model.ranges import in_range
from mdi_exec.model.rope import RopeTables
from mdi_exec.model.step_context import StepContext
from mdi_exec.model.weights import Weights
from mdi_exec.numerics import Numerics
from mdi_exec.ops.hyper_connections import (
    HcCoefficients,
    hc_read,
    hc_read_norm,
    hc_write,
    hc_write_read,
)
from mdi_exec.ops.quantise import Quantised
from mdi_exec.ranks.exchange import NO_EXCHANGE, ExpertExchange, StepRows

if TYPE_CHECKING:
    from mdi_exec.model.dspark import DraftHead


class SublayerInputs(NamedTuple):
    """What a sublayer reads from the streams, [T, D]: normed, and the same rounded."""

    normed: Tensor
    rounded: Quantised | Tensor


class Streams(NamedTuple):
    """The residual state between sublayers: x [T, n, D], and who reads it next, float32 [T, n].

    "Shifted" hyper-connections: a sublayer reads with coefficients made by the one before it.
    """

    x: Tensor
    read: Tensor
    inputs: SublayerInputs | None = None  # of the next sublayer, where they are there already

    def rows(self, index: Tensor) -> "Streams":
        return Streams(self.x[index], self.read[index])


def _layer_name(layer: "Layer") -> str:
    return f"layer {layer.plan.index}"


class Layer:
    """One decoder layer (or draft layer): attention and experts between hyper-connections."""

    def __init__(self, config: ModelConfig, plan: LayerPlan, weights: Weights) -> None:
        eps = config.rms_norm_eps
        self.plan = plan
        self.attn_norm = RmsNorm(weights, "attn_norm", config.hidden_size, eps)
        self.ffn_norm = RmsNorm(weights, "ffn_norm", config.hidden_size, eps)
        self.hc_attn = HyperConnection(config, weights, "hc_attn")
        self.hc_ffn = HyperConnection(config, weights, "hc_ffn")
        self.attention = Attention(config, plan, weights.sub("attn"))
        self.moe = Moe(config, plan, weights.sub("ffn"))

    @in_range(_layer_name)
    def store_entries(self, streams: Streams, ctx: StepContext) -> Streams:
        """Compress every row of the step into this layer's cache, if it is a KV source.

        Returns the streams with what was read from them for it.
        """
        if self.plan.owns_compressor:
            inputs = self.attention_inputs(streams)
            self.attention.store_entries(inputs.normed, ctx)
            streams = streams._replace(inputs=inputs)
        return streams

    @in_range(_layer_name)
    def __call__(self, streams: Streams, ctx: StepContext, then: RmsNorm | None = None) -> Streams:
        """Run the layer; its entries must be stored already (docs/model.md).

        `then` is the norm by which the streams are read next, if that is known.
        """
        coefficients = self.hc_attn(streams.x)
        out = self.attention(*self.attention_inputs(streams), ctx)
        middle = _written(streams.x, out, coefficients, self.ffn_norm)
        assert middle.inputs is not None
        coefficients = self.hc_ffn(middle.x)
        out = self.moe(*middle.inputs, ctx)
        return _written(middle.x, out, coefficients, then)

    @in_range("streams read")
    def attention_inputs(self, streams: Streams) -> SublayerInputs:
        """Return attention's inputs, read from the streams unless they have been."""
        if streams.inputs is not None:
            return streams.inputs
        norm = self.attn_norm
        return SublayerInputs(*hc_read_norm(streams.x, streams.read, norm.weight, norm.eps))


def _written(x: Tensor, out: Tensor, by: HcCoefficients, then: RmsNorm | None) -> Streams:
    """Write a sublayer's output to streams x, and read them for the next one if it is known."""
    if then is None:
        return Streams(hc_write(x, out, by), by.read)
    x, normed, rounded = hc_write_read(x, out, by, then.weight, then.eps)
    return Streams(x, by.read, SublayerInputs(normed, rounded))


class Transformer:
    """Weights and forward pass of the text model.

    `token_map` [vocab_size] maps token ids to compressed ids (None only without Engram layers).
    `engram_device` holds Engram's tables when they are not to lie on the model's device. In a group
    of ranks `exchange` reaches what `weights.shard` leaves out. Raises `ConfigError` for tensors
    that contradict the config.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        token_map: Tensor | None,
        numerics: Numerics = Numerics.QUANTISED,
        engram_device: torch.device | str | None = None,
        exchange: ExpertExchange = NO_EXCHANGE,
    ) -> None:
        shard = weights.shard
        assert (shard.rank, shard.size) == (exchange.rank, exchange.size), (
            f"rank {shard.rank} of {shard.size} has the exchange of {exchange.rank}"
        )
        self.exchange = exchange
        self.config = config
        self.numerics = numerics
        self.device = weights.device
        self.embed = weights.tensor("embed.weight", config.vocab_size, config.hidden_size)
        self.layers = [
            Layer(config, config.layer_plan(index), weights.sub(f"layers.{index}"))
            for index in range(config.num_hidden_layers)
        ]
        self.norm = RmsNorm(weights, "norm", config.hidden_size, config.rms_norm_eps)
        self.head = Linear(weights, "head", config.vocab_size, config.hidden_size)
        self.ropes = RopeTables(config, weights.device)
        hashes = engram_hashes(config)
        table_device = weights.device if engram_device is None else engram_device
        self.engrams = {
            layer: self._load_engram(layer, found, weights, table_device)
            for layer, found in zip(config.engram_layer_ids, hashes, strict=True)
        }
        require(token_map is not None or not hashes, "token_map", None,
                "Engram layers need the tokenizer's compressed ids")  # fmt: skip
        self.engram_ids = (
            EngramIds(config, token_map, weights.device) if token_map is not None else None
        )

    def _load_engram(
        self, layer: int, found: EngramHash, weights: Weights, table_device: torch.device | str
    ) -> Engram:
        scope = weights.sub(f"layers.{layer}.engram")
        return Engram(self.config, self.config.layer_plan(layer), scope, found, table_device)

    @property
    def is_capturable(self) -> bool:
        """Say whether `forward` can be recorded as a CUDA graph.

        Not without a GPU, not where references run (float32 numerics), and not with Engram's
        tables elsewhere: both read from the device on the way. Not in a group of ranks, whose
        exchanges depend on each other's rows.
        """
        if self.exchange.size > 1:
            return False
        tables = [engram.table.codes.device for engram in self.engrams.values()]
        is_here = all(device == self.embed.device for device in tables)
        return self.device.type == "cuda" and self.numerics is not Numerics.FLOAT32 and is_here

    @torch.inference_mode()
    def forward(
        self,
        batch: Batch,
        cache: DeviceCache,
        watch: Callable[[str, Tensor], None] | None = None,
        *,
        expert_counts: list[Tensor] | None = None,
        draft: "DraftHead | None" = None,
    ) -> Tensor:
        """Run one step; returns float32 logits [m, vocab_size] of `batch.logit_rows`, in order.

        Writes the new tokens' state to `cache`. Consumer layers run on the rows that bounded
        replay keeps (all of them unless the batch says otherwise). `watch` sees the streams
        [T, n, D] behind each part, by name; it is for finding faults. `expert_counts` collects
        each layer's rows per expert. `draft` stores its keys of the same rows. The host never
        waits for the device, but in a group whose `exchange` does. All ranks of a group call this
        together, in the same order.
        """
        assert cache.layout.numerics is self.numerics, "model and cache must round alike"
        self.exchange.start(StepRows(batch.num_rows, batch.num_kept))
        ctx = StepContext(batch, cache, self.ropes, expert_counts, self.exchange)
        streams = self.embed_rows(batch)
        if watch is not None:
            watch("the embedding", streams.x)
        ids = self.engram_ids(ctx) if self.engram_ids is not None and self.engrams else None
        features: list[Tensor] = []
        for layer, then in zip(self.layers, self._next_norms(), strict=True):
            if ids is not None and layer.plan.engram_index is not None:
                streams = self.add_engram(layer.plan.index, streams, ids)
            streams = layer.store_entries(streams, ctx)
            if layer.plan.index == self.config.n_prefill_layer:
                self.exchange.cut()
                if batch.cut is not None:
                    batch, kept = batch.consumer_rows()
                    if batch.num_rows == 0:
                        return self._serve(ctx, streams.x)
                    ctx = StepContext(batch, cache, self.ropes, expert_counts, self.exchange)
                    streams, features = streams.rows(kept), [f[kept] for f in features]
            if draft is not None and layer.plan.index in draft.targets:
                features.append(draft.feature(streams.x))
            streams = layer(streams, ctx, then)
            if watch is not None:
                watch(f"layer {layer.plan.index}", streams.x)
        if draft is not None:
            draft.store(features, ctx)
        return self.logits(streams.rows(batch.logit_rows))

    def _next_norms(self) -> list[RmsNorm | None]:
        """Return the norm that reads each layer's streams; None where something else comes next."""
        layers = self.layers
        found = [None if after.plan.engram_index is not None else after.attn_norm
                 for after in layers[1:]]  # fmt: skip
        return [*found, None]

    def _serve(self, ctx: StepContext, like: Tensor) -> Tensor:
        """Return no logits, once the other ranks' consumer rows have had this rank's experts."""
        if self.exchange.most_rows:
            for layer in self.layers[self.config.n_prefill_layer :]:
                layer.moe.serve(ctx, like)
        return torch.empty(0, self.config.vocab_size, device=self.device)

    def first_broken_part(self, batch: Batch, cache: DeviceCache) -> str:
        """Run a step again and name the first part whose output is not finite.

        In a group of ranks the others have gone on, and no step can be run again.
        """
        if self.exchange.size > 1:
            return "the step (in a group of ranks, parts are not told apart)"
        broken: list[str] = []

        def watch(part: str, x: Tensor) -> None:
            if not broken and not bool(torch.isfinite(x).all()):
                broken.append(part)

        self.forward(batch, cache, watch)
        return broken[0] if broken else "the output head"

    @in_range("embedding")
    def embed_rows(self, batch: Batch) -> Streams:
        """Return the streams before layer 0: n copies of each row's embedding, read from copy 0."""
        n = self.config.hc_mult
        rows = self.embed[batch.token_ids].to(self.numerics.dtype)
        read = torch.zeros(batch.num_rows, n, device=self.device)
        read[:, 0] = 1.0
        return Streams(rows.unsqueeze(1).expand(-1, n, -1), read)

    @in_range("engram")
    def add_engram(self, layer: int, streams: Streams, ids: Tensor) -> Streams:
        """Return the streams with a layer's Engram added; ids [T, N] as `EngramIds` gives them."""
        assert self.engram_ids is not None, "Engram layers come with a token map"
        added = self.engrams[layer](streams.x, ids, self.engram_ids.pad_id, self.exchange)
        return Streams(added, streams.read)

    @in_range("head")
    def logits(self, streams: Streams) -> Tensor:
        """Return float32 logits [m, vocab_size] of m rows."""
        return self.head.float32(self.norm(hc_read(streams.x, streams.read)))
