"""`mdi calibrate`: fit a step-time model to runs and say how well it predicts.

Read next: `mdi_sim/fit/calibrate.py`, docs/calibration.md.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mdi_shared.errors import ConfigError
from minideepinfer.commands.files import require_input, require_output, require_runs, write_json
from minideepinfer.commands.screen import facts_table, progress, show_json, show_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mdi_shared.cost.linear import LinearCost


def calibrate(
    traces: Annotated[list[Path], typer.Argument(help="Runs, by prefix or one of their files.")],
    *,
    out: Annotated[
        Path,
        typer.Option("--out", "-o", metavar="FILE.json", help="The model.", show_default=False),
    ],
    allow_constant: Annotated[
        bool,
        typer.Option("--allow-constant", help="Fit although a main feature never varies."),
    ] = False,
    base: Annotated[
        Path | None,
        typer.Option(
            "--base",
            metavar="MODEL.json",
            show_default=False,
            help="Fit what a group of ranks adds to this single-rank model.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Fit step times of a model and its host to recorded runs; simulate --cost reads the result.

    Prints coefficients and errors, those on held-out recordings first. With --base the runs are of
    several ranks, and the result is the base with the time that exchanging rows adds.
    """
    require_output("out", out, (".json",))
    require_runs(traces)
    cost = _fit(traces, base, allow_constant=allow_constant)
    document = cost.to_json()
    write_json(out, document)
    if as_json:
        show_json(document)
    else:
        show_table(*(_tables(cost) if base is None else _group_tables(cost)))


def _fit(traces: list[Path], base: Path | None, *, allow_constant: bool) -> "LinearCost":
    """Fit a model to runs of one rank, or the group terms of `base` to runs of several."""
    from mdi_shared.cost.linear import LinearCost
    from mdi_sim.fit.calibrate import fit_runs, number_of_fits, read_recorded
    from mdi_sim.fit.group import calibrate_group

    if base is None:
        runs = [read_recorded(path) for path in traces]
        with progress(number_of_fits(runs), "fits") as advance:
            return fit_runs(runs, allow_constant=allow_constant, on_fit=advance)
    if allow_constant:
        raise ConfigError("allow_constant", True, "does not go with --base: what never varies is "
                          "left out of a group's terms anyway")  # fmt: skip
    require_input(base)
    return calibrate_group(traces, LinearCost.from_json(base))


def _group_tables(cost: "LinearCost") -> list["RenderableType"]:
    """Return a group's terms and how well they fit, for people."""
    assert cost.group is not None, "as fitted"
    basis, tables = cost.group.basis, []
    rows = [(t["name"], f"{t['steps']:,} steps of ranks, sha256 {t['sha256'][:12]}")
            for t in basis["traces"]]  # fmt: skip
    tables.append(facts_table(f"groups of {cost.group.ranks} ranks", rows))
    for kind, terms in (("prefill", cost.group.prefill), ("decode", cost.group.decode)):
        diagnosis = basis[kind]
        rows = [("error, shapes held out", _error(diagnosis["held_out"])),
                ("error, own steps", _error(diagnosis)),
                ("const", f"{terms.const / 1e6:.4g} ms per step"),
                ("own", f"{terms.own:.4g} of the slowest rank's own time"),
                ("rows", f"{terms.rows:.6g} ns per row, mean over ranks")]  # fmt: skip
        rows += [(f"dropped {name}", why) for name, why in diagnosis["dropped"].items()]
        tables.append(facts_table(f"{kind}: {diagnosis['n']:,} steps of groups", rows))
    return tables


def _tables(cost: "LinearCost") -> list["RenderableType"]:
    """Return what the model is and how well it fits, for people."""
    fit, tables = cost.fit, []
    count = len(fit["traces"])
    about = (f"{fit['model']} on {fit['hardware'] or 'unnamed hardware'}, {count} "
             f"run{'s' if count > 1 else ''}")  # fmt: skip
    tables.append(facts_table(about, [(t["name"], f"{t['steps']:,} steps, sha256 "
                                       f"{t['sha256'][:12]}") for t in fit["traces"]]))  # fmt: skip
    for kind, terms in (("prefill", cost.prefill), ("decode", cost.decode)):
        diagnosis = fit[kind]
        rows = _errors(diagnosis, [trace["name"] for trace in fit["traces"]])
        for name, unit in fit["units"][kind].items():
            value = getattr(terms, name)
            if isinstance(value, tuple) and value:
                times = ", ".join(f"{size}: {ns / 1e6:.3f}" for size, ns in value)
                rows.append((f"{name}, ms by rows", times))
            elif value:
                rows.append((name, f"{value:.6g} {unit}"))
        rows += [(f"dropped {name}", why) for name, why in diagnosis["dropped"].items()]
        rows += [(f"{count:,} left out", why) for why, count in diagnosis["left_out"].items()]
        tables.append(facts_table(f"{kind}: {diagnosis['n']:,} steps", rows))
    host = [(name, f"{value / 1e3:,.3f} us") for name, value in cost.to_json()["host"].items()
            if value is not None]  # fmt: skip
    for name, times in fit["host"].items():
        if times["n"]:
            host.append((name, f"{times['p50_ns'] / 1e3:,.1f} us median, "
                         f"{times['p90_ns'] / 1e3:,.1f} P90 of {times['n']:,}"))  # fmt: skip
    tables.append(facts_table("host", host))
    return tables


def _errors(diagnosis: Mapping[str, Any], names: Sequence[str]) -> list[tuple[str, str]]:
    """Return the error lines of one kind of step; `names` are the runs'."""
    held_out, shapes = diagnosis["held_out"], diagnosis["held_out_shapes"]
    rows = [(f"error, {held_out['by']}s held out", _error(held_out))]
    rows += [(f"  {name}", _error(each)) for name, each in held_out.get("by_class", {}).items()]
    if held_out["by"] == "recording":
        worst = max(held_out["recordings"], key=lambda each: float(each["mape"]))
        rows.append((f"  worst, {', '.join(names[run] for run in worst['runs'])}", _error(worst)))
        rows.append(("error, shapes held out", _error(shapes)))
    rows.append(("  longest contexts held out", _error(diagnosis["extrapolation"])))
    rows.append(("error, own steps", _error(diagnosis)))
    if not diagnosis["usable_for_control"]:
        rows.append(("warning", "errors are too large to choose chunk sizes by"))
    return rows


def _error(errors: Mapping[str, Any]) -> str:
    if errors["mape"] is None:
        return f"not known: {errors['why_not']}"
    mean, median, p90, most = (f"{errors[name]:.1%}" for name in ("mape", "p50", "p90", "max"))
    return (f"{mean} mean, {median} median, {p90} P90, {most} max, {errors['bias']:+.1%} bias, "
            f"n = {errors['n']:,}")  # fmt: skip
