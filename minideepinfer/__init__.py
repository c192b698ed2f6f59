"""mini-DeepInfer's public names: everything a user imports, from one place.

`__init__.pyi` lists them with their homes. Each is imported when first used, so that `import
minideepinfer` costs next to nothing. Nothing is defined here; the `mdi` command is in `cli.py`.

`mdi` begins here: what is imported at the top is what a quick Ctrl-C can interrupt.

Read next: `simulated.py` (what `simulate` returns), `mdi_shared/config.py` (scheduler options).
"""

_HOME: dict[str, str] = {}


def _homes() -> dict[str, str]:
    """Return the module of every public name, as the stub beside this file states it."""
    if _HOME:
        return _HOME
    from pathlib import Path

    homes, module = {}, ""
    for line in Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8").splitlines():
        if line.startswith("from "):
            module, _, line = line.removeprefix("from ").partition(" import ")
        name, has_home, _ = line.partition(" as ")
        if has_home:
            homes[name.strip()] = module
    _HOME.update(homes)
    return _HOME


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("mini-deepinfer")
    if name == "__all__":
        return __dir__()
    home = None if name.startswith("__") else _homes().get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        if home.startswith("mdi_exec"):
            raise ImportError(
                f"{name} needs {error.name}: pip install 'mini-deepinfer[exec]'"
            ) from error
        raise


def __dir__() -> list[str]:
    return sorted(_homes())
