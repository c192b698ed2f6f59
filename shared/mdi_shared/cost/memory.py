"""What fits into an accelerator's memory: a rank's weights, and the KV pool beside them.

Routed experts and Engram tables count as split over the ranks that share the experts, all other
weights as held by each. A step's workspace is what `gpu_memory_utilization` leaves free.

Read next: `footprint.py` (the weights), `run_description.py` (who asks).
"""

from collections.abc import Iterator

from mdi_shared.cost.footprint import weight_bytes
from mdi_shared.cost.hardware import Hardware
from mdi_shared.cost.shape import ModelShape

SPLIT_WEIGHTS = ("routed_experts", "engram_tables")
DEFAULT_UTILIZATION = 0.9
GB = 1e9


def rank_weight_bytes(shape: ModelShape, ep: int) -> float:
    """Return the bytes of weights that one of `ep` ranks holds."""
    weights = weight_bytes(shape)
    split = sum(weights[name] for name in SPLIT_WEIGHTS)
    return split / ep + sum(weights.values()) - split


def room_bytes(hardware: Hardware, shape: ModelShape, ep: int, utilization: float) -> float:
    """Return what a share of the device's memory leaves beside the weights; negative: too little.

    `utilization` is above 0 and at most 1.
    """
    return utilization * hardware.hbm_bytes - rank_weight_bytes(shape, ep)


def expert_splits(shape: ModelShape) -> Iterator[int]:
    """Yield the numbers of ranks that share the routed experts evenly, ascending."""
    experts = shape.n_routed_experts
    return (ranks for ranks in range(1, experts + 1) if experts % ranks == 0)
