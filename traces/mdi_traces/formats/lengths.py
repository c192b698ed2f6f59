"""Tables of prompt and output lengths, with or without arrival times.

Known are the column names of the Vidur tables and traces and of the LLMServingSim workloads.
Without a column of times an arrival process must be given, and its times are drawn here.
"""

from collections.abc import Set

import numpy as np

from mdi_shared.errors import ConfigError, TraceError
from mdi_traces.formats.base import Format, Imported, Options, length_columns
from mdi_traces.formats.rows import NS_PER_S, Rows

PAIRS = (
    ("num_prefill_tokens", "num_decode_tokens"),
    ("input_tokens", "output_tokens"),
    ("input_toks", "output_toks"),
)
TIMES = {"arrival_time_s": NS_PER_S, "arrived_at": NS_PER_S, "arrival_time_ns": 1}
_TIME_NAMES = ", ".join(TIMES)


def _matches(names: Set[str]) -> bool:
    return any(names >= set(pair) for pair in PAIRS)


def _read(rows: Rows, options: Options) -> Imported:
    prompt_name, output_name = next((pair for pair in PAIRS if rows.has(pair[0])), PAIRS[0])
    prompt, output = rows.tokens(prompt_name), rows.tokens(output_name)
    notes: tuple[str, ...] = ()
    found = [name for name in TIMES if rows.has(name)]
    if len(found) > 1:
        raise TraceError(rows.file, f"has two columns of times, {' and '.join(found)}")
    if found:
        if options.arrivals is not None:
            raise ConfigError("arrivals", options.arrivals, f"{rows.file} has times of its own "
                              f"({found[0]})")  # fmt: skip
        arrival = rows.times_ns(found[0], TIMES[found[0]])
    elif options.arrivals is None:
        raise ConfigError("arrivals", None, f"{rows.file} has no column of arrival times "
                          f"({_TIME_NAMES}): give an arrival process, such as "
                          "Poisson(rate=2.0)")  # fmt: skip
    else:
        arrival = options.arrivals.draw_ns(len(rows), np.random.default_rng(options.seed))
        notes = (f"arrival times drawn from {options.arrivals}, seed {options.seed}",)
    return Imported(columns=length_columns(arrival, prompt, output), notes=notes)


LENGTHS = Format(
    name="lengths",
    needs=" or ".join(f"{a}, {b}" for a, b in PAIRS) + f", with {_TIME_NAMES} or arrivals=...",
    matches=_matches,
    read=_read,
    has_times=False,
    no_sessions="records no sessions",
)
