"""What prefix reuse takes of a device: memory of tails and longer rings, time of copies.

The times are bytes over bandwidth and an assumed cost of the launches; nothing of it is measured.

Read next: `mdi_shared/prefix/tails.py` (what a tail is), `step_cost.py` (the step's own time).
"""

from mdi_shared.cost.hardware import Hardware, hardware_in
from mdi_shared.cost.linear import LinearCost
from mdi_shared.cost.roofline import Efficiencies
from mdi_shared.cost.shape import ModelShape
from mdi_shared.cost.step_cost import StepCost

LAUNCHES_NS = 10_000  # of a copy's three kernels, assumed


def tail_bytes(shape: ModelShape) -> int:
    """Return the bytes of one tail: a block's window keys of each layer (its few ids not counted).

    Under bounded replay those of the producer layers: a hit ends before the others' first row.
    """
    layers = shape.num_producer_layers if shape.replay_keep_tokens else shape.num_hidden_layers
    return layers * shape.sliding_window * shape.window_bytes


def state_bytes(shape: ModelShape, num_slots: int, num_tails: int) -> int:
    """Return the bytes of slots, and with tails those of tails and of rings twice as long."""
    per_slot = shape.state_bytes_per_slot + (shape.ring_bytes_per_slot if num_tails else 0)
    return num_slots * per_slot + num_tails * tail_bytes(shape)


def copies_ns(shape: ModelShape, cost: StepCost, count: int) -> int:
    """Return the device time of so many copies of tails; 0 where the cost is of no known device."""
    hardware = _hardware(cost)
    if hardware is None or not count:
        return 0
    moved = 2 * tail_bytes(shape)  # read and written
    share = getattr(cost, "efficiencies", Efficiencies()).memory
    return count * (LAUNCHES_NS + round(moved * 1e9 / (hardware.hbm_bytes_per_s * share)))


def _hardware(cost: StepCost) -> Hardware | None:
    if isinstance(cost, LinearCost):
        return hardware_in(str(cost.fit.get("hardware")))
    found = getattr(cost, "hardware", None)
    return found if isinstance(found, Hardware) else None
