"""TileLang kernels, one file per family: builders, launchers, and the shapes they are built for.

Nothing imports this package but `ops/backend.py`, and only on a GPU. Read next: `jit.py`.
"""
