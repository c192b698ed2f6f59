"""The verbs of the `mdi` command, one module each.

A new verb is a module with one function and a line in `VERBS`. Modules import at their top only
what is cheap (typer and the core); the rest inside the function, so that each verb starts as
fast as its own work allows.

Read next: `declare.py` (options declared once), `screen.py` (what is printed where).
"""

from collections.abc import Callable

from minideepinfer.commands.accuracy import accuracy
from minideepinfer.commands.calibrate import calibrate
from minideepinfer.commands.check import check
from minideepinfer.commands.compare import compare
from minideepinfer.commands.convert import convert
from minideepinfer.commands.generate import generate
from minideepinfer.commands.generate_workload import generate_workload
from minideepinfer.commands.make_checkpoint import make_checkpoint
from minideepinfer.commands.record import record, replay
from minideepinfer.commands.retrace import retrace
from minideepinfer.commands.show import show
from minideepinfer.commands.simulate import simulate
from minideepinfer.commands.transfer import transfer
from minideepinfer.commands.tune import tune

VERBS: dict[str, Callable[..., None]] = {
    "simulate": simulate,
    "calibrate": calibrate,
    "accuracy": accuracy,
    "transfer": transfer,
    "tune": tune,
    "show": show,
    "check": check,
    "compare": compare,
    "convert": convert,
    "generate-workload": generate_workload,
    "generate": generate,
    "record": record,
    "replay": replay,
    "retrace": retrace,
    "make-checkpoint": make_checkpoint,
}
