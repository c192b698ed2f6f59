# What `minideepinfer` exports, and where it lives: read by editors, type checkers, and by
# `__init__.py`, which imports a name from here when it is first used.

from mdi_analysis import (
    Comparison as Comparison,
    SLO as SLO,
    Summary as Summary,
    compare as compare,
    compare_plans as compare_plans,
    export_perfetto as export_perfetto,
    overlay_figure as overlay_figure,
    per_kind_summary as per_kind_summary,
    roofline_position as roofline_position,
    run_shape as run_shape,
    save_overlay as save_overlay,
    save_plots as save_plots,
    slowest_steps as slowest_steps,
    step_items_frame as step_items_frame,
    steps_frame as steps_frame,
)
from mdi_exec.engine.engine import LLMEngine as LLMEngine
from mdi_exec.engine.llm import LLM as LLM
from mdi_exec.engine.request_state import RequestOutput as RequestOutput
from mdi_exec.engine.sampling import SamplingParams as SamplingParams
from mdi_exec.weights.make_checkpoint import make_checkpoint as make_checkpoint
from mdi_shared.config import SchedulerConfig as SchedulerConfig
from mdi_shared.cost.hardware import (
    B200 as B200,
    B300 as B300,
    H100 as H100,
    H200 as H200,
    Hardware as Hardware,
)
from mdi_shared.cost.linear import LinearCost as LinearCost
from mdi_shared.cost.predicted import PredictedCost as PredictedCost
from mdi_shared.cost.roofline import (
    Efficiencies as Efficiencies,
    RooflineCost as RooflineCost,
)
from mdi_shared.cost.shape import (
    ModelShape as ModelShape,
    TINY as TINY,
    V41_FLASH as V41_FLASH,
)
from mdi_shared.cost.step_cost import (
    ConstantCost as ConstantCost,
    HostCost as HostCost,
    StepCost as StepCost,
)
from mdi_shared.describe_run import describe_run as describe_run
from mdi_shared.errors import (
    ConfigError as ConfigError,
    DeadlockError as DeadlockError,
    MiniDeepInferError as MiniDeepInferError,
    PlacementError as PlacementError,
    PolicyError as PolicyError,
    SaveError as SaveError,
    TraceError as TraceError,
)
from mdi_shared.placement import (
    LeastKV as LeastKV,
    LeastTokens as LeastTokens,
    Placement as Placement,
    RoundRobin as RoundRobin,
)
from mdi_shared.policies import Policy as Policy
from mdi_shared.rank_view import RankView as RankView
from mdi_shared.request import (
    Hints as Hints,
    Request as Request,
)
from mdi_shared.run_description import RunDescription as RunDescription
from mdi_shared.served import Served as Served
from mdi_sim.fit.calibrate import calibrate as calibrate
from mdi_sim.fit.group import calibrate_group as calibrate_group
from mdi_sim.fit.transfer import transfer as transfer
from mdi_sim.retrace import replay_recorded as replay_recorded
from mdi_sim.search.tuning import Tuning as Tuning
from mdi_traces import (
    ChatSessions as ChatSessions,
    Finding as Finding,
    Fixed as Fixed,
    LogNormal as LogNormal,
    Poisson as Poisson,
    RequestTrace as RequestTrace,
    Run as Run,
    Uniform as Uniform,
    WORKLOADS as WORKLOADS,
    Workload as Workload,
    check_requests as check_requests,
    check_run as check_run,
    generate_workload as generate_workload,
    load_requests as load_requests,
    load_run as load_run,
    parse_arrivals as parse_arrivals,
    parse_lengths as parse_lengths,
)
from minideepinfer.capacity_result import (
    CapacityResult as CapacityResult,
    capacity as capacity,
)
from minideepinfer.lab_result import (
    LabResult as LabResult,
    lab as lab,
)
from minideepinfer.run_summary import (
    RunSummary as RunSummary,
    summarize as summarize,
)
from minideepinfer.simulated import (
    SimulatedRun as SimulatedRun,
    simulate as simulate,
    simulate_many as simulate_many,
)
from minideepinfer.tuned import tune as tune

__version__: str
