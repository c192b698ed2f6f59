"""What speaks against a simulated run: a line each, for whoever reads its figures.

Read next: `run_description.py`, `docs/simulator.md`.
"""

from mdi_shared.chunking import fallback_note
from mdi_shared.cost.group import ASSUMED
from mdi_shared.cost.linear import LinearCost
from mdi_shared.cost.memory import GB, rank_weight_bytes
from mdi_shared.cost.predicted import PredictedCost
from mdi_shared.cost.roofline import RooflineCost
from mdi_shared.cost.step_cost import StepCost
from mdi_shared.cost.tails import state_bytes
from mdi_shared.run_description import RunDescription


def run_notes(run: RunDescription) -> list[str]:
    """Return what a reader of the run's figures should know; nothing for a real one."""
    if run.cost is None:
        return []
    found = (
        _memory(run, run.cost), _model(run, run.cost), _ranks(run, run.cost),
        fallback_note(run.scheduler, run.cost),
    )  # fmt: skip
    return [note for note in found if note is not None]


def _memory(run: RunDescription, cost: StepCost) -> str | None:
    """Say when model and KV pool exceed the device of a roofline or prediction."""
    if not isinstance(cost, RooflineCost | PredictedCost):
        return None
    shape, config = run.shape, run.scheduler
    weights = rank_weight_bytes(shape, cost.ep)
    pool = config.num_blocks * shape.kv_bytes_per_block(config.block_size)
    pool += state_bytes(shape, config.num_slots, config.num_tails)
    if weights + pool <= cost.hardware.hbm_bytes:
        return None
    return (
        f"{shape.name} with ep {cost.ep} needs {weights / GB:,.0f} GB of weights and "
        f"{pool / GB:,.1f} GB of caches per device, {cost.hardware.name} has "
        f"{cost.hardware.hbm_bytes / GB:,.0f} GB: predicted as if they fitted"
    )


def _model(run: RunDescription, cost: StepCost) -> str | None:
    """Say when a fitted model was fitted for another model than the one simulated."""
    fitted_for = cost.fit.get("model") if isinstance(cost, LinearCost) else None
    if fitted_for in (None, run.shape.name):
        return None
    return f"step times were fitted for {fitted_for}, but {run.shape.name} is simulated"


def _ranks(run: RunDescription, cost: StepCost) -> str | None:
    """Say when step times are for another number of ranks, and what a fitted exchange rests on."""
    ranks = run.ranks
    if isinstance(cost, LinearCost) and ranks > 1:
        return _group(cost, ranks)
    if not isinstance(cost, PredictedCost) or cost.ep == ranks:
        return None
    return (f"step times were predicted with experts split over {cost.ep}, but {ranks} "
            f"rank{'s are' if ranks > 1 else ' is'} simulated")  # fmt: skip


def _group(cost: LinearCost, ranks: int) -> str | None:
    if cost.group is None:
        return ("a step takes as long as its slowest rank: what exchanging rows adds is not known "
                f"for {cost.fit.get('hardware') or 'unnamed hardware'}")  # fmt: skip
    if cost.group.basis["kind"] == ASSUMED:
        terms, basis = cost.group.prefill, cost.group.basis
        return (
            "step times were fitted on one rank; exchanging rows is assumed, not measured: "
            f"{terms.const / 1e6:.3g} ms a step and {terms.rows:.3g} ns a row, at "
            f"{basis['link']:.0%} of the link of {basis['hardware']}"
        )
    if cost.group.ranks != ranks:
        return (f"the exchange was fitted to groups of {cost.group.ranks}, but {ranks} ranks are "
                "simulated")  # fmt: skip
    return None
