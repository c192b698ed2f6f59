"""What the verbs that run the real model share: the engine's options, and opening a model.

Importing this module is cheap; torch is imported when a model is opened.

Read next: `generate.py`, `record.py`, `mdi_exec/engine/options.py`.
"""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, get_type_hints

from mdi_shared.config import SchedulerConfig
from mdi_shared.errors import MiniDeepInferError
from minideepinfer.commands.screen import tell
from minideepinfer.commands.values import parse_pairs

if TYPE_CHECKING:
    from mdi_exec.engine.llm import LLM

# Read when torch is loaded. What it would log beside our one line is raised as an error, too.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")


def is_first_rank() -> bool:
    """Say whether this process speaks for its group: under torchrun the others keep silent."""
    return os.environ.get("RANK", "0") == "0"


def require_executor() -> None:
    """Raise one line when the packages that run models are not installed."""
    try:
        import safetensors  # noqa: F401
        import torch  # noqa: F401
    except ImportError as error:
        raise MiniDeepInferError(
            f"running a model needs {error.name}: pip install 'mini-deepinfer[exec]'"
        ) from error


def engine_options(pairs: Sequence[str] | None) -> dict[str, Any]:
    """Read `key=value` pairs of the engine's and the scheduler's options."""
    from mdi_exec.engine.options import EngineOptions

    types = {**get_type_hints(EngineOptions), **get_type_hints(SchedulerConfig)}
    return parse_pairs(pairs or (), types)


def open_model(model: str, device: str, pairs: Sequence[str] | None, **options: object) -> "LLM":
    """Load a checkpoint; `options` beside the user's pairs, which win.

    What loading will take and what speaks against the options goes to standard error.
    """
    require_executor()
    from mdi_exec.engine.llm import LLM

    llm = LLM(model, on_estimate=tell, **{"device": device, **options, **engine_options(pairs)})
    for note in llm.notes:
        tell(f"note: {note}")
    return llm
