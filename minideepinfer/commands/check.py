"""`mdi check`: is a trace sound? A run is held against its laws, a request trace against its rules.

Exit codes: 0 when everything holds, 1 when something is broken, 2 when something cannot be read.
Nothing is repaired.

Read next: `mdi_traces/check.py`, `mdi_traces/laws.py`.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mdi_shared.errors import ConfigError, TraceError
from mdi_shared.served import Served
from minideepinfer.commands import options as o
from minideepinfer.commands.describing import load_served
from minideepinfer.commands.files import is_run, read_run
from minideepinfer.commands.screen import facts_table, show_json, show_table, tell

if TYPE_CHECKING:
    from rich.console import RenderableType

OK, SKIPPED, BROKEN = "ok", "skipped", "broken"
BROKEN_CODE, UNREADABLE_CODE = 1, 2


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one law: ok, skipped or broken.

    `row` is 0-based in the table of a run, and a line of the file of a request trace.
    """

    law: str
    verdict: str
    table: str
    row: int | None
    detail: str

    @property
    def where(self) -> str:
        return self.table if self.row is None else f"{self.table} row {self.row}"


@dataclass(frozen=True, slots=True)
class Checked:
    """One path and its verdicts; `unreadable` says why there are none."""

    path: str
    kind: str  # run | requests
    verdicts: tuple[Verdict, ...]
    unreadable: str | None = None

    @property
    def code(self) -> int:
        if self.unreadable is not None:
            return UNREADABLE_CODE
        return BROKEN_CODE if any(v.verdict == BROKEN for v in self.verdicts) else 0


def check(
    paths: Annotated[list[Path], typer.Argument(help="Request traces, or runs by their prefix.")],
    *,
    format: o.Format = None,
    arrivals: o.Arrivals = None,
    json: o.Json = False,
) -> None:
    """Check traces: conservation laws of a run, rules of a request trace.

    Prints each law with ok, skipped or broken and the first broken row.
    Exit code 1: something is broken, 2: something cannot be read.
    """
    found = [_check_one(path, format, arrivals) for path in paths]
    if json:
        show_json({"checked": [_document(each) for each in found]})
    for each in found:
        if each.unreadable is not None:
            tell(f"error: {each.unreadable}")
        elif not json:
            show_table(_table(each))
    raise typer.Exit(max(each.code for each in found))


def _check_one(path: Path, format: str | None, arrivals: str | None) -> Checked:
    kind = "run" if is_run(path) else "requests"
    try:
        verdicts = _run_verdicts(path) if kind == "run" else _rules(path, format, arrivals)
    except (TraceError, ConfigError) as error:
        return Checked(str(path), kind, (), str(error))
    return Checked(str(path), kind, verdicts)


def _run_verdicts(path: Path) -> tuple[Verdict, ...]:
    from mdi_traces.check import check_run
    from mdi_traces.laws import LAWS

    findings = {finding.law: finding for finding in check_run(read_run(path))}
    verdicts = []
    for law in LAWS:
        found = findings.get(law)
        if found is None:
            verdicts.append(Verdict(law, OK, "", None, ""))
        else:
            verdict = SKIPPED if found.skipped else BROKEN
            verdicts.append(Verdict(law, verdict, found.table, found.row, found.detail))
    return tuple(verdicts)


def _rules(path: Path, format: str | None, arrivals: str | None) -> tuple[Verdict, ...]:
    """Reading stops at the first row that breaks a rule, so there is at most one."""
    try:
        work = load_served(Served(trace=str(path), format=format, arrivals=arrivals), 0)
    except TraceError as error:
        if error.row is None:
            raise
        return (Verdict("request_rules", BROKEN, "requests", error.row, str(error)),)
    return (Verdict("request_rules", OK, "requests", None, f"{len(work):,} requests"),)


def _document(checked: Checked) -> dict[str, object]:
    document = asdict(checked)
    return {"laws": document.pop("verdicts"), **document}


def _table(checked: Checked) -> "RenderableType":
    rows = [
        (v.law, "  ".join(part for part in (v.verdict, v.where, v.detail) if part))
        for v in checked.verdicts
    ]
    counts = [
        f"{sum(v.verdict == verdict for v in checked.verdicts)} {verdict}"
        for verdict in (OK, SKIPPED, BROKEN)
    ]
    return facts_table(f"{checked.path}: {', '.join(counts)}", rows)
