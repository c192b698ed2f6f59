"""Is a trace sound? Laws that hold for every run, and rules that hold for every request trace.

The laws themselves are in `laws.py`; here they are run one by one, and each answers with at most
one finding: the first row that breaks it, or why it cannot be tested. Nothing is repaired.

Read next: `laws.py`, `schema.py` (what the columns mean).
"""

from dataclasses import dataclass

from mdi_traces.law_tables import Broken, Tables, Untestable
from mdi_traces.laws import LAWS
from mdi_traces.requests import RequestTrace, request_problems
from mdi_traces.run import Run
from mdi_traces.schema import REQUESTS


@dataclass(frozen=True, slots=True)
class Finding:
    """One law that a trace breaks, or that could not be tested (`skipped`).

    `row` is the 0-based first broken row of `table`; None means the table as a whole.
    """

    law: str
    table: str
    row: int | None
    detail: str
    skipped: bool = False

    def __str__(self) -> str:
        verdict = "not tested" if self.skipped else "broken"
        where = self.table if self.row is None else f"{self.table} row {self.row}"
        return f"{self.law}: {verdict}: {where}: {self.detail}"


def check_run(run: Run) -> list[Finding]:
    """Return the laws that `run` breaks or that cannot be tested on it, in the order of LAWS.

    An empty list is a sound run. Rows count from 0, as in the data frames.
    """
    tables = Tables(run)
    findings = []
    for name, law in LAWS.items():
        try:
            broken: Broken | None = law(tables)
        except Untestable as why:
            findings.append(Finding(name, why.table, None, str(why), skipped=True))
            continue
        if broken is not None:
            findings.append(Finding(name, *broken))
    return findings


def check_requests(trace: RequestTrace) -> list[Finding]:
    """Return every rule of request traces that `trace` breaks, each with its first row."""
    if len(trace) == 0:
        return [Finding("not_empty", REQUESTS, None, "the trace holds no requests")]
    return [
        Finding(f"valid_{problem.column}", REQUESTS, problem.row, problem.text)
        for problem in request_problems(trace.table)
    ]
