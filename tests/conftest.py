"""Settings every test shares, made before torch is imported."""

import os

# Tests run in parallel processes on tiny tensors: threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
