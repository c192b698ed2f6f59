"""CSV tables of prompt and output lengths, with or without arrival times.

Two pairs of column names are known: those of the Vidur tables and those of the LLMServingSim
workloads. Without `arrival_time_s` (seconds from the trace's start) an arrival process must be
given, and its times are drawn here.
"""

import numpy as np

from mdi_shared.errors import ConfigError
from mdi_traces.formats.base import Format, Imported, Options, length_columns
from mdi_traces.formats.rows import NS_PER_S, Kind, read_csv

PAIRS = (("num_prefill_tokens", "num_decode_tokens"), ("input_tokens", "output_tokens"))
_TIME = "arrival_time_s"


def _matches(keys: frozenset[str]) -> bool:
    return any(keys >= set(pair) for pair in PAIRS)


def _read(path: str, options: Options) -> Imported:
    kinds: dict[str, Kind] = {name: "int" for pair in PAIRS for name in pair}
    rows = read_csv(path, {**kinds, _TIME: "float"}, limit=options.limit)
    prompt_name, output_name = next((pair for pair in PAIRS if rows.has(pair[0])), PAIRS[0])
    prompt, output = rows.tokens(prompt_name), rows.tokens(output_name)
    notes: tuple[str, ...] = ()
    if rows.has(_TIME):
        if options.arrivals is not None:
            raise ConfigError("arrivals", options.arrivals, f"{path} has times of its own")
        arrival = rows.times_ns(_TIME, NS_PER_S)
    elif options.arrivals is None:
        raise ConfigError("arrivals", None, f"{path} has no column {_TIME!r}: give an arrival "
                          "process, such as Poisson(rate=2.0)")  # fmt: skip
    else:
        arrival = options.arrivals.draw_ns(len(rows), np.random.default_rng(options.seed))
        notes = (f"arrival times drawn from {options.arrivals}, seed {options.seed}",)
    return Imported(columns=length_columns(arrival, prompt, output), lines=rows.lines, notes=notes)


LENGTHS = Format(
    name="lengths",
    kind="csv",
    needs=" or ".join(f"{a}, {b}" for a, b in PAIRS) + f", with {_TIME} or arrivals=...",
    matches=_matches,
    read=_read,
    has_times=False,
)
