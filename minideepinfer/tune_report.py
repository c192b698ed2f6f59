"""What `mdi tune` shows: the front of settings, the recommended one, how sure its gain is, plots.

Nothing is decided here; `Tuning` says what is best and whether the gain exceeds the model's error.

Read next: `mdi_sim/search/tuning.py` (the verdict), docs/tuning.md (how to read it).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mdi_analysis import SLO
from mdi_analysis.report import change, make_table, number, percent, plain
from mdi_shared.run_description import RunDescription
from mdi_sim.search.settings import changes_of
from mdi_sim.search.tune import NEGLIGIBLE
from mdi_sim.search.tuning import GOODPUT, Gain, Range, Trial, Tuning, merit
from minideepinfer.run_summary import cost_label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

MOST_ROWS = 12  # of the table; the JSON document has all


@dataclass(frozen=True)
class TuneReport:
    """A tuning with the run it started from.

    `given` are the scheduler's options that the user set, which the recommended ones repeat, and
    `flags` the step times and memory options, None where not given.
    """

    found: Tuning
    run: RunDescription
    slo: SLO | None
    notes: Sequence[str]
    given: Mapping[str, Any]
    flags: Mapping[str, Any]

    @property
    def basis(self) -> str:
        """What the step times rest on."""
        return cost_label(self.run.step_cost.describe())

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
        flags = [f"--{name.replace('_', '-')} {value:g}" if isinstance(value, float)
                 else f"--{name.replace('_', '-')} {value}"
                 for name, value in self.flags.items() if value is not None]  # fmt: skip
        return self._line(flags, self.options())

    def executor_flags(self) -> str:
        """Return the flags of the verbs that run the model; the pool is the one simulated."""
        pairs, flags = self.options(), {n: v for n, v in self.flags.items() if v is not None}
        cost = flags.pop("cost", None)
        if self.recommended.config.chunk_policy == "cost_target" and cost is not None:
            pairs.append(f"cost_model={cost}")
        pairs += [f"{name}={value:g}" for name, value in flags.items()]
        if not flags and "num_blocks" not in self.given:
            pairs.append(f"num_blocks={self.run.scheduler.num_blocks}")
        return self._line([], pairs)

    def _line(self, flags: list[str], pairs: Sequence[str]) -> str:
        ranks = [f"--ranks {self.run.ranks}"] if self.run.ranks > 1 else []
        return " ".join([*flags, *ranks, *(f"--set {pair}" for pair in pairs)]) or "(none)"

    def document(self) -> dict[str, Any]:
        """Return everything, JSON-able."""
        found = self.found
        document: dict[str, Any] = plain({
            "objective": found.objective,
            "slo": self.slo,
            "cost": self.basis,
            "assumed": list(self.run.assumed),
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
                  f"step times: {self.basis}"]  # fmt: skip
        if found.interrupted:
            lines.append("interrupted: this is what was found so far")
        lines += [f"note: {note}" for note in self.notes]
        first = [f"assumed: {'; '.join(self.run.assumed)}"] if self.run.assumed else []
        return [*first, make_table(title, headers, rows, n_text=2), *lines]

    def plot(self, folder: Path) -> Path:
        """Draw goal against P99 of TTFT and of TPOT into FOLDER/tuning.png, one dot a setting.

        Bars on default and best are the model's error.
        """
        from matplotlib.figure import Figure

        from mdi_analysis.drawing import make_plot_folder, save_figure

        figure = Figure(figsize=(11, 4.5), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        figure.suptitle(f"{len(self.found.trials)} settings, step times: {self.basis}", fontsize=10)
        for ax, name in zip(axes, ("ttft_p99_ms", "tpot_p99_ms"), strict=True):
            _draw(ax, self.found, name)
            ax.set_xlabel(f"{name[:4].upper()}, P99 (ms)")
        is_goodput = self.found.objective == GOODPUT
        axes[0].set_ylabel("share of requests within the SLO" if is_goodput else "tokens/s")
        axes[0].legend(fontsize=9, frameon=False)
        return save_figure(figure, make_plot_folder(folder) / "tuning.png")

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
        pairs = [("default", found.default, found.default_range)]
        if found.best is not found.default:
            pairs.append(("best", found.best, found.best_range))
        for name, trial, error in pairs:
            if error is None or trial.measured is None:
                continue
            every = (trial.measured, *error.ends)
            speeds = [each.tokens_s for each in every]
            shares = [each.goodput for each in every if each.goodput is not None]
            parts = [f"{number(min(speeds))} to {number(max(speeds))} tokens/s"]
            if shares:
                parts.append(f"goodput {percent(min(shares))} to {percent(max(shares))}")
            yield f"{name}, step times off by up to the model's error: {', '.join(parts)}"


def _draw(ax: "Axes", found: Tuning, latency: str) -> None:
    from mdi_analysis.drawing import BLUE, GREY, ORANGE, VERMILION, plain_frame

    groups = (("tried", list(found.trials), GREY, 14), ("front", found.pareto(), BLUE, 26),
              ("default", [found.default], ORANGE, 60),
              ("best", [found.best], VERMILION, 60))  # fmt: skip
    for order, (name, trials, colour, size) in enumerate(groups):
        points = [point for trial in trials if (point := _point(trial, found.objective, latency))]
        ax.scatter([x for x, _ in points], [y for _, y in points], s=size, color=colour, label=name,
                   zorder=2 + order, alpha=0.5 if name == "tried" else 1.0,
                   edgecolors="none")  # fmt: skip
    bars = ((found.default, found.default_range, ORANGE), (found.best, found.best_range, VERMILION))
    for trial, error, colour in bars:
        at = _point(trial, found.objective, latency)
        if error is not None and at is not None:
            # With bounds on latency the setting as it is need not lie between the ends.
            goals = [at[1], *(merit(found.objective, end)[0] for end in error.ends)]
            ax.vlines(at[0], min(goals), max(goals), color=colour, linewidth=1.5, zorder=1)
    plain_frame(ax)


def _point(trial: Trial, objective: str, latency: str) -> tuple[float, float] | None:
    """Return latency and goal of a trial; None where it has no latency."""
    x = None if trial.measured is None else getattr(trial.measured, latency)
    return None if x is None else (x, merit(objective, trial.measured)[0])


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
