"""A summary that says what its numbers rest on, and prints as a table.

The metrics are those of `mdi_analysis`; this adds the label of `labels.py` and, for a simulation,
the time it took.

Read next: `mdi_analysis/summary.py` (the metrics), docs/metrics.md (what they mean).
"""

from dataclasses import dataclass, fields
from io import StringIO
from typing import TYPE_CHECKING

import mdi_analysis
from mdi_analysis import SLO, RunLike, Summary
from minideepinfer.labels import label

if TYPE_CHECKING:
    from rich.table import Table

PRINT_COLUMNS = 100


@dataclass(frozen=True)
class RunSummary(Summary):
    """All metrics of a run, what they rest on, and the wall time of a simulation, s.

    `basis` is None for a recorded run, `wall_s` for anything but a fresh simulation.
    """

    basis: str | None = None
    wall_s: float | None = None

    @property
    def speedup(self) -> float | None:
        """Simulated over wall time."""
        return self.throughput.span_s / self.wall_s if self.wall_s else None

    def table(self) -> "Table":
        """Return a rich table for people; `print` shows the same."""
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid()
        grid.add_row(super().table())
        if self.speedup is not None:
            grid.add_row(Text(f"{self.throughput.span_s:,.1f} s simulated in {self.wall_s:,.2f} s, "
                              f"{self.speedup:,.0f} times as fast"))  # fmt: skip
        if self.basis is not None:
            grid.add_row(Text(self.basis, style="italic"))
        return grid

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
    return RunSummary(**values, basis=label(run.metadata), wall_s=wall_s)
