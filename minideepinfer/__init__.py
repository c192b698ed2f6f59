"""mini-DeepInfer's public names: everything a user imports, from one place.

Names are imported when first used, so that `import minideepinfer` costs next to nothing. Nothing
is defined here; the `mdi` command is in `cli.py`.

Read next: `simulated.py` (what `simulate` returns), `mdi_shared/config.py` (scheduler options).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mdi_analysis import (
        SLO,
        Comparison,
        Summary,
        compare,
        compare_plans,
        export_perfetto,
        overlay_figure,
        per_kind_summary,
        roofline_position,
        run_shape,
        save_overlay,
        save_plots,
        slowest_steps,
        step_items_frame,
        steps_frame,
    )
    from mdi_exec.engine.engine import LLMEngine
    from mdi_exec.engine.llm import LLM
    from mdi_exec.engine.request_state import RequestOutput
    from mdi_exec.engine.sampling import SamplingParams
    from mdi_exec.weights.make_checkpoint import make_checkpoint
    from mdi_shared.config import SchedulerConfig
    from mdi_shared.cost.hardware import B200, H200, Hardware
    from mdi_shared.cost.linear import LinearCost
    from mdi_shared.cost.predicted import PredictedCost
    from mdi_shared.cost.roofline import Efficiencies, RooflineCost
    from mdi_shared.cost.shape import TINY, V41_FLASH, ModelShape
    from mdi_shared.cost.step_cost import ConstantCost, HostCost, StepCost
    from mdi_shared.errors import ConfigError, DeadlockError, MiniDeepInferError, TraceError
    from mdi_shared.placement import LeastKV, LeastTokens, Placement, RoundRobin
    from mdi_sim.fit.calibrate import calibrate
    from mdi_sim.fit.group import calibrate_group
    from mdi_sim.fit.transfer import transfer
    from mdi_sim.retrace import replay_recorded
    from mdi_sim.search.tuning import Tuning
    from mdi_traces import (
        WORKLOADS,
        ChatSessions,
        Finding,
        Fixed,
        LogNormal,
        Poisson,
        RequestTrace,
        Run,
        Uniform,
        Workload,
        check_requests,
        check_run,
        generate_workload,
        load_requests,
        load_run,
        parse_arrivals,
        parse_lengths,
    )
    from minideepinfer.run_summary import RunSummary, summarize
    from minideepinfer.simulated import SimulatedRun, simulate
    from minideepinfer.tuned import tune

__all__ = [
    "B200",
    "H200",
    "LLM",
    "SLO",
    "TINY",
    "V41_FLASH",
    "WORKLOADS",
    "ChatSessions",
    "Comparison",
    "ConfigError",
    "ConstantCost",
    "DeadlockError",
    "Efficiencies",
    "Finding",
    "Fixed",
    "Hardware",
    "HostCost",
    "LLMEngine",
    "LeastKV",
    "LeastTokens",
    "LinearCost",
    "LogNormal",
    "MiniDeepInferError",
    "ModelShape",
    "Placement",
    "Poisson",
    "PredictedCost",
    "RequestOutput",
    "RequestTrace",
    "RooflineCost",
    "RoundRobin",
    "Run",
    "RunSummary",
    "SamplingParams",
    "SchedulerConfig",
    "SimulatedRun",
    "StepCost",
    "Summary",
    "TraceError",
    "Tuning",
    "Uniform",
    "Workload",
    "calibrate",
    "calibrate_group",
    "check_requests",
    "check_run",
    "compare",
    "compare_plans",
    "export_perfetto",
    "generate_workload",
    "load_requests",
    "load_run",
    "make_checkpoint",
    "overlay_figure",
    "parse_arrivals",
    "parse_lengths",
    "per_kind_summary",
    "replay_recorded",
    "roofline_position",
    "run_shape",
    "save_overlay",
    "save_plots",
    "simulate",
    "slowest_steps",
    "step_items_frame",
    "steps_frame",
    "summarize",
    "transfer",
    "tune",
]

_MODULES = {
    "mdi_analysis": "SLO Comparison Summary compare compare_plans export_perfetto overlay_figure "
    "per_kind_summary roofline_position run_shape save_overlay save_plots slowest_steps "
    "step_items_frame steps_frame",
    "mdi_shared.config": "SchedulerConfig",
    "mdi_shared.cost.step_cost": "ConstantCost HostCost StepCost",
    "mdi_shared.errors": "ConfigError DeadlockError MiniDeepInferError TraceError",
    "mdi_shared.cost.hardware": "B200 H200 Hardware",
    "mdi_shared.cost.linear": "LinearCost",
    "mdi_shared.placement": "LeastKV LeastTokens Placement RoundRobin",
    "mdi_shared.cost.predicted": "PredictedCost",
    "mdi_shared.cost.roofline": "Efficiencies RooflineCost",
    "mdi_shared.cost.shape": "TINY V41_FLASH ModelShape",
    "mdi_traces": "WORKLOADS ChatSessions Finding Fixed LogNormal Poisson RequestTrace Run Uniform "
    "Workload check_requests check_run generate_workload load_requests load_run parse_arrivals "
    "parse_lengths",
    "mdi_exec.engine.engine": "LLMEngine",
    "mdi_exec.engine.llm": "LLM",
    "mdi_exec.weights.make_checkpoint": "make_checkpoint",
    "mdi_exec.engine.request_state": "RequestOutput",
    "mdi_exec.engine.sampling": "SamplingParams",
    "mdi_sim.fit.calibrate": "calibrate",
    "mdi_sim.fit.group": "calibrate_group",
    "mdi_sim.retrace": "replay_recorded",
    "mdi_sim.fit.transfer": "transfer",
    "mdi_sim.search.tuning": "Tuning",
    "minideepinfer.run_summary": "RunSummary summarize",
    "minideepinfer.simulated": "SimulatedRun simulate",
    "minideepinfer.tuned": "tune",
}
_HOME = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("mini-deepinfer")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found: object = getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if _HOME[name].startswith("mdi_exec"):
            raise ImportError(
                f"{name} needs {error.name}: pip install 'mini-deepinfer[exec]'"
            ) from error
        raise
    return found


def __dir__() -> list[str]:
    return __all__
