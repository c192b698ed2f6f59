"""Metrics, comparison, plots and trace export for recorded and simulated runs.

It works on tables that lie there already (a `Run` of `mdi_traces`, or anything `RunLike`): it runs
no engine and no simulation, and judges no number.

Read next: `definitions.py` (what every metric means), then `summary.py`.
"""

from mdi_analysis.compare import Comparison, KindComparison, Pair, compare
from mdi_analysis.definitions import METRICS, Metric, metrics_markdown
from mdi_analysis.frames import MetadataLike, RunLike
from mdi_analysis.live_page import run_page
from mdi_analysis.metrics import (
    SLO,
    Distribution,
    inter_token_latencies,
    meets_slo,
    request_latencies,
)
from mdi_analysis.overlay import overlay_figure
from mdi_analysis.pages import overlay_page, save_overlay, save_page
from mdi_analysis.perfetto import export_perfetto, trace_events
from mdi_analysis.plan_identity import Difference, PlanIdentity, compare_plans
from mdi_analysis.plots import (
    plot_latency,
    plot_step_time,
    plot_throughput,
    plot_timeline,
    save_plots,
)
from mdi_analysis.step_frames import per_kind_summary, step_items_frame, steps_frame
from mdi_analysis.step_reasons import slowest_steps
from mdi_analysis.step_roofline import roofline_position, run_shape
from mdi_analysis.summary import Summary, summarize

__all__ = [
    "METRICS",
    "SLO",
    "Comparison",
    "Difference",
    "Distribution",
    "KindComparison",
    "MetadataLike",
    "Metric",
    "Pair",
    "PlanIdentity",
    "RunLike",
    "Summary",
    "compare",
    "compare_plans",
    "export_perfetto",
    "inter_token_latencies",
    "meets_slo",
    "metrics_markdown",
    "overlay_figure",
    "overlay_page",
    "per_kind_summary",
    "plot_latency",
    "plot_step_time",
    "plot_throughput",
    "plot_timeline",
    "request_latencies",
    "roofline_position",
    "run_page",
    "run_shape",
    "save_overlay",
    "save_page",
    "save_plots",
    "slowest_steps",
    "step_items_frame",
    "steps_frame",
    "summarize",
    "trace_events",
]
