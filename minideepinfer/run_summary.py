"""A summary that says what its numbers rest on, and prints as a table.

The metrics are those of `mdi_analysis`; this adds what they rest on (the cost model, how far it is
calibrated, how many steps it extrapolated), and, for a simulation, the time it took. It is made
from a run's metadata, so a run read from its files says the same as a fresh one.

Read next: `mdi_analysis/summary.py` (the metrics), docs/metrics.md (what they mean).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from io import StringIO
from typing import TYPE_CHECKING, Any

import numpy as np

import mdi_analysis
from mdi_analysis import SLO, MetadataLike, RunLike, Summary
from mdi_shared.cost.linear import LinearCost
from mdi_shared.errors import ConfigError
from mdi_shared.policies import NO_POLICY
from mdi_sim.fit.features import extrapolated_steps
from mdi_traces.run import Run

if TYPE_CHECKING:
    from rich.table import Table

PRINT_COLUMNS = 100


@dataclass(frozen=True)
class RunSummary(Summary):
    """All metrics of a run, what they rest on, and the wall time of a simulation, s.

    `basis` is None for a recorded run, `wall_s` for anything but a fresh simulation. `assumed`
    says what was chosen for the user, such as the number of ranks. `policy` names the scheduling
    policy, None for the engine's own rules.
    `extrapolated` counts the steps outside what a fitted step-time model has seen: "steps" in all,
    "of", and by feature; all of them where times were predicted, None when neither was used.
    """

    basis: str | None = None
    assumed: tuple[str, ...] = ()
    wall_s: float | None = None
    extrapolated: Mapping[str, int] | None = None
    policy: str | None = None

    @property
    def speedup(self) -> float | None:
        """Simulated over wall time."""
        return self.throughput.span_s / self.wall_s if self.wall_s else None

    def table(self) -> "Table":
        """Return a rich table for people; `print` shows the same."""
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid()
        sentences = [Text(sentence, style="italic") for sentence in self.sentences()]
        if self.assumed:
            grid.add_row(sentences.pop(0))
        grid.add_row(super().table())
        for sentence in sentences:
            grid.add_row(sentence)
        return grid

    def sentences(self) -> list[str]:
        """Return what the figures rest on: what was assumed, how fast, which step times."""
        found = [f"assumed: {'; '.join(self.assumed)}"] if self.assumed else []
        if self.speedup is not None:
            found.append(f"{self.throughput.span_s:,.1f} s simulated in {self.wall_s:,.2f} s, "
                         f"{self.speedup:,.0f} times as fast")  # fmt: skip
        if self.policy is not None:
            found.append(f"scheduling policy: {self.policy}")
        if self.basis is not None:
            found.append(self.basis)
        if self.extrapolated is not None and self.extrapolated["steps"]:
            found.append(_warning(self.extrapolated))
        return found

    def __str__(self) -> str:
        from rich.console import Console

        text = StringIO()
        Console(file=text, width=PRINT_COLUMNS, color_system=None).print(self.table())
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def summarize(
    run: RunLike,
    slo: SLO | None = None,
    *,
    n_gpus: int | None = None,
    itl: bool = True,
    wall_s: float | None = None,
) -> RunSummary:
    """Compute every metric of a run; see `mdi_analysis.summarize`."""
    found = mdi_analysis.summarize(run, slo, n_gpus=n_gpus, itl=itl)
    values = {field.name: getattr(found, field.name) for field in fields(found)}
    described = run.metadata.config or {}
    assumed, policy = described.get("assumed"), described.get("policy")
    texts = assumed if isinstance(assumed, list | tuple) else ()
    return RunSummary(
        **values, basis=label(run.metadata), wall_s=wall_s, extrapolated=count_extrapolated(run),
        assumed=tuple(text for text in texts if isinstance(text, str)),
        policy=policy if isinstance(policy, str) and policy != NO_POLICY else None,
    )  # fmt: skip


def count_extrapolated(run: RunLike) -> dict[str, int] | None:
    """Count a simulated run's steps outside what its fitted model has seen; see `RunSummary`."""
    cost = (run.metadata.config or {}).get("cost")
    if not isinstance(run, Run) or not isinstance(cost, Mapping):
        return None
    if cost.get("kind") == "predicted":  # nothing was recorded there: all of them
        return {"steps": len(run.steps_table), "of": len(run.steps_table)}
    if cost.get("kind") != "linear":
        return None
    try:
        model = LinearCost.from_description(cost)
    except ConfigError:
        return None  # the run is of a version whose models had another form
    found = extrapolated_steps(run.steps_table, model)
    any_of = np.zeros(len(run.steps_table), dtype=bool)
    for which in found.values():
        any_of |= which
    by_feature = {name: int(which.sum()) for name, which in found.items()}
    return {"steps": int(any_of.sum()), "of": len(any_of), **by_feature}


def _warning(extrapolated: Mapping[str, int]) -> str:
    if set(extrapolated) == {"steps", "of"}:
        return (f"extrapolated: all {extrapolated['of']:,} steps, nothing was recorded on this "
                "hardware with this model")  # fmt: skip
    by_feature = ", ".join(
        f"{name} {count:,}" for name, count in extrapolated.items() if name not in ("steps", "of")
    )
    return (f"extrapolated: {extrapolated['steps']:,} of {extrapolated['of']:,} steps lie outside "
            f"what the model was fitted on ({by_feature})")  # fmt: skip


def label(metadata: MetadataLike) -> str | None:
    """Return what the times of a run rest on; None for a run that was not simulated."""
    if metadata.source != "simulator":
        return None
    cost = (metadata.config or {}).get("cost")
    if not isinstance(cost, Mapping) or "kind" not in cost:
        return "simulated; the cost model was not recorded"
    ranks = (metadata.config or {}).get("ranks", 1)
    try:
        group = _group_label(cost.get("group"), ranks) if ranks > 1 else ""
        return f"simulated; step times: {cost_label(cost)}{group}"
    except (AttributeError, KeyError, TypeError, ValueError):  # written by another program
        return "simulated; the cost model was recorded in another form"


def cost_label(cost: Mapping[str, Any]) -> str:
    """Return name and calibration of a cost model, given what its `describe()` said."""
    kind = cost["kind"]
    if kind == "roofline":
        return (
            f"roofline of {cost['hardware']} (ep {cost['ep']}), uncalibrated: "
            "peak rates times assumed efficiencies"
        )
    if kind == "linear":
        return f"fitted linear model, {_held_out(cost.get('fit', {}))}"
    if kind == "predicted":
        basis = cost.get("basis", {})
        return (
            f"predicted for {cost['hardware']} (ep {cost['ep']}), not measured: its roofline at "
            f"the efficiencies of {basis.get('model')} on {basis.get('hardware')}"
        )
    if kind == "constant":
        return "constant, an assumption"
    return f"{kind}, calibration not stated"


def _group_label(group: object, ranks: int) -> str:
    """Return what a fitted model's group term rests on; nothing when there is none."""
    if not isinstance(group, Mapping):
        return ""
    basis = group.get("basis", {})
    if basis.get("kind") == "assumed":
        return f"; exchange of {ranks} ranks assumed"
    found = {kind: basis.get(kind, {}).get("held_out", {}) for kind in ("prefill", "decode")}
    errors = [f"{kind} {each['mape']:.1%}" for kind, each in found.items() if each.get("mape")]
    stated = f", held-out error: {', '.join(errors)}" if errors else ""
    return f"; exchange fitted to groups of {group.get('ranks')}{stated}"


def _held_out(fit: Mapping[str, Any]) -> str:
    """Return the held-out error of a fit: `held_out_mape` of its prefill and decode parts."""
    errors = []
    for kind in ("prefill", "decode"):
        part = fit.get(kind)
        error = part.get("held_out_mape") if isinstance(part, Mapping) else None
        if isinstance(error, int | float) and not isinstance(error, bool):
            errors.append(f"{kind} {error:.1%}")
    return f"held-out error: {', '.join(errors)}" if errors else "held-out error not stated"
