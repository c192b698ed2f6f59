"""Where step time goes in a recorded run, step by step: summary, roofline, slowest steps, a plot.

Usage: python examples/step_timings.py [PREFIX [MODEL.json]]. Without arguments it reads the decode
recording of an H200 and the step-time model fitted to that machine's recordings. Each block stands
alone, as in a notebook; docs/step-timings.md explains the columns. The plot goes to
step_timings.png in the current folder.
"""

import sys
from pathlib import Path

from matplotlib.figure import Figure

import minideepinfer as mdi

TRACES = Path(__file__).parents[1] / "traces"
prefix = sys.argv[1] if len(sys.argv) > 1 else TRACES / "recorded/h200-flash-slice/decode"
model = sys.argv[2] if len(sys.argv) > 2 else TRACES / "models/h200-flash-slice.json"

run = mdi.load_run(prefix)
frame = mdi.steps_frame(run, cost=mdi.LinearCost.from_json(model))
frame = frame.join(mdi.roofline_position(frame, mdi.run_shape(run), mdi.H200))

print("by kind of step")
print(mdi.per_kind_summary(frame).T.round(3).to_string())

print("\nthe slowest decode steps")
for step in mdi.slowest_steps(frame, 3, kind="decode").itertuples():
    print(f"step {step.step}, {step.device_ms:.2f} ms: {step.why}")

figure = Figure(figsize=(11, 4), layout="constrained")
by_rows, by_intensity = figure.subplots(1, 2)
for kind, mine in frame[frame["rows"] > 0].groupby("kind", observed=True):
    by_rows.scatter(mine["rows"], mine["device_ms"], s=12, label=f"{kind}, measured")
    by_rows.scatter(mine["rows"], mine["floor_ms"], s=4, label=f"{kind}, floor at peak rates")
    by_intensity.scatter(mine["intensity"], mine["roofline_share"], s=12, label=kind)
by_rows.set(xscale="log", yscale="log", xlabel="rows", ylabel="device time (ms)")
by_intensity.set(xscale="log", xlabel="FLOP per byte", ylabel="floor / device time")
by_rows.legend()
figure.savefig("step_timings.png", dpi=110)
