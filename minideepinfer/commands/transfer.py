"""`mdi transfer`: predict step times on hardware, or for a model, that was never recorded.

Read next: `mdi_sim/fit/transfer.py`, docs/calibration.md ("Transfer").
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mdi_shared.cost.files import packaged_models, read_cost_file
from mdi_shared.cost.hardware import HARDWARE, hardware_by_name
from mdi_shared.cost.linear import LinearCost
from mdi_shared.cost.shape import SHAPES, ModelShape, shape_by_name
from mdi_shared.cost.work import decode_work, prefill_work
from mdi_shared.errors import ConfigError
from minideepinfer.commands import options as o
from minideepinfer.commands.declare import takes_options
from minideepinfer.commands.files import require_input, require_output, require_runs, write_json
from minideepinfer.commands.screen import facts_table, show_json, show_table

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mdi_shared.cost.predicted import PredictedCost

NAMES = {"fp8": "FP8 tensor cores", "bf16": "bf16 tensor cores", "fp32": "f32 vector units",
         "memory": "memory", "link": "link"}  # fmt: skip
# Steps shown: the official prefill geometry (docs/rules.md, R36) and two decode batches.
PREFILL_SHOWN = (4_096, 131_072)
DECODE_SHOWN = ((64, 4_096), (64, 131_072))


@dataclass(frozen=True, kw_only=True)
class TransferOptions:
    """What `mdi transfer` can be asked for."""

    model: Annotated[Path, typer.Argument(help="Fitted model, as mdi calibrate writes it.")]
    out: Annotated[Path, o.option("--out", "-o", metavar="FILE.json", help="The prediction.")]
    hardware: Annotated[str | None, o.option(
        "--hardware", metavar="NAME", help=f"Predict for one of {', '.join(HARDWARE)}, or "
        "FILE.json of peak rates (default: as fitted).")] = None  # fmt: skip
    to_model: Annotated[str | None, o.option(
        "--model", metavar="NAME|FILE.json", help=f"Predict for one of {', '.join(SHAPES)}, or for "
        "the dimensions another fitted model states (default: as fitted).")] = None  # fmt: skip
    ep: Annotated[int, o.option(
        "--ep", metavar="N",
        help="Ranks the experts are split over (default: 1).")] = 1  # fmt: skip
    from_hardware: Annotated[str | None, o.option(
        "--from-hardware", metavar="NAME", help="Peak rates of the recorded hardware, where its "
        "name tells none: as for --hardware.")] = None  # fmt: skip
    check: Annotated[list[Path] | None, o.option(
        "--check", metavar="RUN", help="Recorded run of the target, to state errors on; may be "
        "repeated.")] = None  # fmt: skip
    json: o.Json = False


@takes_options(TransferOptions)
def transfer(options: TransferOptions) -> None:
    """Predict step times of other hardware or another model from a fitted model.

    The target's roofline at the efficiencies the fitted model reached; simulate --cost reads the
    result and says that it was predicted, not measured.
    """
    model, to_model = options.model, options.to_model
    require_output("out", options.out, (".json",))
    if model.suffix:
        require_input(model)
    runs = options.check or []
    require_runs(runs)
    fitted = _fitted(model)
    target, source = (
        None if name is None else hardware_by_name(name)
        for name in (options.hardware, options.from_hardware)
    )
    from mdi_sim.fit.transfer import prediction_errors
    from mdi_sim.fit.transfer import transfer as predict

    shape = None if to_model is None else _shape(to_model)
    path = packaged_models().get(str(model), model)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    cost = predict(fitted, hardware=target, shape=shape, ep=options.ep, source_hardware=source,
                   origin={"name": path.name, "sha256": digest})  # fmt: skip
    checked = prediction_errors(cost, runs) if runs else {}
    document = cost.to_json()
    write_json(options.out, document)
    if options.json:
        show_json({**document, "checked": checked})
    else:
        show_table(*_tables(cost, checked))


def _fitted(path: Path) -> LinearCost:
    """Return a fitted model from its file; a prediction is none to predict from."""
    model = read_cost_file(path)
    if not isinstance(model, LinearCost):
        raise ConfigError("model", str(path), "is a prediction; give the fitted model it came from")
    return model


def _shape(name: str) -> ModelShape:
    """Return a built-in model's dimensions, or those a fitted model's file states."""
    if not name.endswith(".json"):
        return shape_by_name(name)
    path = Path(name)
    if not path.is_file():
        raise ConfigError("model", name, f"no such file, nor one of {', '.join(SHAPES)}")
    from mdi_sim.fit.transfer import fitted_shape

    return fitted_shape(_fitted(path))


def _tables(
    cost: "PredictedCost", checked: Mapping[str, Mapping[str, Any]]
) -> list["RenderableType"]:
    """Return what was predicted from what, for people."""
    basis = cost.basis
    about = f"{cost.shape.name} on {cost.hardware.name}, ep {cost.ep}: predicted, not measured"
    tables = [facts_table(about, [
        ("from", f"{basis['model']} on {basis['hardware']}, {basis['name']}, sha256 "
                 f"{basis['sha256'][:12]}"),
        ("host times", "as recorded there"),
    ])]  # fmt: skip
    for kind in ("prefill", "decode"):
        tables.append(facts_table(f"{kind}: what its recorded steps reach", _terms(basis[kind])))
    tables.append(facts_table("predicted device times", _examples(cost)))
    if checked:
        tables.append(facts_table("against the runs given", [
            (f"{kind}, {errors['n']:,} steps", _errors(errors)) for kind, errors in checked.items()
        ]))  # fmt: skip
    return tables


def _terms(reached: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for name, term in reached["terms"].items():
        took = f"{term['share_of_time']:.0%} of the time"
        if name == "overhead":
            rows.append(("fixed", f"{term['ns_per_layer'] / 1e3:,.0f} us per layer, {took}"))
        else:
            why = took if term["from"] == "fitted" else f"assumed, {took} is too little to tell"
            rows.append((NAMES[name], f"{term['efficiency']:.1%} of peak; {why}"))
    rows.append(("explains the fit", _errors(reached["explains_fit"])))
    return rows


def _examples(cost: "PredictedCost") -> list[tuple[str, str]]:
    """Return a few steps' times, and which share of the peak rates they amount to."""
    from mdi_shared.cost.roofline import PEAK, RooflineCost

    new, context = PREFILL_SHOWN
    works = {f"prefill, {new:,} new of {context:,} tokens":
             prefill_work(cost.shape, [(new, context, context)])}  # fmt: skip
    for batch, length in DECODE_SHOWN:
        works[f"decode, {batch} at {length:,} tokens"] = decode_work(cost.shape, [length] * batch)
    peak = RooflineCost(cost.hardware, cost.shape, ep=cost.ep, efficiencies=PEAK)
    rows = []
    for name, work in works.items():
        ns = cost.device_ns(work)
        rows.append((name, f"{ns / 1e6:,.1f} ms, {peak.device_ns(work) / ns:.0%} of peak rates"))
    return rows


def _errors(errors: Mapping[str, Any]) -> str:
    return (f"{errors['mape']:.1%} mean, {errors['p50']:.1%} median, {errors['p90']:.1%} P90, "
            f"{errors['bias']:+.1%} bias")  # fmt: skip
