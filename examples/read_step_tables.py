"""Save a run, read it back, and ask its tables questions with pandas.

Usage: python examples/read_step_tables.py [PREFIX]. PREFIX names a run that is there already;
without it a small one is simulated (step times of the H200 roofline, uncalibrated) and saved in a
temporary folder. The columns are those of docs/trace-format.md, the same for a recorded and a
simulated run.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import minideepinfer as mdi

with TemporaryDirectory() as folder:
    prefix = sys.argv[1] if len(sys.argv) > 1 else str(Path(folder) / "run")
    if len(sys.argv) == 1:
        work = mdi.generate_workload("azure-conv", num_requests=100, seed=1)
        mdi.simulate(work).save(prefix)
    run = mdi.load_run(prefix)
    steps, items = run.steps, run.items

print("device time by kind of step, ms")
print(steps.groupby("kind", observed=True)["gpu_ms"].agg(["count", "mean", "max"]).round(2))

print("\nthe slowest prefill steps")
prefill = steps[steps["kind"] == "prefill"].nlargest(3, "gpu_ms")
print(prefill[["step", "n_seqs", "n_tokens", "n_cached", "gpu_ms"]].to_string(index=False))

print("\nwhat the first of them computed")
chosen = items[items["step"] == prefill["step"].iloc[0]]
print(chosen[["req_id", "q", "k", "is_last_chunk"]].to_string(index=False))
