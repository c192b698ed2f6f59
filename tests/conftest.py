"""Settings every test shares, made before torch is imported.

No test depends on the machine: all pass with `OMP_NUM_THREADS=4`, with
`ATEN_CPU_CAPABILITY=default`, and with other weights (`MDI_TEST_WEIGHTS`, weights.py).
"""

import os

from tests import weights

# Tests run in parallel processes on tiny tensors: threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
if weights.WANTED:
    weights.draw_otherwise()
