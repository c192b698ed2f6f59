"""`mdi check`, `show`, `convert`, `compare` and `generate-workload`."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from mdi_traces.io import read_table, write_parquet
from minideepinfer import WORKLOADS, load_requests

GOOD = "arrival_ns,prompt_len,output_len\n0,10,5\n2000000000,30,15\n"
BAD = "arrival_ns,prompt_len,output_len\n5,10,5\n1,30,15\n"


@pytest.fixture
def good(mdi):
    Path("good.csv").write_text(GOOD)
    return "good.csv"


def spoil(path: str, kind: str, column: str, row: int, value: int) -> None:
    """Change one value of a run's table on disk."""
    table, metadata = read_table(path, kind)
    values = table[column].to_numpy().copy()
    values[row] = value
    index = table.schema.get_field_index(column)
    array = pa.array(values, type=table.schema.field(column).type)
    write_parquet(path, table.set_column(index, table.schema.field(column), array), metadata)


def test_a_sound_run_passes_every_law(mdi, run_r):
    done = mdi("check", "r")
    assert done.code == 0
    assert "r: 15 ok, 0 skipped, 0 broken" in done.out
    assert mdi("check", "r.steps.parquet").code == 0


def test_a_broken_law_names_its_first_row(mdi, run_r):
    spoil("r.steps.parquet", "steps", "n_tokens", 4, 99)
    done = mdi("check", "r")
    assert done.code == 1
    assert "step_rows_match_items" in done.out
    assert "steps row 4" in done.out
    assert "n_tokens = 99" in done.out or "n_tokens is 99" in done.out


def test_laws_without_items_are_skipped(mdi, run_r):
    Path("r.items.parquet").unlink()
    laws = json.loads(mdi("check", "r", "--json").out)["checked"][0]["laws"]
    verdicts = {law["law"]: law["verdict"] for law in laws}
    assert verdicts["items_belong"] == "skipped"
    assert verdicts["steps_have_no_gaps"] == "ok"
    assert mdi("check", "r").code == 0


def test_check_takes_many_paths_and_exits_with_the_worst(mdi, run_r, good):
    Path("bad.csv").write_text(BAD)
    assert mdi("check", "r", good).code == 0
    done = mdi("check", "r", good, "bad.csv")
    assert done.code == 1
    assert "bad.csv, row 3, column 'arrival_ns'" in done.out
    done = mdi("check", "bad.csv", "none.csv", "--json")
    assert done.code == 2
    document = json.loads(done.out)["checked"]
    assert [each["path"] for each in document] == ["bad.csv", "none.csv"]
    assert document[0]["laws"][0]["row"] == 3
    assert "no such file" in document[1]["unreadable"]


def test_show_describes_a_request_trace(mdi, good):
    done = mdi("show", good, "--head", 1)
    assert done.code == 0
    assert "good.csv: 2 requests" in done.out
    assert "arrival_ns=0" in done.out
    assert "tokens" in done.out
    document = json.loads(mdi("show", good, "--json").out)
    assert document["statistics"]["span_s"] == 2.0
    assert document["statistics"]["tokens"]["prompt_len"]["mean"] == 20
    units = {column["name"]: column["unit"] for column in document["columns"]}
    assert units["arrival_ns"] == "ns"
    assert "t_finish" not in units


def test_show_sums_a_run_up(mdi, run_r):
    done = mdi("show", "r", "--head", 2)
    assert done.code == 0
    for text in ("20 requests: 20 completed", "uncalibrated", "Slowest steps", "First rows",
                 "seed"):  # fmt: skip
        assert text in done.out
    document = json.loads(mdi("show", "r", "--json", "--head", 2).out)
    slowest = document["slowest_steps"]
    assert len(slowest) == 5
    assert np.all(np.diff([step["device_ms"] for step in slowest]) <= 0)
    assert len(document["head"]) == 2
    assert document["rows"]["requests"] == 20


def test_slowest_steps_count_once_over_ranks(mdi, small):
    mdi("simulate", *small, "--ranks", 4, "--out", "r")
    slowest = json.loads(mdi("show", "r", "--json").out)["slowest_steps"]
    assert len({step["step"] for step in slowest}) == 5


@pytest.mark.parametrize("ending", ["parquet", "jsonl", "csv"])
def test_convert_keeps_the_requests(mdi, good, ending):
    done = mdi("convert", good, f"out.{ending}")
    assert (done.code, done.err) == (0, f"wrote out.{ending}: 2 requests\n")
    assert mdi("convert", good, f"out.{ending}").err.startswith(f"replaced out.{ending}")
    assert load_requests(f"out.{ending}").table.equals(load_requests(good).table)


def test_convert_changes_what_it_is_asked_to(mdi, good):
    assert mdi("convert", good, "fast.csv", "--speed", 2, "--limit", 2).code == 0
    assert load_requests("fast.csv").table["arrival_ns"].to_pylist() == [0, 1_000_000_000]
    Path("bad.csv").write_text(BAD)
    assert mdi("convert", "bad.csv", "sorted.csv", "--sort").code == 0
    assert load_requests("sorted.csv").table["arrival_ns"].to_pylist() == [0, 4]
    Path("l.csv").write_text("num_prefill_tokens,num_decode_tokens,num_total_tokens\n9,2,11\n")
    assert "--arrivals poisson:5" in mdi("convert", "l.csv", "timed.csv").err
    assert mdi("convert", "l.csv", "timed.csv", "--arrivals", "poisson:5").code == 0
    assert mdi("generate-workload", "chat-sessions", "chat.parquet", "-n", 30).code == 0
    assert mdi("convert", "chat.parquet", "open.parquet", "--open-loop").code == 0
    assert load_requests("chat.parquet").table["think_ns"].null_count < 30
    assert load_requests("open.parquet").table["think_ns"].null_count == 30


def test_a_run_compares_with_itself(mdi, run_r):
    done = mdi("compare", "r", "r.steps.parquet", "--expect-identical", "--names", "one", "two")
    assert done.code == 0
    assert "plans: identical for" in done.out
    assert "two: simulated; step times: roofline of h200" in done.out


def test_compare_finds_the_first_different_decision(mdi, run_r, small):
    mdi("simulate", *small, "--set", "max_num_batched_tokens=512", "--out", "s")
    assert mdi("compare", "r", "s").code == 0
    done = mdi("compare", "r", "s", "--expect-identical", "--json", "--slo", "ttft=100")
    assert done.code == 1
    assert done.err.startswith("the runs differ: identical for")
    document = json.loads(done.out)
    assert document["plans"]["identical"] is False
    assert document["basis"]["a"].startswith("simulated")
    assert "goodput_s" in document["rates"]


def test_compare_writes_a_page_and_a_picture(mdi, fails, run_r):
    done = mdi("compare", "r", "r", "--html", "page.html", "--plots", "p/both", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["written"] == ["page.html", "p/both/comparison.png"]
    assert "simulated; step times: roofline of h200" in Path("page.html").read_text()
    assert Path("p/both/comparison.png").read_bytes().startswith(b"\x89PNG")
    assert "must end in .html" in fails(2, "compare", "r", "r", "--html", "page.txt")
    assert "is a file" in fails(2, "compare", "r", "r", "--plots", "page.html")


def test_workloads_are_listed_with_source_and_tolerance(mdi):
    done = mdi("generate-workload", "--list")
    assert done.code == 0
    assert all(name in done.out for name in WORKLOADS)
    assert "Azure LLM inference trace 2023" in done.out
    assert "within 22%" in done.out


def test_equal_seeds_generate_equal_files(mdi):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        done = mdi("generate-workload", "azure-conv", f"{name}.parquet", "-n", 50, "--seed", seed,
                   "--rate", 3)  # fmt: skip
        assert done.code == 0
    assert Path("a.parquet").read_bytes() == Path("b.parquet").read_bytes()
    assert Path("a.parquet").read_bytes() != Path("c.parquet").read_bytes()
