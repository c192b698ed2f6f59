"""What `mdi tune` shows: the front of settings, the recommended one, and how sure its gain is.

Nothing is decided here; `Tuning` says what is best and whether the gain exceeds the model's error.

Read next: `mdi_sim/search/tuning.py` (the verdict), docs/tuning.md (how to read it).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdi_analysis import SLO
from mdi_analysis.report import change, make_table, number, percent, plain
from mdi_sim.search.settings import changes_of
from mdi_sim.search.tune import NEGLIGIBLE
from mdi_sim.search.tuning import GOODPUT, Gain, Range, Trial, Tuning
from minideepinfer.labels import cost_label
from minideepinfer.tune_plot import plot_tuning

if TYPE_CHECKING:
    from rich.table import Table

MOST_ROWS = 12  # of the table; the JSON document has all


@dataclass(frozen=True)
class TuneReport:
    """A tuning with what it rests on: `cost` as its model describes itself.

    `given` are the scheduler's options that the user set, which the recommended ones repeat;
    `cost_file` is the model's file, None for a roofline; `pool_gb` and `ranks` are what the KV pool
    and the group were given as.
    """

    found: Tuning
    slo: SLO | None
    cost: Mapping[str, Any]
    notes: Sequence[str]
    given: Mapping[str, Any]
    cost_file: Path | None
    pool_gb: float | None = None
    ranks: int = 1

    @property
    def recommended(self) -> Trial:
        """The best trial, or the default where the gain could be the model's error."""
        keeps = self.found.is_beyond_error is False
        return self.found.default if keeps else self.found.best

    @property
    def verdict(self) -> str:
        """Say in one line what the tuning came to."""
        found, beyond = self.found, self.found.is_beyond_error
        if found.best is found.default:
            return f"no difference: no setting tried is better than the default by {NEGLIGIBLE:.1%}"
        if beyond is None:
            why = "the tuning was interrupted" if found.interrupted else "no error of it is known"
            return f"gain {_gain(found.gain)}; the model's error bar is missing: {why}"
        if not beyond:
            return (
                "no difference beyond the model's error: keep the default (best "
                f"{_gain(found.gain)})"
            )
        return f"gain {_gain(found.gain)} over the default"

    def options(self) -> list[str]:
        """Return `key=value` of every scheduler option to set for the recommended setting."""
        changed = changes_of(self.found.default.config, self.recommended.config)
        return [f"{name}={_text(value)}" for name, value in {**self.given, **changed}.items()]

    def simulate_flags(self) -> str:
        """Return the flags of `mdi simulate` for the recommended setting."""
        cost = [] if self.cost_file is None else [f"--cost {self.cost_file}"]
        cost += [] if self.pool_gb is None else [f"--kv-cache-memory-gb {self.pool_gb:g}"]
        cost += [f"--ranks {self.ranks}"] if self.ranks > 1 else []
        return " ".join([*cost, *(f"--set {pair}" for pair in self.options())]) or "(none)"

    def executor_flags(self) -> str:
        """Return the flags of the verbs that run the model."""
        pairs = self.options()
        if self.recommended.config.chunk_policy == "cost_target" and self.cost_file is not None:
            pairs.append(f"cost_model={self.cost_file}")
        if self.pool_gb is not None:
            pairs.append(f"kv_cache_memory_gb={self.pool_gb:g}")
        ranks = [f"--ranks {self.ranks}"] if self.ranks > 1 else []
        return " ".join([*ranks, *(f"--set {pair}" for pair in pairs)]) or "(none)"

    def document(self) -> dict[str, Any]:
        """Return everything, JSON-able."""
        found = self.found
        document: dict[str, Any] = plain({
            "objective": found.objective,
            "slo": self.slo,
            "cost": cost_label(self.cost),
            "default": self._trial(found.default, found.default_range),
            "best": self._trial(found.best, found.best_range),
            "gain": found.gain,
            "beyond_model_error": found.is_beyond_error,
            "verdict": self.verdict,
            "recommended": {"set": self.options(), "simulate": self.simulate_flags(),
                            "executor": self.executor_flags()},
            "pareto": [self._trial(trial) for trial in found.pareto()],
            "trials": [self._trial(trial) for trial in found.trials],
            "interrupted": found.interrupted,
            "notes": list(self.notes),
        })  # fmt: skip
        return document

    def _trial(self, trial: Trial, error: Range | None = None) -> dict[str, Any]:
        changed = changes_of(self.found.default.config, trial.config)
        ends = {} if error is None else {"with_model_error": error}
        return {"options": changed, "measured": trial.measured, "error": trial.error, **ends}

    def tables(self) -> list["Table | str"]:
        """Return the tables for people."""
        found = self.found
        names = {id(found.best): "best", id(found.default): "default"}
        front = found.pareto()
        shown = [found.default, found.best] if found.best is not found.default else [found.default]
        rest = [trial for trial in front if all(trial is not one for one in shown)]
        rows = [self._row(names.get(id(t), ""), t) for t in [*shown, *rest[:MOST_ROWS]]]
        title = (f"{len(found.trials)} settings tried; default, best, and those no other beats in "
                 f"{self._goal()}, TTFT and TPOT")  # fmt: skip
        headers = ("", "setting", "tokens/s", "goodput", "ttft p99 ms", "tpot p99 ms")
        lines = [self.verdict, *self._range_lines()]
        if len(rest) > MOST_ROWS:
            lines.append(f"{len(rest) - MOST_ROWS} more settings of the front: see --json")
        lines += [f"executor:     {self.executor_flags()}",
                  f"mdi simulate: {self.simulate_flags()}",
                  f"step times: {cost_label(self.cost)}"]  # fmt: skip
        if found.interrupted:
            lines.append("interrupted: this is what was found so far")
        lines += [f"note: {note}" for note in self.notes]
        return [make_table(title, headers, rows, n_text=2), *lines]

    def plot(self, path: Path) -> None:
        """Draw all trials to a PNG file."""
        plot_tuning(self.found, path, cost_label(self.cost))

    def _goal(self) -> str:
        return GOODPUT if self.found.objective == GOODPUT else "tokens/s"

    def _row(self, name: str, trial: Trial) -> tuple[str, ...]:
        changed = changes_of(self.found.default.config, trial.config)
        measured = trial.measured
        if measured is None:
            return name, _setting(changed), "-", "-", "-", "-"
        return (name, _setting(changed), number(measured.tokens_s), percent(measured.goodput),
                number(measured.ttft_p99_ms), number(measured.tpot_p99_ms))  # fmt: skip

    def _range_lines(self) -> Iterable[str]:
        """Yield what default and best become with the model's error in every step time."""
        found = self.found
        pairs = [("default", found.default_range)]
        if found.best is not found.default:
            pairs.append(("best", found.best_range))
        for name, error in pairs:
            if error is None:
                continue
            both = error.ends
            shares = [m.goodput for m in both if m.goodput is not None]
            parts = [f"{number(both[0].tokens_s)} to {number(both[1].tokens_s)} tokens/s"]
            if shares:
                parts.append(f"goodput {percent(min(shares))} to {percent(max(shares))}")
            yield f"{name}, step times off by the model's error: {', '.join(parts)}"


def _gain(gain: Gain) -> str:
    """Return the gain and, in brackets, the ends of its error bar."""
    points = gain.metric == GOODPUT

    def text(value: float) -> str:
        return f"{100 * value:+.1f} pp" if points else change(value)

    found = f"{text(gain.value)} {'goodput' if points else 'tokens/s'}"
    if gain.low is None or gain.high is None or gain.alike is None:
        return found
    low, high = gain.alike
    return (f"{found} ({text(gain.low)} to {text(gain.high)} by the model's error; "
            f"{text(low)} to {text(high)} if it is off alike for both)")  # fmt: skip


def _setting(changed: Mapping[str, Any]) -> str:
    """Return a setting in a few words: what differs from the default."""
    words = {"max_num_batched_tokens": "budget", "prefill_target_ms": "target ms",
             "prefill_attempt_interval": "interval", "max_num_seqs": "seats"}  # fmt: skip
    parts = [
        f"{words[name]} {number(changed[name])}" for name in words if changed.get(name) is not None
    ]
    if changed.get("chunk_policy") == "token_budget":
        parts.insert(0, "no target")
    return ", ".join(parts) or "as given"


def _text(value: object) -> str:
    if isinstance(value, bool) or value is None:
        return str(value).lower()
    return str(value)
