"""What `mdi lab` shows: a ranked table with intervals, the front, failures, and one sentence.

Nothing is decided here; `mdi_sim/search/statistics.py` says who is best and how sure that is.

Read next: `lab_result.py` (the result), docs/lab.md (how to read it).
"""

from io import StringIO
from math import isnan
from typing import TYPE_CHECKING, Any

from mdi_analysis.report import Sheet, change, counted, number, percent, plain
from mdi_sim.search.statistics import (
    VARIANT,
    Interval,
    Standing,
    Variant,
    is_relative,
)
from minideepinfer.lab_result import FRONT

if TYPE_CHECKING:
    from rich.table import Table

    from minideepinfer.lab_result import LabResult

PRINT_COLUMNS = 120
# Beside the measure that ranks: (column, heading).
SHOWN = (("e2e_ms_mean", "e2e mean"), ("e2e_ms_p99", "e2e p99"), ("ttft_ms_p99", "ttft p99"),
         ("tpot_ms_mean", "tpot mean"), ("e2e_over_bound", "/ bound"),
         ("longest_wait_s", "wait max s"),
         ("recomputed_share", "recomp."), ("jain", "Jain"))  # fmt: skip
MOST_ERRORS = 3


def verdict(result: "LabResult", measure: str) -> str:
    """Say in one sentence which variant is best, by how much, how sure, and what its tail pays."""
    standings = result.ranking(measure, shown=("e2e_ms_p99",))
    ran = [each for each in standings if not each.failed]
    base = next((each for each in standings if each.variant == result.baseline), None)
    if base is None or base not in ran or not ran:
        return (
            f"no verdict: {_named(result, result.baseline)}, the baseline, did not run to its end"
        )
    if len(standings) == 1:
        return f"one variant only: {_named(result, base.variant)} has nothing to be compared with"
    if isnan(base.values[measure]):
        return f"no verdict: the runs have no {measure}"
    best, name = ran[0], _named(result, result.baseline)
    if best is base:
        return f"no variant is better than {name} in {measure}"
    found = best.change
    assert found is not None, "whoever ran has a difference"
    better = (
        f"{_named(result, best.variant)} has the best {measure}: {_amount(measure, found.mean)}"
    )
    against = f"{better} against {name}"
    if found.low is None or found.high is None:
        return f"{against}; one replicate, so how sure that is is not known"
    sure = (f"95 % interval {_amount(measure, found.low)} to {_amount(measure, found.high)}, "
            f"{found.n} seeds, {_workloads(result)}")  # fmt: skip
    if not found.excludes_zero:
        return f"no difference that is sure: {against} ({sure})"
    return f"{against} ({sure}){_tail(best, base, measure)}"


def as_text(result: "LabResult", measure: str) -> str:
    """Return table and sentence as plain text."""
    from rich.console import Console

    text = StringIO()
    console = Console(file=text, width=PRINT_COLUMNS, color_system=None, markup=False)
    for each in tables(result, measure):
        console.print(each, soft_wrap=isinstance(each, str))
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def tables(result: "LabResult", measure: str) -> list["Table | str"]:
    """Return what people see: the ranking, what could not run, and the sentence."""
    return [ranking_sheet(result, measure).rich(), *failures(result), result.sentence(measure)]


def ranking_sheet(result: "LabResult", measure: str) -> Sheet:
    """Return the ranking as a table, best first; the second column names the variant."""
    shown = [(column, heading) for column, heading in SHOWN
             if column != measure and result.frame[column].notna().any()]  # fmt: skip
    standings = result.ranking(measure, shown=[column for column, _ in shown])
    rows = [
        (str(place), _named(result, each.variant), "*" if each.on_front else "",
         _value(measure, each.values[measure]), _interval(measure, each.change),
         *(_value(column, each.values[column]) for column, _ in shown))
        for place, each in enumerate(standings, 1)
    ]  # fmt: skip
    headers = ("", "variant", "", measure, "change (95 %)",
               *(heading for _, heading in shown))  # fmt: skip
    title = (f"{counted(len(result.frame), 'run')}: {_workloads(result)}, "
             f"{counted(len(result.plan['seeds']), 'seed')}; latencies in ms; * = no other beats "
             "it in both mean and P99 of e2e")  # fmt: skip
    return Sheet(title, headers, rows, n_text=3)


def document(result: "LabResult", measure: str) -> dict[str, Any]:
    """Return the same for programs, JSON-able."""
    shown = [column for column, _ in SHOWN]
    found: dict[str, Any] = plain({
        "plan": dict(result.plan), "runs": len(result.frame), "missing": result.missing,
        "measure": measure, "baseline": list(result.baseline), "front": list(FRONT),
        "ranking": [{**dict(zip(VARIANT, each.variant, strict=True)), "values": each.values,
                     "change": each.change, "failed": each.failed, "on_front": each.on_front}
                    for each in result.ranking(measure, shown=shown)],
        "differences": result.differences(measure).to_dict("records"),
        "errors": _errors(result), "sentence": result.sentence(measure),
    })  # fmt: skip
    return found


def _named(result: "LabResult", variant: Variant) -> str:
    """Return the parts of a variant that differ inside this lab; the policy always."""
    setting, placement, policy = variant
    parts = [policy]
    if len(result.plan["placements"]) > 1:
        parts.append(placement)
    if len(result.plan["settings"]) > 1:
        parts.append(setting)
    return ", ".join(parts)


def _workloads(result: "LabResult") -> str:
    plan = result.plan
    return counted(len(plan["traces"]) * len(plan["loads"]), "workload")


def _tail(best: Standing, base: Standing, measure: str) -> str:
    """Say what the winner does to the tail, where that is not what ranks."""
    if measure == "e2e_ms_p99":
        return ""
    return f"; P99 of e2e {change(best.values['e2e_ms_p99'] / base.values['e2e_ms_p99'] - 1)}"


def _value(measure: str, value: float) -> str:
    return percent(value) if measure.endswith("_share") else number(value)


def _amount(measure: str, value: float) -> str:
    if is_relative(measure):
        return change(value)
    if measure.endswith("_share"):
        return f"{100 * value:+.1f} pp"
    return f"{value:+.3g}"


def _interval(measure: str, found: Interval | None) -> str:
    """Return a change and the ends of its interval in brackets; nothing for the baseline."""
    if found is None:
        return ""
    mean = _amount(measure, found.mean)
    if found.low is None or found.high is None:
        return f"{mean} (one seed)"
    ends = (_amount(measure, end).removesuffix("%").removesuffix(" pp")
            for end in (found.low, found.high))  # fmt: skip
    return f"{mean} ({' to '.join(ends)})"


def _errors(result: "LabResult") -> list[dict[str, Any]]:
    failed = result.frame[result.frame["error"].notna()]
    names = ["trace", "load", *VARIANT, "seed", "error"]
    found: list[dict[str, Any]] = failed[names].to_dict("records")
    return found


def failures(result: "LabResult") -> list[str]:
    """Return lines on runs that failed or are missing."""
    errors = _errors(result)
    lines = [f"failed: {each['policy']} on {each['trace']}, {each['load']}, seed {each['seed']}: "
             f"{each['error']}" for each in errors[:MOST_ERRORS]]  # fmt: skip
    if len(errors) > MOST_ERRORS:
        lines.append(f"{len(errors) - MOST_ERRORS} more runs failed: column error of the table")
    if result.missing:
        lines.append(f"interrupted: {counted(result.missing, 'run')} missing; the same command "
                     "goes on from here")  # fmt: skip
    return lines
