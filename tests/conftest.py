"""Settings every test shares, made before torch is imported, and the folder of public traces.

No test depends on the machine: all pass with `OMP_NUM_THREADS=4`, with
`ATEN_CPU_CAPABILITY=default`, beside other programs, and with other weights (`MDI_TEST_WEIGHTS`,
exec/weights.py).
"""

import os
from contextlib import suppress
from pathlib import Path

import pytest

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


@pytest.fixture
def public_traces() -> Path:
    folder = os.environ.get("MDI_PUBLIC_TRACES")
    if not folder:
        pytest.skip("set MDI_PUBLIC_TRACES to the folder of public traces")
    return Path(folder)
