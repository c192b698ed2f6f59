"""Reads a step-time model from its file, fitted or predicted.

Read next: `linear.py` (fitted), `predicted.py` (predicted).
"""

from pathlib import Path

from mdi_shared.cost.linear import LinearCost
from mdi_shared.cost.predicted import KIND, PredictedCost
from mdi_shared.errors import ConfigError
from mdi_shared.json_input import read_json, require_mapping


def read_cost_file(path: str | Path) -> LinearCost | PredictedCost:
    """Return the model that `mdi calibrate` or `mdi transfer` wrote.

    Raises `ConfigError` for an unreadable file and everything the models refuse, with its name.
    """
    data = read_json(Path(path))
    try:
        if isinstance(data, dict) and data.get("kind") == KIND:
            return PredictedCost.from_json(data)
        return LinearCost.from_json(require_mapping("cost model", data))
    except ConfigError as error:
        name = Path(path).name
        raise ConfigError(f"{name}: {error.field}", error.value, error.allowed) from error
