"""The verbs of the `mdi` command, one module each, imported when the verb is asked for.

A new verb is a module with one function and a line in `VERBS`. Modules import at their top only
what is cheap (typer and the core); the rest inside the function, so that each verb starts as
fast as its own work allows.

Read next: `options.py` (options declared once), `screen.py` (what is printed where).
"""

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple


class Verb(NamedTuple):
    """Where a verb is, and its line in the list: the first sentence of its help."""

    module: str
    help: str

    def load(self, name: str) -> Callable[..., None]:
        """Import the verb called `name`."""
        found: Callable[..., None] = getattr(
            import_module(f"{__name__}.{self.module}"), name.replace("-", "_")
        )
        return found


VERBS: dict[str, Verb] = {
    "simulate": Verb(
        "simulate", "Replay a request trace, or a generated workload, in virtual time."
    ),
    "calibrate": Verb(
        "calibrate",
        "Fit step times of a model and its host to recorded runs; simulate --cost reads the "
        "result.",
    ),
    "accuracy": Verb(
        "accuracy",
        "Leave each recorded run out, fit step times to the others, and simulate it from arrivals.",
    ),
    "transfer": Verb(
        "transfer",
        "Predict step times of other hardware or another model from a fitted model.",
    ),
    "tune": Verb(
        "tune",
        "Search chunk size, prefill attempts and seats for an SLO or for throughput, by "
        "simulation.",
    ),
    "show": Verb("show", "Show what a trace file holds, or a run: origin, summary, pictures."),
    "check": Verb("check", "Check traces: conservation laws of a run, rules of a request trace."),
    "compare": Verb("compare", "Compare two runs: latencies, step times, rates, decisions."),
    "convert": Verb(
        "convert", "Convert a request trace to Parquet, JSON lines or CSV, by the ending of OUT."
    ),
    "generate-workload": Verb("generate_workload", "Write a synthetic request trace."),
    "generate": Verb(
        "generate", "Generate from prompts given as texts or, with --ids, as token ids."
    ),
    "record": Verb("record", "Run a generated workload on the real model and record it."),
    "replay": Verb(
        "record", "Run a request trace on the real model, arrivals honoured, and record it."
    ),
    "retrace": Verb(
        "retrace", "Replay a recorded run in the simulator: does it make the same decisions?"
    ),
    "warm-up": Verb(
        "warm_up",
        "Compile all kernels that a model can reach, for images and first starts; loads no weights.",
    ),
    "make-checkpoint": Verb(
        "make_checkpoint",
        "Write a checkpoint with random weights, for machines that cannot download the real one.",
    ),
}
