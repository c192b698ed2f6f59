"""Settings every test shares, made before torch is imported.

No test depends on the machine: all pass with `OMP_NUM_THREADS=4`, with
`ATEN_CPU_CAPABILITY=default`, beside other programs, and with other weights (`MDI_TEST_WEIGHTS`,
exec/weights.py).
"""

import os
from contextlib import suppress

# Tests run in parallel processes on tiny tensors: threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

with suppress(ImportError):  # tests/gpu needs no hypothesis
    from hypothesis import HealthCheck, settings

    # The same examples everywhere, however long one takes.
    settings.register_profile("any machine", deadline=None, derandomize=True,
                              suppress_health_check=[HealthCheck.too_slow])  # fmt: skip
    settings.load_profile("any machine")

if os.environ.get("MDI_TEST_WEIGHTS"):
    from tests.exec.weights import draw_otherwise

    draw_otherwise()
