"""What every test shares: settings made before torch is imported, the folder of public traces."""

import os
from pathlib import Path

import pytest

# Tests run in parallel processes on tiny tensors: threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture
def public_traces() -> Path:
    folder = os.environ.get("MDI_PUBLIC_TRACES")
    if not folder:
        pytest.skip("set MDI_PUBLIC_TRACES to the folder of public traces")
    return Path(folder)
