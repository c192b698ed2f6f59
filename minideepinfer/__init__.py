"""mini-DeepInfer's public names: everything a user imports, from one place.

`__init__.pyi` lists them with their homes. Each is imported when first used, so that `import
minideepinfer` costs next to nothing. Nothing is defined here; the `mdi` command is in `cli.py`.

Read next: `simulated.py` (what `simulate` returns), `mdi_shared/config.py` (scheduler options).
"""

from importlib import import_module
from pathlib import Path


def _homes() -> dict[str, str]:
    """Return the module of every public name, as the stub beside this file states it."""
    homes, module = {}, ""
    for line in Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8").splitlines():
        if line.startswith("from "):
            module, _, line = line.removeprefix("from ").partition(" import ")
        name, has_home, _ = line.partition(" as ")
        if has_home:
            homes[name.strip()] = module
    return homes


_HOME = _homes()
__all__ = sorted(_HOME)


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("mini-deepinfer")
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(import_module(_HOME[name]), name)
    except ModuleNotFoundError as error:
        if _HOME[name].startswith("mdi_exec"):
            raise ImportError(
                f"{name} needs {error.name}: pip install 'mini-deepinfer[exec]'"
            ) from error
        raise


def __dir__() -> list[str]:
    return __all__
