"""Fits what a group of ranks adds to a single-rank model: `calibrate_group(paths, base)`.

Ranks wait for each other in every layer, so their own times cannot be told from a recording of the
group. They come from a model fitted to one rank; step totals then give the group's terms
(docs/rules.md, R34).

Read next: `mdi_shared/cost/group.py` (the terms), `features.py` (which steps count).
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from mdi_shared.cost.group import FITTED, GroupCost, GroupTerms
from mdi_shared.cost.linear import LinearCost
from mdi_shared.errors import ConfigError
from mdi_sim.fit.calibrate import FEWEST_STEPS, Recorded, read_recorded, require_alike
from mdi_sim.fit.diagnostics import errors, folds
from mdi_sim.fit.features import (
    DECODE,
    PREFILL,
    Floats,
    all_steps,
    kind_rows,
    measuring_steps,
    usual_launch_ms,
)
from mdi_sim.fit.robust import choose_columns, fit_nonnegative
from mdi_sim.fit.steps import predict
from mdi_traces.columns import Bools, ints
from mdi_traces.schema import this_generator


@dataclass(frozen=True, slots=True)
class GroupSteps:
    """Steps of one kind, one entry per step of a group, over all runs.

    `own_ns` is what the slowest rank would take by itself, `rows` the mean over ranks, idle ones
    included, and `ns` the time from the last rank's start to the last one's end.
    """

    own_ns: Floats
    rows: Floats
    ns: Floats
    left_out: int

    def __len__(self) -> int:
        return len(self.ns)

    def take(self, which: Bools) -> "GroupSteps":
        """Return the steps where `which` is True."""
        return GroupSteps(self.own_ns[which], self.rows[which], self.ns[which], self.left_out)


def calibrate_group(paths: Sequence[str | os.PathLike[str]], base: LinearCost) -> LinearCost:
    """Return `base` with group terms fitted to runs of several ranks, each given as a path.

    Raises `TraceError` for a run that cannot be used, and `ConfigError` for runs that do not belong
    together or to `base`, or have too few steps.
    """
    runs = [read_recorded(path, of_group=True) for path in paths]
    require_alike(runs)
    _require_same_model(runs[0], base)
    ranks = _number_of_ranks(runs)
    terms, diagnostics = {}, {}
    for kind in (PREFILL, DECODE):
        steps = gather_group_steps([run.steps for run in runs], kind, base, ranks)
        if len(steps) < FEWEST_STEPS:
            raise ConfigError(f"group {kind} steps", len(steps), f"at least {FEWEST_STEPS} are "
                              f"needed ({steps.left_out} left out)")  # fmt: skip
        terms[kind], diagnostics[kind] = _fit_and_diagnose(steps)
    basis = {"kind": FITTED, "generator": this_generator(),
             "traces": [run.describe() for run in runs], **diagnostics}  # fmt: skip
    group = GroupCost(ranks=ranks, prefill=terms[PREFILL], decode=terms[DECODE], basis=basis)
    return replace(base, group=group)


def _require_same_model(run: Recorded, base: LinearCost) -> None:
    about = run.metadata
    for what, there in (("hardware", about.hardware), ("model", about.model)):
        if base.fit.get(what) != there:
            raise ConfigError(what, there, f"of {run.name} differs from {base.fit.get(what)!r}, "
                              "for which the base was fitted")  # fmt: skip
    shapes = base.fit.get("shape"), about.config.get("shape")
    if None not in shapes and shapes[0] != shapes[1]:
        raise ConfigError("model", about.model, f"of {run.name} has other dimensions or replay "
                          "options than the base was fitted for")  # fmt: skip


def _number_of_ranks(runs: Sequence[Recorded]) -> int:
    counts = {run.name: 1 + int(ints(run.steps["rank"]).max()) for run in runs}
    (first, ranks), *others = counts.items()
    for name, count in others:
        if count != ranks:
            raise ConfigError("ranks", count, f"of {name} differs from {ranks} of {first}: group "
                              "terms hold for one number of ranks")  # fmt: skip
    return ranks


def gather_group_steps(
    tables: Sequence[pa.Table], kind: str, base: LinearCost, ranks: int
) -> GroupSteps:
    """Return the group steps of a kind, from step tables of runs with so many ranks each.

    A step is left out when it measures nothing on some rank.
    """
    usual_ms = usual_launch_ms(tables, kind)
    parts = [_gather_run(_aligned(table, ranks), kind, base, usual_ms) for table in tables]
    columns = {name: np.concatenate([getattr(part, name) for part in parts])
               for name in ("own_ns", "rows", "ns")}  # fmt: skip
    return GroupSteps(left_out=sum(part.left_out for part in parts), **columns)


def _gather_run(
    each: Sequence[pa.Table], kind: str, base: LinearCost, usual_ms: float
) -> GroupSteps:  # fmt: skip
    """Return the group steps of a run, given each rank's steps in the order of the group's."""
    terms = base.prefill if kind == PREFILL else base.decode
    busy = [kind_rows(part, kind) for part in each]
    measuring = [measuring_steps(part, kind, usual_ms)[0] for part in each]
    usable = np.all([m | ~b for m, b in zip(measuring, busy, strict=True)], axis=0)
    wanted = np.any(busy, axis=0)
    starts = np.max([ints(part["t_dev_start"]) for part in each], axis=0)
    ends = np.max([ints(part["t_dev_end"]) for part in each], axis=0)
    own = np.max([predict(terms, all_steps(part, kind)) * b
                  for part, b in zip(each, busy, strict=True)], axis=0)  # fmt: skip
    # An idle rank runs a placeholder row, which its tables do not count.
    rows = np.mean([np.maximum(ints(part["n_tokens"]), 1) for part in each], axis=0)
    keep = wanted & usable & (ends > starts)
    return GroupSteps(own[keep], rows[keep], (ends - starts)[keep].astype(np.float64),
                      int((wanted & ~keep).sum()))  # fmt: skip


def _aligned(table: pa.Table, ranks: int) -> list[pa.Table]:
    """Return each rank's steps, in order, of those that all ranks have."""
    each = [table.filter(pc.equal(table["rank"], rank)).sort_by("step") for rank in range(ranks)]
    common = reduce(np.intersect1d, (ints(part["step"]) for part in each))
    return [part.filter(pa.array(np.isin(ints(part["step"]), common))) for part in each]


def fit_group_terms(steps: GroupSteps) -> tuple[GroupTerms, dict[str, str]]:
    """Fit the terms, and say which columns were dropped and why.

    Where the ranks' own time never varies, what it costs cannot be told from a constant: it then
    counts as it is.
    """
    names = ("own", "rows")
    x = np.column_stack([steps.own_ns, steps.rows])
    kept, dropped = choose_columns(x, names, ("rows",))
    y = np.maximum(steps.ns - steps.own_ns, 0.0) if "own" in dropped else steps.ns
    columns = np.column_stack([np.ones(len(steps)), x[:, kept]])
    rates = fit_nonnegative(columns, y, 1.0 / steps.ns).tolist()
    return GroupTerms(
        **dict(zip(("const", *(names[i] for i in kept)), rates, strict=True))
    ), dropped


def predict_group(terms: GroupTerms, steps: GroupSteps) -> Floats:
    """Return group times, ns, as `GroupTerms.device_ns` does but for rounding."""
    times: Floats = terms.const + terms.own * steps.own_ns + terms.rows * steps.rows
    return times


def _fit_and_diagnose(steps: GroupSteps) -> tuple[GroupTerms, dict[str, Any]]:
    terms, dropped = fit_group_terms(steps)
    own = errors(steps.ns, predict_group(terms, steps))
    return terms, {**own, "held_out": _held_out(steps), "dropped": dropped,
                   "left_out": steps.left_out}  # fmt: skip


def _held_out(steps: GroupSteps) -> dict[str, Any]:
    """Return errors of predicting each class of rows and own time by a fit on the others."""
    shapes = np.floor(np.log2(np.maximum([steps.rows, steps.own_ns], 1.0))).astype(int).T
    fold = folds([tuple(shape) for shape in shapes.tolist()])
    if not fold.any():
        return {"mape": None, "why_not": "all steps have one shape"}
    predicted = np.zeros(len(steps))
    for each in np.unique(fold):
        test = fold == each
        predicted[test] = predict_group(fit_group_terms(steps.take(~test))[0], steps.take(test))
    return errors(steps.ns, predicted)
