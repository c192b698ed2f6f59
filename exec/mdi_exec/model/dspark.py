"""The DSpark draft head: small layers that guess what comes next (docs/model.md, "Drafts").

Its layers are ordinary window-only ones. They look at keys made of the main model's streams, which
every step stores for all of its rows (`DraftHead.store`), and at a block of rows of their own: the
newest token, then noise. One pass gives logits for all drafts of the block; they are picked one
after another, each with a bias by the draft before it (`DraftHead.propose`).

What a guess is worth is not decided here: whether a draft stands is up to the main model
(`engine/drafting.py`). Read next: `transformer.py` (who calls `store`).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mdi_exec.model.batch import Batch
from mdi_exec.model.cache import DeviceCache
from mdi_exec.model.linear import Linear, QLinear
from mdi_exec.model.norm import RmsNorm
from mdi_exec.model.ranges import in_range
from mdi_exec.model.staged_keys import StagedKeys
from mdi_exec.model.step_context import StepContext
from mdi_exec.model.transformer import Layer, Transformer
from mdi_exec.model.weights import Weights
from mdi_exec.ops.elementwise import rounded_once
from mdi_exec.ops.gemm import Partial, partial_gemm
from mdi_exec.ops.hyper_connections import hc_read
from mdi_exec.ops.quantise import quantise_activation
from mdi_exec.ops.rope import Rotation
from mdi_exec.ops.sparse_attention import NONE
from mdi_exec.ops.step_rows import PLAIN
from mdi_exec.ranks.exchange import StepRows

Pick = Callable[[int, Tensor], Tensor]
"""Chooses drafts: their place in the block, float32 logits [n, vocab_size] -> ids int64 [n]."""


class Blocks(NamedTuple):
    """Where n sequences' drafts begin, int64 [n] each.

    `last` are their newest tokens, which no main row has computed yet; `base` the positions of the
    last rows that the main model has, one before them; `slots` their state slots.
    """

    last: Tensor
    base: Tensor
    slots: Tensor


class Drafts(NamedTuple):
    """ids int64 [n, k], and float32 [n, k] logits of the chance that each one is accepted.

    The chance is that of a draft whose predecessors have been accepted.
    """

    ids: Tensor
    confidence: Tensor


class BlockContext(StepContext):
    """What window-only layers ask of a step, for blocks of `size` rows.

    A row sees the window of main rows that ends at its block's base, and its whole block: there is
    no causal order inside. Own keys stand in the ring before any is read.
    """

    def __init__(self, model: Transformer, blocks: Blocks, size: int, cache: DeviceCache) -> None:
        on, config = blocks.base.device, model.config
        self.cache, self.rings = cache, cache.layout.ring_rows
        self.selected = self.candidates = self.expert_counts = None
        self.exchange, self.reads_ring = model.exchange, True
        ring, window = self.rings[0], config.sliding_window
        first = (blocks.base - (window - 1)).clamp(min=0).unsqueeze(1)
        seen = first + torch.arange(window, device=on)
        seen = seen.masked_fill(seen > blocks.base.unsqueeze(1), NONE)
        own = blocks.base.unsqueeze(1) + torch.arange(1, size + 1, device=on)
        keys = torch.cat((seen, own), dim=1)
        rows = blocks.slots.unsqueeze(1) * ring + keys % ring
        rows = rows.masked_fill(keys < 0, NONE).to(torch.int32)
        self.window_rows = rows.repeat_interleave(size, dim=0)
        self._targets = rows[:, window:].flatten().to(torch.int64)
        angles = own.flatten().to(torch.float32).unsqueeze(1) * model.ropes.frequencies[PLAIN]
        self._rotation = Rotation(rounded_once(torch.cos, angles), rounded_once(torch.sin, angles))
        self.batch = _block_batch(blocks, own, config.dspark_noise_token_id)
        self.staged = StagedKeys(self.batch, cache, self.window_rows)

    def rotation(self, ratio: int) -> Rotation:
        assert ratio == 0, "a draft layer sees a window only"
        return self._rotation

    def target(self, length: int) -> Tensor:
        assert length == self.rings[0], "a draft layer has a window only"
        return self._targets


def _block_batch(blocks: Blocks, positions: Tensor, noise_id: int) -> Batch:
    """Lay out blocks of rows at positions [n, size]: the newest token, then noise."""
    (count, size), on = positions.shape, positions.device
    ids = torch.full((count, size), noise_id, dtype=torch.int32, device=on)
    ids[:, 0] = blocks.last
    zeros, seqs = torch.zeros_like(blocks.base), torch.arange(count + 1, device=on)
    return Batch(
        token_ids=ids.flatten(), positions=positions.flatten(),
        seq_of_row=seqs[:-1].repeat_interleave(size), starts=blocks.base + 1, cu_q=seqs * size,
        k_len=blocks.base + 1 + size, slots=blocks.slots, given_len=zeros, window_from=zeros,
        block_tables=torch.zeros((count, 1), dtype=torch.int32, device=on),
        logit_rows=torch.arange(count * size, device=on), max_k=size,
    )  # fmt: skip


class DraftHead:
    """The head of `model`, whose embedding and output head it shares; `weights` is scope "mtp".

    Raises `ConfigError` for tensors that contradict the config.
    """

    def __init__(self, model: Transformer, weights: Weights) -> None:
        config, width = model.config, model.config.hidden_size
        first, count = config.num_hidden_layers, config.num_nextn_predict_layers
        self.model = model
        self.targets = config.dspark_target_layer_ids
        self.layers = [
            Layer(config, config.layer_plan(first + i), weights.sub(f"{i}")) for i in range(count)
        ]
        begin, end, eps = weights.sub("0"), weights.sub(f"{count - 1}"), config.rms_norm_eps
        self.main_proj = QLinear(begin, "main_proj", width, len(self.targets) * width)
        self.main_norm = RmsNorm(begin, "main_norm", width, eps)
        # The layers' key projections once more, as one: main rows need nothing else of them.
        names = tuple(f"{i}.attn.wkv" for i in range(count))
        self.main_wkv = weights.fp8_stack(names, config.head_dim, width)
        self.norm = RmsNorm(end, "norm", width, eps)
        rank = config.dspark_markov_rank
        self.markov_embed = end.tensor("markov_head.embed.weight", config.vocab_size, rank)
        self.markov = Linear(end, "markov_head.head", config.vocab_size, rank)
        self.confidence = Linear(end, "confidence_head.proj", 1, width + rank)

    def feature(self, streams: Tensor) -> Tensor:
        """Return what the head takes of a target layer's input streams [T, n, D]: [T, D]."""
        return streams.to(torch.float32).mean(dim=1).to(streams.dtype)

    @in_range("draft keys")
    def store(self, features: Sequence[Tensor], ctx: StepContext) -> None:
        """Store the draft layers' keys of a step's rows; features [T, D], one per target layer.

        Rows of drafts that will be rejected are stored, too: the next block takes their places.
        """
        main = self.main_proj.partial(quantise_activation(torch.cat(list(features), dim=1)))
        parts, dtype = partial_gemm(self.main_norm.rounded(main), self.main_wkv)
        rotation, target = ctx.rotation(0), ctx.target(ctx.rings[0])
        for layer, part in zip(self.layers, parts.chunk(len(self.layers), dim=2), strict=True):
            ring = ctx.cache.windows[layer.plan.index]
            layer.attention.window.norm.store(Partial(part, dtype), rotation, ring, target)

    @torch.inference_mode()
    @in_range("drafts")
    def propose(self, blocks: Blocks, size: int, cache: DeviceCache, pick: Pick) -> Drafts:
        """Draft `size` tokens after each sequence's newest; `pick` chooses them one by one.

        All main rows up to `base` must be stored. Overwrites the `size` ring positions behind it.
        All ranks of a group call this together.
        """
        rows = size * len(blocks.base)
        self.model.exchange.start(StepRows(rows, rows))
        ctx = BlockContext(self.model, blocks, size, cache)
        streams = self.model.embed_rows(ctx.batch)
        norms = [layer.attn_norm for layer in self.layers[1:]]
        for layer, then in zip(self.layers, [*norms, None], strict=True):
            streams = layer(streams, ctx, then)
        y = hc_read(streams.x, streams.read)
        logits = torch.unflatten(self.model.head.float32(self.norm(y)), 0, (-1, size))
        states = torch.unflatten(y, 0, (-1, size))
        drafts, confidences, before = [], [], blocks.last
        for i in range(size):
            embedded = self.markov_embed[before]
            state = torch.cat((states[:, i], embedded.to(y.dtype)), dim=1)
            confidences.append(self.confidence.float32(state).squeeze(1))
            before = pick(i, logits[:, i] + self.markov.float32(embedded))
            drafts.append(before)
        return Drafts(torch.stack(drafts, dim=1), torch.stack(confidences, dim=1))
