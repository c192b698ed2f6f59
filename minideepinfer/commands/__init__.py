"""The verbs of the `mdi` command, one module each, imported when the verb is asked for.

A new verb is a module with one function and a line in `VERBS`. Modules import at their top only
what is cheap (typer and the core); the rest inside the function, so that each verb starts as
fast as its own work allows.

Read next: `options.py` (options declared once), `screen.py` (what is printed where).
"""

from collections.abc import Callable
from importlib import import_module

# Name and the first sentence of its help, which the list of verbs shows without importing it.
VERBS = {
    "simulate": "Replay a request trace, or a generated workload, in virtual time.",
    "calibrate": "Fit step times of a model and its host to recorded runs; simulate --cost reads "
    "the result.",
    "accuracy": "Leave each recorded run out, fit step times to the others, and simulate it from "
    "arrivals.",
    "transfer": "Predict step times of other hardware or another model from a fitted model.",
    "tune": "Search chunk size, prefill attempts and seats for an SLO or for throughput, by "
    "simulation.",
    "lab": "Run traces x loads x settings x placements x policies x seeds, and say which is best.",
    "capacity": "Search the highest rate at which a service level holds, with its uncertainty.",
    "show": "Show what a trace file holds, or a run: origin, summary, pictures.",
    "check": "Check traces: conservation laws of a run, rules of a request trace.",
    "compare": "Compare two runs: latencies, step times, rates, decisions.",
    "convert": "Convert a request trace to Parquet, JSON lines or CSV, by the ending of OUT.",
    "generate-workload": "Write a synthetic request trace.",
    "generate": "Generate from prompts given as texts or, with --ids, as token ids.",
    "record": "Run a generated workload on the real model and record it.",
    "replay": "Run a request trace on the real model, arrivals honoured, and record it.",
    "retrace": "Replay a recorded run in the simulator: does it make the same decisions?",
    "profile": "Run made-up steps of a model and show what each part of a layer takes, beside its "
    "floor.",
    "warm-up": "Compile all kernels that a model can reach, for images and first starts; loads no "
    "weights.",
    "make-checkpoint": "Write a checkpoint with random weights, for machines that cannot download "
    "the real one.",
}
_ELSEWHERE = {"replay": "record"}  # verbs that share a module


def load_verb(name: str) -> Callable[..., None]:
    """Import a verb and return its function."""
    function = name.replace("-", "_")
    module = import_module(f"{__name__}.{_ELSEWHERE.get(name, function)}")
    found: Callable[..., None] = getattr(module, function)
    return found
