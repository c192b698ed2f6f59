"""`mdi simulate`: what it prints, writes and takes from files."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.hardware import H200
from mdi_shared.cost.shape import TINY
from mdi_shared.describe_run import describe_run
from mdi_shared.run_description import RunDescription
from mdi_shared.served import Served
from minideepinfer import load_run

CONFIG = """
[scheduler]
max_num_seqs = 4
max_num_batched_tokens = 512
prefill_target_ms = "none"
state_slot_ratio = 2

[simulate]
workload = "azure-conv"
requests = 12
model = "tiny"
ranks = 2
speed = 2
fast_forward = false
"""


def test_the_summary_counts_outcomes_and_says_what_it_rests_on(mdi, small):
    done = mdi("simulate", *small)
    assert done.code == 0
    assert done.err == ""
    assert "20 requests: 20 completed, 0 rejected, 0 aborted, 0 unfinished" in done.out
    for name in ("ttft_ms", "tpot_ms", "e2e_ms", "tokens/s/GPU", "KV occupancy", "steps on 1 rank"):
        assert name in done.out
    assert "simulated in" in done.out
    assert "roofline of h200 (ep 1), uncalibrated" in done.out
    assert "predicted as if" not in done.out


def test_json_is_one_document_and_nothing_else(mdi, small):
    done = mdi("simulate", *small, "--json", "--out", "r", "--slo", "ttft=1000", "--until", 1.5)
    document = json.loads(done.out)
    counts = document["summary"]["requests"]
    assert counts["completed"] + counts["unfinished"] == counts["total"]
    assert counts["total"] + counts["never_arrived"] == 20
    assert counts["never_arrived"] > 0
    assert sum(counts["by_unfinished_reason"].values()) == counts["unfinished"]
    assert document["summary"]["goodput"]["slo"]["ttft_ms"] == 1000
    assert document["summary"]["wall_s"] > 0
    assert "uncalibrated" in document["summary"]["basis"]
    assert document["config"]["scheduler"]["max_num_seqs"] == 256
    assert [Path(p).exists() for p in document["written"]] == [True] * 3


def test_by_default_the_model_fits(mdi):
    """The fewest ranks that hold it, and the KV pool that memory leaves; said in the first line."""
    options = ("simulate", "--workload", "azure-conv", "-n", 3)
    for hardware, ranks in (("h200", 6), ("b300", 2)):
        done = mdi(*options, "--hardware", hardware)
        first = done.out.splitlines()[0]
        assert first.startswith(f"assumed: {ranks} ranks, the fewest {hardware} that hold v41-")
        assert "KV blocks a rank" in first
        assert "as if they fitted" not in done.out
    note = "note: v41-flash with ep 1 needs 501 GB of weights"
    assert note in mdi(*options, "--ranks", 1).out
    assert "as if they fitted" not in mdi(*options, "--ep", 8).out
    scheduler = json.loads(mdi(*options, "--gpu-memory-utilization", 0.6, "--json").out)
    assert scheduler["config"]["ranks"] == 8
    more = json.loads(mdi(*options, "--ranks", 8, "--set", "gpu_memory_utilization=0.8",
                          "--json").out)["config"]["scheduler"]["num_blocks"]  # fmt: skip
    assert more > scheduler["config"]["scheduler"]["num_blocks"]


def test_hardware_from_a_file(mdi, fails, small):
    peaks = {**asdict(H200), "name": "mine", "hbm_bytes": 600_000_000_000}
    Path("mine.json").write_text(json.dumps(peaks))
    done = mdi("simulate", "--workload", "azure-conv", "-n", 3, "--hardware", "mine.json",
               "--out", "r")  # fmt: skip
    assert "assumed: 1 rank, the fewest mine that hold v41-flash" in done.out
    assert "roofline of mine (ep 1)" in done.out
    assert load_run("r").metadata.config["cost"]["peaks"] == peaks
    Path("mine.json").write_text(json.dumps({**peaks, "hbm_bytes_per_s": 0}))
    assert "mine.json: hbm_bytes_per_s = 0: must be a finite number above 0" in fails(
        2, "simulate", *small, "--hardware", "mine.json"
    )
    Path("mine.json").write_text(json.dumps({**peaks, "tdp": 700}))
    assert "mine.json.tdp = 700: unknown" in fails(2, "simulate", *small, "--hardware", "mine.json")


def test_a_fitted_model_of_the_package_goes_by_its_name(mdi):
    done = mdi("simulate", "--workload", "azure-conv", "-n", 3, "--cost", "h200-flash-slice")
    assert done.code == 0, done.err
    assert "fitted linear model, held-out error: prefill" in done.out
    assert done.out.startswith("assumed: 1 rank, the fewest h200 that hold flash-slice")


def test_the_description_stands_in_the_trace(mdi, small):
    mdi("simulate", *small, "--out", "r", "--placement", "least_kv", "--until", 50)
    found = load_run("r").metadata
    run = RunDescription.from_metadata(found.config, found.seed)
    assert run.served == Served(workload="azure-conv", requests=20)
    assert (run.placement, run.until_s, run.seed) == ("least_kv", 50.0, 3)
    again = describe_run(served=run.served, shape="tiny", placement="least_kv", until_s=50.0,
                         seed=3)  # fmt: skip
    assert again.to_json() == run.to_json()


def test_an_argument_overrides_the_workload_of_a_file(mdi):
    mdi("generate-workload", "azure-conv", "w.parquet", "-n", 4)
    Path("c.toml").write_text(CONFIG)
    for source, total in (("w.parquet", 4), (("--workload", "azure-code", "-n", 3), 3)):
        given = (source,) if isinstance(source, str) else source
        done = mdi("simulate", *given, "--config", "c.toml", "--json")
        assert json.loads(done.out)["summary"]["requests"]["total"] == total


def test_a_saved_run_or_its_description_is_where_to_start(mdi, fails, small):
    """The same run again, byte by byte; then with one option changed."""
    mdi("simulate", *small, "--out", "r", "--placement", "least_kv", "--ranks", 2)
    found = load_run("r").metadata
    Path("r.toml").write_text(RunDescription.from_metadata(found.config, found.seed).to_toml())
    for name, config in (("s", "r"), ("t", "r.toml")):
        done = mdi("simulate", "--config", config, "--out", name)
        assert done.code == 0, done.err
        assert Path(f"{name}.steps.parquet").read_bytes() == Path("r.steps.parquet").read_bytes()
    changed = json.loads(mdi("simulate", "--config", "r", "--set", "max_num_seqs=2", "-n", 7,
                             "--json").out)  # fmt: skip
    assert changed["summary"]["requests"]["total"] == 7
    before, after = found.config["scheduler"], changed["config"]["scheduler"]
    assert {n for n in before if before[n] != after[n]} == {"max_num_seqs"}
    Path("r.toml").write_text(Path("r.toml").read_text().replace("placement =", "place ="))
    assert "r.toml: run.place = 'least_kv': unknown" in fails(2, "simulate", "--config", "r.toml")


def test_a_run_is_served_again_by_its_prefix(mdi, run_r):
    done = mdi("simulate", "r", "--model", "tiny", "--max-prompt", 30, "--out", "new/deep/s")
    assert done.code == 0, done.err
    assert load_run("new/deep/s").requests["prompt_len"].max() == 30
    assert len(load_run("new/deep/s").requests) == 20


def test_equal_seeds_give_equal_files(mdi, small):
    for name in ("a", "b"):
        assert mdi("simulate", *small, "--out", name, "--perfetto", f"{name}.json").code == 0
    assert mdi("simulate", *small, "--seed", "4", "--out", "c").code == 0
    for ending in ("steps.parquet", "items.parquet", "requests.parquet", "json"):
        assert Path(f"a.{ending}").read_bytes() == Path(f"b.{ending}").read_bytes()
    assert Path("a.steps.parquet").read_bytes() != Path("c.steps.parquet").read_bytes()


def test_fast_forward_changes_nothing(mdi, small):
    mdi("simulate", *small, "--out", "a")
    mdi("simulate", *small, "--out", "b", "--no-fast-forward")
    assert Path("a.steps.parquet").read_bytes() == Path("b.steps.parquet").read_bytes()


def test_a_file_configures_and_the_command_line_overrides(mdi):
    Path("c.toml").write_text(CONFIG)
    done = mdi("simulate", "--config", "c.toml", "--set", "max_num_seqs=8", "-n", 15, "--json")
    document = json.loads(done.out)
    scheduler = document["config"]["scheduler"]
    assert (scheduler["max_num_seqs"], scheduler["max_num_batched_tokens"]) == (8, 512)
    assert scheduler["prefill_target_ms"] is None
    assert type(scheduler["state_slot_ratio"]) is float
    assert document["config"]["ranks"] == 2
    assert document["summary"]["requests"]["total"] == 15


def test_set_parses_by_the_declared_type(mdi, small):
    values = ("max_num_batched_tokens=none", "chunked_prefill=false", "state_slot_ratio=1.5",
              "chunk_policy=token_budget", "max_model_len=32_768")  # fmt: skip
    pairs = [part for value in values for part in ("--set", value)]
    scheduler = json.loads(mdi("simulate", *small, *pairs, "--json").out)["config"]["scheduler"]
    assert scheduler["max_num_batched_tokens"] is None
    assert scheduler["chunked_prefill"] is False
    assert (scheduler["state_slot_ratio"], scheduler["max_model_len"]) == (1.5, 32_768)


def test_memory_sizes_the_pool(mdi, small):
    done = mdi("simulate", *small, "--kv-cache-memory-gb", 0.1, "--set", "max_model_len=8192",
               "--set", "block_size=64", "--json")  # fmt: skip
    scheduler = json.loads(done.out)["config"]["scheduler"]
    assert scheduler["num_blocks"] == 100_000_000 // TINY.kv_bytes_per_block(64)


def test_a_trace_can_be_cut_sped_up_and_opened(mdi):
    mdi("generate-workload", "chat-sessions", "chat.jsonl", "-n", 40, "--seed", 1)
    options = ("simulate", "chat.jsonl", "--model", "tiny", "--limit", 30)
    closed = mdi(*options, "--out", "closed", "--speed", 4)
    opened = mdi(*options, "--out", "open", "--speed", 4, "--open-loop")
    assert (closed.code, opened.code) == (0, 0), closed.err + opened.err
    recorded = load_run("open").requests["arrival_ns"]
    assert len(recorded) == 30
    assert (load_run("closed").requests["arrival_ns"] != recorded).any()
    assert "times divided by 4" in load_run("open").metadata.notes


def test_lengths_without_times_take_arrivals(mdi):
    Path("l.csv").write_text("num_prefill_tokens,num_decode_tokens,num_total_tokens\n9,2,11\n")
    done = mdi("simulate", "l.csv", "--model", "tiny", "--arrivals", "poisson:5")
    assert "1 request: 1 completed" in done.out


def test_times_of_a_trace_are_replaced_when_asked_and_told(mdi):
    mdi("generate-workload", "azure-conv", "w.parquet", "-n", 30, "--rate", 2)
    for option, note in (("--rate", "recorded arrival times scaled to 20 requests per second"),
                         ("--arrivals", "recorded arrival times replaced by")):  # fmt: skip
        value = 20 if option == "--rate" else "poisson:20"
        done = mdi("simulate", "w.parquet", "--model", "tiny", option, value, "--out", "r")
        assert done.code == 0, done.err
        assert f"note: {note}" in done.out
        assert load_run("r").requests["arrival_ns"].max() < 5e9


def test_a_fitted_model_names_its_error(mdi, small):
    cost = fitted(fit={"prefill": {"held_out_mape": 0.043}, "decode": {"held_out_mape": 0.02}})
    Path("cost.json").write_text(json.dumps(cost))
    done = mdi("simulate", *small, "--cost", "cost.json", "--out", "r")
    assert "fitted linear model, held-out error: prefill 4.3%, decode 2.0%" in done.out
    assert "held-out error: prefill 4.3%" in mdi("show", "r").out
    Path("cost.json").write_text(json.dumps(fitted(fit={})))
    assert "held-out error not stated" in mdi("simulate", *small, "--cost", "cost.json").out


def fitted(fit) -> dict:
    prefill = ("const", "rows", "consumer_rows", "idx_pairs_r2", "idx_pairs_r1", "core_pairs",
               "swa_pairs", "cached_rows", "n_seqs")  # fmt: skip
    host = ("schedule_ns", "schedule_ns_per_seq", "launch_ns", "process_ns", "process_ns_per_seq")
    decode = dict.fromkeys(("const", "rows", "sum_k", "n_seqs"), 1000.0)
    return {
        "schema_version": 1,
        "units": "ns",
        "prefill": {"terms": dict.fromkeys(prefill, 100.0), "ranges": {}},
        "decode": {"terms": decode, "graphs": [], "ranges": {}},
        "host": dict.fromkeys(host, 1000),
        "fit": fit,
    }


def test_pictures_and_exports_are_written(mdi, small):
    done = mdi("simulate", *small, "--plots", "p/q", "--perfetto", "r.json.gz")
    assert done.code == 0
    assert done.err == "drew p/q\nwrote r.json.gz\n"
    assert len(list(Path("p/q").glob("*.png"))) == 4
    assert Path("r.json.gz").stat().st_size > 0


def test_a_new_run_replaces_an_old_one_and_says_so(mdi, small):
    assert mdi("simulate", *small, "--out", "r").err == "saved run r (3 files)\n"
    assert mdi("simulate", *small, "-n", 5, "--out", "r").err == "replaced run r (3 files)\n"
    assert len(load_run("r").requests) == 5
    assert sorted(p.name for p in Path().iterdir()) == [
        "r.items.parquet", "r.requests.parquet", "r.steps.parquet",
    ]  # fmt: skip


def test_every_scheduler_option_can_be_set(mdi, small):
    """The types of the declaration are those `--set` knows how to read."""
    for name, value in SchedulerConfig.__dataclass_fields__.items():
        if name in ("max_num_batched_tokens", "prefill_target_ms"):
            continue
        done = mdi("simulate", *small, "-n", 1, "--set", f"{name}={str(value.default).lower()}")
        assert done.code == 0, (name, done.err)


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version(mdi, flag):
    done = mdi(flag)
    assert done.code == 0
    assert "simulate" in done.out or done.out.startswith("mini-deepinfer ")
