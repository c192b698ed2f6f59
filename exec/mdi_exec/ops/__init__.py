"""One file per operation of the model: a plain-torch `<op>_ref` first, then the public function.

Ops know shapes and dtypes, not layers, configs or caches' owners. `backend.py` is the one place
that chooses between a reference and a kernel.
"""
