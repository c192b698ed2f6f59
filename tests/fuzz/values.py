"""What careless and hostile people type where the command line takes a value, option by option."""

from mdi_exec.engine.options import EngineOptions
from mdi_shared.config import SchedulerConfig

HOSTILE_NUMBERS = ("-1", "0", "-0", "1.5", "nan", "inf", "-inf", "1e999", "1e-999", "1e30",
                   "9" * 30, "9" * 5_000, "9223372036854775807", "9223372036854775808",
                   "2147483648", "", " ", "x", "1_0", "٣", "0x10", "1,5", "--", "true", "none",
                   "1e5", "-1e5", "\ud800")  # fmt: skip
HOSTILE_TEXTS = ("", " ", "x" * 5_000, "\ud800", "\n", "a\nb", "\x1b[31mred", "'\"", "../..", "-",
                 "--help", "-x", "%s%n", "{}", "[bold]", "=", "😀", "none", "null", "0",
                 "\t", "*")  # fmt: skip

# Option -> values that are all right, for a small and quick run.
GOOD = {
    "workload": ("azure-conv", "azure-code", "sharegpt", "chat-sessions", "mooncake-synthetic"),
    "preset": ("azure-conv", "sharegpt", "tiny"),
    "requests": ("1", "2", "9"), "limit": ("1", "3"), "rate": ("0.5", "20", "1e6"),
    "arrivals": ("poisson:5", "gamma:5:2", "burst", "uniform:3"), "speed": ("1", "100"),
    "max_prompt": ("1", "60"), "max_output": ("1", "8"), "ranks": ("1", "2"), "seed": ("0", "7"),
    "placement": ("round_robin", "least_kv", "jsq", "power_of_two:seed=3", "balance:horizon=8"),
    "ep": ("1", "2"),
    "kv_cache_memory_gb": ("0.5", "2"), "gpu_memory_utilization": ("0.9",),
    "hardware": ("h100", "h200", "b200", "b300"), "from_hardware": ("h200",),
    "draft_accept_rate": ("0", "0.5", "1"), "until_s": ("1", "0.001"),
    "slo": ("ttft=2000,tpot=50", "e2e=1"), "goal": ("throughput",), "trials": ("1", "2"),
    "jobs": ("1",), "head": ("1", "5"), "names": ("a", "b"), "ids": ("1,2,3", "100"),
    "prompts": ("Hello", "x"), "max_tokens": ("1", "2"), "temperature": ("0", "1"),
    "top_p": ("0.5", "1"), "top_k": ("-1", "3"), "stop": ("e", "END"), "n": ("1", "2"),
    "device": ("cpu",), "architecture": ("sm_90a",), "processes": ("1",), "layers": ("1",),
    "experts": ("8",), "format": ("own", "own", "own", "azure"),
    "to_model": ("tiny", "v41-flash"),
    "policies": ("fcfs", "srpt:sigma=0.5", "vtc", "order=sjf+victim=newest"),
    "loads": ("5", "speed=2", "arrivals=poisson:9", "as recorded"),
    "settings": ("default:", "a:max_num_seqs=2", "b:ranks=2,max_num_batched_tokens=512"),
    "placements": ("round_robin", "jsq"), "seeds": ("1", "2"), "rank_by": ("ttft_ms_p99", "jain"),
    "cluster": ("mpi://localhost:1",), "load": ("rate={rate}", "speed={rate}"),
    "start": ("1", "20"), "tolerance": ("0.5", "1"),
}  # fmt: skip
PAIRS = {
    "max_num_seqs": "4", "max_model_len": "640", "max_num_batched_tokens": "64", "num_blocks": "64",
    "prefill_attempt_interval": "2", "chunked_prefill": "false", "num_draft_tokens": "1",
    "context_parallel_size": "2", "chunk_policy": "cost_target", "prefill_target_ms": "5",
    "slo_itl_ms": "20", "strict_upstream": "true", "enable_zos": "false", "lookahead": "3",
    "numerics": "float32", "replay_keep_tokens": "4", "expanded_weights_memory_gb": "0.1",
    "exchange": "all_to_all", "group_timeout_s": "20", "seed": "3",
}  # fmt: skip
# Inputs as the suite lays them out beside the current folder, which is new for each case.
TRACES = ("../in/t.csv", "../in/t.jsonl", "../in/t.parquet", "../in/run", "../in")
RUNS = ("../in/run", "../in/other", "../in/run.steps.parquet", "old")
MODELS, FITTED = ("../in/tiny", "../in/tiny", "random:tiny"), ("../in/m.json", "h200-tiny")
INPUTS = {
    "trace": TRACES, "path": (*TRACES, *RUNS), "paths": (*TRACES, *RUNS), "traces": RUNS, "a": RUNS,
    "b": RUNS, "run": RUNS, "only": RUNS, "check": RUNS, "model": (*MODELS, *FITTED, "tiny"),
    "cost": FITTED, "base": FITTED, "config": ("../in/c.toml", "../in/run"),
}  # fmt: skip
ODD_PATHS = ("missing", "fifo", "folder", "loop", "dangling", "file/below", "empty", "/dev/null",
             "/dev/full", "/dev/zero", "/dev/urandom", "/proc/self/mem", "/proc/nothing", "/sys/x",
             ".", "..", "/", "", "x" * 300, "x/" * 3_000, "\udcff", "a\0b", "-", "bad.json",
             "bad.parquet", "bad.toml", "~", "file", "old", "old.steps.parquet", "../in/tiny",
             "../in/m.json", "../in/c.toml", "../in/t.csv", "../in/run")  # fmt: skip
OUTPUTS = ("out", "o.json", "o.csv", "o.jsonl", "o.parquet", "o.html", "new/deep/o", "o.json.gz",
           "old", "old.steps.parquet")  # fmt: skip
WRITTEN = {"out": OUTPUTS, "target": ("o.csv", "o.jsonl", "o.parquet"), "plots": ("out", "new/p"),
           "perfetto": ("o.json", "new/o.json.gz"), "html": ("o.html",),
           "directory": ("new", "folder")}  # fmt: skip
KNOWN = [name for kind in (SchedulerConfig, EngineOptions) for name in kind.__dataclass_fields__]


def value(name, rng, share):
    """Return what somebody types for the option or argument `name`; a `share` is hostile."""
    if name in ("set", "set_options"):
        return _pair(rng, share)
    is_path = name in WRITTEN or name in INPUTS
    if rng.random() < share:
        return rng.choice(ODD_PATHS if is_path and rng.random() < 0.7 else
                          HOSTILE_NUMBERS + HOSTILE_TEXTS)  # fmt: skip
    return rng.choice(WRITTEN.get(name) or INPUTS.get(name) or GOOD[name])


def _pair(rng, share):
    if rng.random() >= share:
        name = rng.choice(list(PAIRS))
        return f"{name}={PAIRS[name]}"
    name, equals = rng.choice((*KNOWN, *KNOWN, "nope", "")), rng.choice(("=", "=", "=", "", "=="))
    return f"{name}{equals}{rng.choice(HOSTILE_NUMBERS + HOSTILE_TEXTS)}"
