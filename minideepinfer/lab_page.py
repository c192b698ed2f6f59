"""The page of a lab: the question and its answer, then charts to choose, hover over and zoom into.

Nothing is decided here: the sentence and the ranking are those of `lab_report.py`.

Read next: `mdi_analysis/live_page.py` (the page), docs/lab.md (how to read it).
"""

from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

from mdi_analysis.charts import SERIES, Chart, Panel, layout, shown_text, with_menu
from mdi_analysis.live_page import LivePage
from mdi_analysis.report import counted, number, percent, plain
from mdi_sim.search.rows import COLUMNS
from mdi_sim.search.statistics import VARIANT, Standing, is_relative
from minideepinfer.lab_report import failures, ranking_sheet

if TYPE_CHECKING:
    import pandas as pd

    from minideepinfer.lab_result import LabResult

# What the menu of a chart over loads offers besides the measure that ranks.
OFFERED = ("e2e_ms_mean", "e2e_ms_p99", "ttft_ms_mean", "ttft_ms_p99", "tpot_ms_mean",
           "goodput_share", "output_tok_s", "recomputed_share", "e2e_over_bound")  # fmt: skip
BOUNDED = {"e2e_ms_mean": "e2e_over_bound", "ttft_ms_mean": "ttft_over_bound"}
DASHES = ("solid", "dash", "dot", "dashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "star")


def lab_page(result: "LabResult", measure: str | None = None) -> str:
    """Return the page of a lab as HTML text, ranked by `measure` (left out: the lab's own)."""
    measure = measure or result.measure
    sheet = ranking_sheet(result, measure)
    standings = result.ranking(measure)
    names = {each.variant: row[1] for each, row in zip(standings, sheet.rows, strict=True)}
    panels = {}
    if len(standings) > 1:
        panels["change"] = Panel(
            "Against the baseline", f"Change of {measure}; bars are intervals that all hold at "
            "once with 95 %. One that crosses the line is no sure difference.",
            _change_chart(standings, names, measure))  # fmt: skip
    ran = result.frame[result.frame["error"].isna()]
    for number_, trace in enumerate(result.plan["traces"]):
        mine = ran[ran["trace"] == trace]
        panels[f"load{number_}"] = Panel(
            f"Over load: {trace}", "Means over seeds; choose the measure above the chart, click a "
            "name below it to hide it. No policy can come below the grey line.",
            _load_chart(result, mine, names, measure))  # fmt: skip
    panels["front"] = Panel(
        "Mean against tail", "Each point is a variant under one load. Left is better for most, "
        "lower for the slowest.", _front_chart(result, ran, names))  # fmt: skip
    return LivePage(
        _question(result), f"{result.sentence(measure)}.", _tiles(result, standings, names),
        panels, [sheet], failures(result),
    ).html()  # fmt: skip


def _question(result: "LabResult") -> str:
    plan = result.plan
    axes = [(len(plan["policies"]), "policy", "policies"),
            (len(plan["placements"]), "placement", "placements"),
            (len(plan["settings"]), "setting", "settings")]  # fmt: skip
    varied = [f"{count} {many}" for count, _, many in axes if count > 1]
    what = " and ".join(varied) or "this policy"
    return f"Which of {what} serves {', '.join(map(str, plan['traces']))} best?"


def _tiles(
    result: "LabResult", standings: Sequence[Standing], names: dict[Any, str]
) -> dict[str, str]:
    best, over = standings[0], result.frame["e2e_over_bound"].min()
    return {
        "ranks first": names[best.variant],
        "least mean latency over its bound": number(over),
        "variants": f"{len(standings):,}",
        "runs": f"{len(result.frame):,}",
        "workloads, seeds": f"{len(result.plan['traces']) * len(result.plan['loads'])}, "
        f"{len(result.plan['seeds'])}",
    }


def _change_chart(standings: Sequence[Standing], names: dict[Any, str], measure: str) -> Chart:
    """Mean change of each variant, with its interval, best on top."""
    rows = [(names[each.variant], each.change) for each in standings if each.change is not None]
    mean = [change.mean for _, change in rows]
    low, high = ([0 if end is None else abs(end - change.mean) for end, (_, change) in
                  zip(ends, rows, strict=True)]
                 for ends in ([c.low for _, c in rows], [c.high for _, c in rows]))  # fmt: skip
    by = percent if is_relative(measure) or measure.endswith("_share") else number
    data = [{
        "type": "scatter", "mode": "markers", "x": mean, "y": [shown_text(n) for n, _ in rows],
        "marker": {"size": 10, "color": SERIES[0]}, "showlegend": False,
        "error_x": {"type": "data", "symmetric": False, "array": high, "arrayminus": low,
                    "thickness": 2, "color": SERIES[0]},
        "text": [f"{shown_text(n)}: {by(c.mean)}" + ("" if c.low is None or c.high is None else
                 f"<br>{by(c.low)} to {by(c.high)}, {counted(c.n, 'seed')}") for n, c in rows],
        "hovertemplate": "%{text}<extra></extra>",
    }]  # fmt: skip
    found = layout(f"change of {measure}", "", height=90 + 38 * max(len(rows), 2))
    found["yaxis"] |= {"autorange": "reversed", "type": "category"}
    found["xaxis"] |= {"zeroline": True, "zerolinewidth": 2, "zerolinecolor": "#888"}
    if by is percent:
        found["xaxis"]["tickformat"] = "+.0%"
    return {"data": plain(data), "layout": found}


def _load_chart(
    result: "LabResult", rows: "pd.DataFrame", names: dict[Any, str], measure: str
) -> Chart:
    """A line for each variant over the loads, and the bound; a menu chooses the measure."""
    loads = list(result.plan["loads"])
    offered = [each for each in dict.fromkeys((measure, *OFFERED)) if rows[each].notna().any()]
    units = {name: unit for name, _, unit, _ in COLUMNS}
    data: list[dict[str, Any]] = []
    values = []
    looks = zip(cycle(SERIES), [dash for dash in DASHES for _ in SERIES], strict=False)
    for (variant, mine), (colour, dash) in zip(
        rows.groupby(list(VARIANT), sort=False), looks, strict=False
    ):
        means = mine.groupby("load")[offered].mean().reindex(loads)
        values.append([means[each].tolist() for each in offered])
        data.append({"type": "scatter", "mode": "lines+markers", "name": shown_text(names[variant]),
                     "x": loads, "line": {"color": colour, "dash": dash, "width": 2},
                     "marker": {"size": 7}})  # fmt: skip
    values.append([_bound(rows, each, loads) for each in offered])
    data.append({"type": "scatter", "mode": "lines", "name": "bound", "x": loads,
                 "line": {"color": "#888888", "width": 5}, "opacity": 0.5})  # fmt: skip
    buttons: list[dict[str, Any]] = []
    for place, each in enumerate(offered):
        unit = units[each]
        title = f"{each} ({unit})" if unit not in ("", "1") else each
        buttons.append({"label": title, "method": "update", "args": [
            {"y": [own[place] for own in values]},
            {"yaxis.title.text": title, "yaxis.autorange": True}]})  # fmt: skip
    for trace, own in zip(data, values, strict=True):
        trace["y"] = own[0] if offered else []
    found = layout("load", "")
    found["xaxis"] |= {"type": "category"}
    if buttons:
        found["yaxis"]["title"]["text"] = buttons[0]["label"]
    return {"data": plain(data), "layout": with_menu(plain(buttons), found)}


def _bound(rows: "pd.DataFrame", measure: str, loads: list[str]) -> list[float | None]:
    """Return the mean over seeds of what no policy is below, by load; None where none is known."""
    if measure == "e2e_over_bound":
        return [1.0] * len(loads)
    over = BOUNDED.get(measure)
    if over is None or rows.empty:
        return [None] * len(loads)
    # The least of a seed's runs holds for all of them: mixed steps can do what others cannot.
    each = (rows[measure] / rows[over]).groupby([rows["load"], rows["seed"]]).min()
    found: list[float | None] = each.groupby("load").mean().reindex(loads).tolist()
    return found


def _front_chart(result: "LabResult", rows: "pd.DataFrame", names: dict[Any, str]) -> Chart:
    """P99 over mean of end-to-end latency; colours are variants, symbols loads."""
    data = []
    symbols = dict(zip(result.plan["loads"], cycle(SYMBOLS), strict=False))
    for (variant, mine), colour in zip(
        rows.groupby(list(VARIANT), sort=False), cycle(SERIES), strict=False
    ):
        means = mine.groupby(["trace", "load"], sort=False)[["e2e_ms_mean", "e2e_ms_p99"]].mean()
        data.append({
            "type": "scatter", "mode": "markers", "name": shown_text(names[variant]),
            "x": means["e2e_ms_mean"].tolist(), "y": means["e2e_ms_p99"].tolist(),
            "text": [shown_text(f"{names[variant]}, {trace}, {load}") for trace, load in
                     means.index],
            "marker": {"color": colour, "size": 11, "symbol": [symbols[load] for _, load in
                                                               means.index]},
            "hovertemplate": "%{text}<br>mean %{x:,.0f} ms, P99 %{y:,.0f} ms<extra></extra>",
        })  # fmt: skip
    found = layout("mean end-to-end latency (ms)", "P99 (ms)")
    return {"data": plain(data), "layout": found}
