"""The fitted step-time model: linear in rows, pairs and lengths (docs/rules.md, R32).

It is coefficients and the ranges they were fitted on, readable as JSON. The fit itself is made
elsewhere; the same model then serves the simulator and the live chunk policy.

Read next: `work.py` (the features), `step_cost.py` (the protocol), `chunking.py` (a user).
"""

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any

from mdi_shared.cost.group import GroupCost
from mdi_shared.cost.stated import require_fit
from mdi_shared.cost.step_cost import MOST_NS, HostCost
from mdi_shared.cost.work import DecodeWork, StepWork
from mdi_shared.errors import ConfigError, require_number
from mdi_shared.json_input import (
    read_int_pair,
    read_int_pairs,
    read_json,
    read_numbers,
    require_mapping,
    require_object,
)

SCHEMA_VERSION = 1
MOST_COUNT = 2**62  # pairs, as int64 columns hold them
TIMES = (2**31, MOST_NS)  # of a table: rows, ns
UNITS = "ns"
PREFILL_TERMS = ("const", "rows", "consumer_rows", "idx_pairs_r2", "idx_pairs_r1", "core_pairs",
                 "swa_pairs", "cached_rows", "n_seqs")  # fmt: skip
DECODE_TERMS = ("const", "rows", "sum_k", "n_seqs")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTerms:
    """The coefficients theta of a prefill step (R32): ns per unit of the `StepWork` field.

    `const` is ns per step. All are at least 0, so that time never falls as work grows, and at
    most MOST_NS; a term the fit dropped is 0. `base` lists (rows, ns), ascending: up to its last
    entry it replaces `const` and `rows` by interpolation, beyond that `rows` is what a further row
    adds. Time is far from proportional to rows where few of them wake more and more experts.
    """

    const: float
    rows: float
    consumer_rows: float
    idx_pairs_r2: float
    idx_pairs_r1: float
    core_pairs: float
    swa_pairs: float
    cached_rows: float
    n_seqs: float
    base: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        for name in PREFILL_TERMS:
            require_number(f"prefill.{name}", getattr(self, name), MOST_NS)
        _require_ascending("prefill.base", self.base)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTerms:
    """The coefficients of a decode step (R32), as in `PrefillTerms`.

    `graphs` lists captured graphs as (rows, ns), ascending. The smallest one that holds a step's
    rows replaces `const` and `rows`; a step larger than all of them runs eagerly, in no less
    time than the largest graph. A graph that is not full touches fewer experts: each row that is
    missing saves the graph's `graph_slopes`, ns (empty: nothing is saved).
    """

    const: float
    rows: float
    sum_k: float
    n_seqs: float
    graphs: tuple[tuple[int, int], ...] = ()
    graph_slopes: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in DECODE_TERMS:
            require_number(f"decode.{name}", getattr(self, name), MOST_NS)
        _require_ascending("decode.graphs", self.graphs)
        if self.graph_slopes and len(self.graph_slopes) != len(self.graphs):
            raise ConfigError("decode.graph_slopes", len(self.graph_slopes),
                              f"must be one per graph, {len(self.graphs)}")  # fmt: skip
        for slope in self.graph_slopes:
            require_number("decode.graph_slopes", slope, MOST_NS)


PREFILL_FEATURES = PREFILL_TERMS[1:]
DECODE_FEATURES = DECODE_TERMS[1:]


def features(work: StepWork) -> tuple[int, ...]:
    """Return what the terms multiply, in the order of PREFILL_FEATURES or DECODE_FEATURES."""
    if not work.is_prefill:
        return work.rows, work.sum_k, work.n_seqs
    return (work.rows, work.consumer_rows, work.idx_pairs_r2, work.idx_pairs_r1, work.core_pairs,
            work.swa_pairs, work.cached_rows, work.n_seqs)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """A step-time model linear in rows, pairs and lengths, with the ranges it was fitted on.

    The ranges map features to the least and greatest value seen; a feature without a range counts
    as never seen. `device_ns` answers outside them, too, so ask `extrapolated` before trusting it.
    `fit` is kept as it is: diagnostics of whoever fitted the model. `group` says what a step of
    several ranks takes that share the experts; without it, what the slowest of them takes.
    """

    prefill: PrefillTerms
    decode: DecodeTerms
    prefill_ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    decode_ranges: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    host: HostCost = field(default_factory=HostCost)
    fit: Mapping[str, Any] = field(default_factory=dict)
    group: GroupCost | None = None

    def __post_init__(self) -> None:
        _require_ranges("prefill.ranges", self.prefill_ranges, PREFILL_FEATURES)
        _require_ranges("decode.ranges", self.decode_ranges, DECODE_FEATURES)
        require_fit(self.fit)

    def device_ns(self, work: StepWork) -> int:
        """Return the device time of a step, ns, rounded to the nearest."""
        if work.is_prefill:
            p = self.prefill
            ns = (
                self._base_ns(work.rows) + p.consumer_rows * work.consumer_rows
                + p.idx_pairs_r2 * work.idx_pairs_r2 + p.idx_pairs_r1 * work.idx_pairs_r1
                + p.core_pairs * work.core_pairs + p.swa_pairs * work.swa_pairs
                + p.cached_rows * work.sum_k + p.n_seqs * work.n_seqs
            )  # fmt: skip
        else:
            d = self.decode
            ns = self._forward_ns(work.rows) + d.sum_k * work.sum_k + d.n_seqs * work.n_seqs
        return max(int(ns + 0.5), 1)

    def decode_times(self, work: DecodeWork) -> Iterator[int]:
        """Yield `device_ns` of a decode batch's steps, without counting their pairs."""
        d, n = self.decode, work.num_seqs
        forward, slope, seqs = self._forward_ns(n), d.sum_k, d.n_seqs * n
        return (int(forward + slope * k + seqs + 0.5) or 1 for k in count(work.sum_k, n))

    def _base_ns(self, rows: int) -> float:
        p = self.prefill
        if not p.base:
            return p.const + p.rows * rows
        index = bisect_left(p.base, (rows, 0))
        if index == len(p.base):
            return p.base[-1][1] + p.rows * (rows - p.base[-1][0])
        size, ns = p.base[index]
        if index == 0 or size == rows:
            return ns
        size_before, ns_before = p.base[index - 1]
        share = (rows - size_before) / (size - size_before)
        return ns_before + share * (ns - ns_before)

    def _forward_ns(self, rows: int) -> float:
        d = self.decode
        if not d.graphs:
            return d.const + d.rows * rows
        index = bisect_left(d.graphs, (rows, 0))
        if index < len(d.graphs):
            size, ns = d.graphs[index]
            return ns - d.graph_slopes[index] * (size - rows) if d.graph_slopes else ns
        return max(d.const + d.rows * rows, d.graphs[-1][1])

    def extrapolated(self, work: StepWork) -> tuple[str, ...]:
        """Return the features of `work` that lie outside what the fit has seen."""
        names = PREFILL_FEATURES if work.is_prefill else DECODE_FEATURES
        ranges = self.prefill_ranges if work.is_prefill else self.decode_ranges
        outside = [
            name
            for name, value in zip(names, features(work), strict=True)
            if name not in ranges or not ranges[name][0] <= value <= ranges[name][1]
        ]
        is_cut = work.is_prefill and work.consumer_rows != work.rows
        if is_cut and not self.knows_replay and "consumer_rows" not in outside:
            outside.append("consumer_rows")
        return tuple(outside)

    @property
    def knows_replay(self) -> bool:
        """Whether some fitted prefill step ran fewer consumer rows than rows.

        Without such a step (bounded replay was off) the two could not be told apart: what the rows
        that are left out save is not known, though their number lies within the range.
        """
        fit = self.fit.get("prefill")
        dropped = fit.get("dropped", {}) if isinstance(fit, Mapping) else {}
        return "consumer_rows" not in dropped

    def in_range(self, work: StepWork) -> bool:
        """Return True when the fit has seen steps around `work` in every feature."""
        return not self.extrapolated(work)

    def describe(self) -> dict[str, Any]:
        """Return the whole model, as `to_json` does, and the hardware it was fitted on."""
        return {"kind": "linear", "hardware": self.fit.get("hardware"), **self.to_json()}

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> "LinearCost":
        """Build from what `describe` returned, such as a run's metadata; raises as `from_json`."""
        own = {k: v for k, v in description.items() if k not in ("kind", "hardware")}
        return cls.from_json(own)

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts, lists and numbers; `from_json` inverts it."""
        prefill, decode = asdict(self.prefill), asdict(self.decode)
        base = [list(entry) for entry in prefill.pop("base")]
        graphs = [list(graph) for graph in decode.pop("graphs")]
        slopes = list(decode.pop("graph_slopes"))
        return {
            "schema_version": SCHEMA_VERSION,
            "units": UNITS,
            "prefill": {
                "terms": prefill,
                "base": base,
                "ranges": {name: list(seen) for name, seen in self.prefill_ranges.items()},
            },
            "decode": {
                "terms": decode,
                "graphs": graphs,
                "graph_slopes": slopes,
                "ranges": {name: list(seen) for name, seen in self.decode_ranges.items()},
            },
            "host": asdict(self.host),
            "fit": dict(self.fit),
            **({} if self.group is None else {"group": self.group.to_json()}),
        }

    @classmethod
    def from_json(cls, source: str | Path | Mapping[str, Any]) -> "LinearCost":
        """Build from a file's path, or from what `to_json` returned.

        Raises `ConfigError` for an unreadable file, a missing or unknown key, and a number that is
        out of its range.
        """
        data = require_object(
            "cost model",
            source if isinstance(source, Mapping) else read_json(Path(source)),
            ("schema_version", "units", "prefill", "decode", "host"),
            optional=("fit", "group"),
        )
        for name, expected in (("schema_version", SCHEMA_VERSION), ("units", UNITS)):
            if data[name] != expected:
                raise ConfigError(name, data[name], f"must be {expected!r}")
        prefill = require_object(
            "prefill", data["prefill"], ("terms", "ranges"), optional=("base",)
        )
        decode = require_object("decode", data["decode"], ("terms", "graphs", "ranges"),
                                optional=("graph_slopes",))  # fmt: skip
        prefill_terms = require_object("prefill.terms", prefill["terms"], PREFILL_TERMS)
        decode_terms = require_object("decode.terms", decode["terms"], DECODE_TERMS)
        return cls(
            prefill=PrefillTerms(
                **prefill_terms, base=read_int_pairs("prefill.base", prefill.get("base", ()), TIMES)
            ),
            decode=DecodeTerms(
                **decode_terms,
                graphs=read_int_pairs("decode.graphs", decode["graphs"], TIMES),
                graph_slopes=read_numbers("decode.graph_slopes", decode.get("graph_slopes", ())),
            ),
            prefill_ranges=_read_ranges("prefill.ranges", prefill["ranges"]),
            decode_ranges=_read_ranges("decode.ranges", decode["ranges"]),
            host=host_from_json(data["host"]),
            fit=require_mapping("fit", data.get("fit", {})),
            group=GroupCost.from_json(data["group"]) if "group" in data else None,
        )


HOST_TERMS = ("schedule_ns", "schedule_ns_per_seq", "launch_ns", "process_ns", "process_ns_per_seq")


def host_from_json(value: object) -> HostCost:
    """Build the host's costs from a model file; terms that earlier files lack may be missing."""
    later = tuple(f.name for f in fields(HostCost) if f.name not in HOST_TERMS)
    return HostCost(**require_object("host", value, HOST_TERMS, optional=later))


def _require_ascending(name: str, table: tuple[tuple[int, int], ...]) -> None:
    """Raise unless sizes ascend and times, from 0 up, do not fall."""
    last_size, last_ns = 0, 0
    for size, ns in table:
        if not last_size < size or not last_ns <= ns:
            raise ConfigError(name, (size, ns), f"sizes must ascend and times not fall; the entry "
                              f"before is {(last_size, last_ns)}")  # fmt: skip
        last_size, last_ns = size, ns


def _require_ranges(
    where: str, ranges: Mapping[str, tuple[int, int]], known: tuple[str, ...]
) -> None:
    for name, (least, greatest) in ranges.items():
        if name not in known:
            raise ConfigError(f"{where}.{name}", (least, greatest),
                              f"unknown feature; known: {', '.join(known)}")  # fmt: skip
        if least > greatest:
            raise ConfigError(f"{where}.{name}", (least, greatest), "must be (least, greatest)")


def _read_ranges(where: str, data: object) -> dict[str, tuple[int, int]]:
    return {
        n: read_int_pair(f"{where}.{n}", seen, (MOST_COUNT, MOST_COUNT))
        for n, seen in require_mapping(where, data).items()
    }
