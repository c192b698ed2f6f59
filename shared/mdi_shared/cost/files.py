"""Reads a step-time model from its file, fitted or predicted, or one that comes with the package.

Read next: `linear.py` (fitted), `predicted.py` (predicted).
"""

from pathlib import Path

from mdi_shared.cost.linear import LinearCost
from mdi_shared.cost.predicted import KIND, PredictedCost
from mdi_shared.errors import ConfigError
from mdi_shared.json_input import read_json, require_mapping

# The wheel has the models beside this file; a checkout keeps them with the recordings.
MODEL_FOLDERS = (
    Path(__file__).with_name("models"), Path(__file__).parents[3] / "traces" / "models",
)  # fmt: skip


def packaged_models() -> dict[str, Path]:
    """Return the fitted models that come with the package, by name."""
    found = [path for folder in MODEL_FOLDERS for path in sorted(folder.glob("*.json"))]
    return {path.stem: path for path in reversed(found)}


def read_cost_file(path: str | Path) -> LinearCost | PredictedCost:
    """Return the model that `mdi calibrate` or `mdi transfer` wrote, or a packaged one by its name.

    Raises `ConfigError` for an unreadable file and everything the models refuse, with its name.
    """
    path = Path(path)
    if not path.suffix and not path.exists():
        models = packaged_models()
        if str(path) not in models:
            raise ConfigError("cost model", str(path), "must be a file FILE.json, or one of "
                              f"{', '.join(sorted(models))}")  # fmt: skip
        path = models[str(path)]
    data = read_json(path)
    try:
        if isinstance(data, dict) and data.get("kind") == KIND:
            return PredictedCost.from_json(data)
        return LinearCost.from_json(require_mapping("cost model", data))
    except ConfigError as error:
        raise ConfigError(f"{path.name}: {error.field}", error.value, error.allowed) from error
