"""Trace readers by damaged samples of every format: refused in one line, or read right.

Texts that are read are read a second time by `plain_reader.py`, and must hold the same requests.
A sealed Parquet file is refused or gives what was written.
"""

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from mdi_shared.cost.files import read_cost_file
from mdi_shared.cost.shape import TINY
from mdi_sim.simulate import simulate
from mdi_traces import generate_workload
from mdi_traces.check import check_run
from mdi_traces.distributions import Poisson
from mdi_traces.formats import load_requests
from mdi_traces.io import write_csv, write_jsonl, write_parquet
from mdi_traces.run import load_run
from tests.fuzz.damage import damaged
from tests.fuzz.plain_reader import requests_of
from tests.fuzz.suite import drawn, refusal
from tests.traces import samples

CASES = Path(__file__).parent.parent / "traces" / "cases"
TEXTS = {name: getattr(samples, name).encode() for name in (
    "MOONCAKE", "AZURE", "BURSTGPT", "BURSTGPT_SESSIONS", "BAILIAN", "LENGTHS", "OWN",
    "TIMED_LENGTHS")} | {"TRACELAB": samples.tracelab().encode()}  # fmt: skip
KINDS = ("text", "text", "text", "sealed", "foreign")


def readers(folder):
    """Return the suite; its files go to `folder`."""
    work = generate_workload("chat-sessions", num_requests=6, rate=5.0, seed=1)
    run = simulate(work, cost=read_cost_file("h200-tiny"), shape=TINY)
    run.save(folder / "run")
    sealed = {path.name: path.read_bytes() for path in sorted(folder.glob("run.*.parquet"))}
    whole = load_run(folder / "run")
    whole.items_table  # noqa: B018 - read now
    texts = {**TEXTS, **{path.name: path.read_bytes() for path in sorted(CASES.iterdir())
                         if path.suffix in (".csv", ".jsonl")}}  # fmt: skip
    for write, name in ((write_csv, "ours.csv"), (write_jsonl, "ours.jsonl")):
        write(folder / name, work.table, work.metadata)
        texts[name] = (folder / name).read_bytes()
    write_parquet(folder / "work.parquet", work.table, work.metadata)
    work = load_requests(folder / "work.parquet")
    sealed_work = (folder / "work.parquet").read_bytes()
    foreign = _foreign(folder, work.table)

    def text(rng, counts):
        raw = damaged(rng.choice(list(texts.values())), rng)
        path = folder / "t"
        path.write_bytes(raw)
        closed = rng.random() < 0.1
        arrivals = Poisson(rate=2.0) if rng.random() < 0.15 else None
        limit = rng.choice((None,) * 8 + (1, 3))
        options = {"arrivals": arrivals, "closed_loop": closed, "limit": limit,
                   "sort": rng.random() < 0.3}  # fmt: skip
        trace, refused = refusal(lambda: load_requests(path, **options))
        counts["texts refused" if refused else "texts read"] += 1
        if refused is None and limit is None and arrivals is None:
            counts["texts read twice"] += _is_right(raw, trace)

    def sealed_file(rng, counts):
        name = rng.choice([*sealed, "work"])
        raw = sealed.get(name, sealed_work)
        at = len(raw) - rng.choice((len(raw), 6_000, 100))  # the footer, and the seal before it
        raw = raw[:at] + damaged(raw[at:], rng, is_text=False)
        if name == "work":
            (folder / "w.parquet").write_bytes(raw)
            found, refused = refusal(load_requests, folder / "w.parquet")
            assert refused or found.frame().equals(work.frame()), "wrongly read"
        else:
            for each, content in sealed.items():
                (folder / f"d{each.removeprefix('run')}").write_bytes(
                    raw if each == name else content
                )
            found, refused = refusal(_loaded, folder / "d")
            if refused is None:
                for table in ("steps", "items", "requests"):
                    same = getattr(found, table).equals(getattr(whole, table))  # NaN is NaN here
                    assert same, f"{table} are wrongly read"
                assert found.metadata == whole.metadata, "wrongly read"
                refusal(check_run, found)
        counts["sealed files refused" if refused else "sealed files read"] += 1

    def foreign_file(rng, counts):
        path = folder / "f.parquet"
        path.write_bytes(damaged(rng.choice(foreign), rng, is_text=False))
        _, refused = refusal(load_requests, path)
        counts["others' Parquet refused" if refused else "others' Parquet read"] += 1

    kinds = {"text": text, "sealed": sealed_file, "foreign": foreign_file}

    def case(seed, counts: Counter[str]):
        rng = drawn("readers", seed)
        kinds[rng.choice(KINDS)](rng, counts)

    return case


def _loaded(prefix):
    run = load_run(prefix)
    run.items_table  # noqa: B018 - read now
    return run


def _foreign(folder, table):
    """Return Parquet files as other programs write them: without seal, in several packings."""
    small = table.select(["arrival_ns", "prompt_len", "output_len", "session_id"])
    found = []
    for options in ({"compression": "none"}, {"compression": "snappy", "use_dictionary": False},
                    {"compression": "gzip", "data_page_version": "2.0"},
                    {"compression": "zstd", "write_page_checksum": True}):  # fmt: skip
        pq.write_table(small, folder / "o.parquet", **options)
        found.append((folder / "o.parquet").read_bytes())
    return found


def _is_right(raw, trace):
    """Read the file a second time; return whether it could be, fail when it says something else."""
    name = trace.metadata.config.get("format", "own")
    if any("inputs of a run" in note for note in trace.metadata.notes):
        return False
    try:
        wanted = requests_of(raw, name)
    except Exception:  # noqa: BLE001 - spelt in a way that only one of the two readers takes
        return False
    columns = [pa.Table.column(trace.table, each).to_pylist()
               for each in ("arrival_ns", "prompt_len", "output_len")]  # fmt: skip
    timed = next(iter(wanted))[0] is not None
    found = Counter((at if timed else None, p, o) for at, p, o in zip(*columns, strict=True))
    assert found == wanted, f"wrongly read as {name}: {found - wanted} instead of {wanted - found}"
    return True
