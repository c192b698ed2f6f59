"""Every metric in words: name, unit, formula, definition, source. One table, nothing computed.

The names are the keys of `Summary.to_dict()`; the table in docs/metrics.md is `metrics_markdown()`
and a test keeps the two equal.

Read next: `metrics.py` and `usage.py`, which compute them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """One definition; `formula` uses column names of the trace format."""

    name: str
    unit: str
    formula: str
    definition: str
    source: str


_ENGINE = "docs/rules.md, R35"
_OURS = "own definition"

METRICS: tuple[Metric, ...] = (
    Metric("ttft_ms", "ms", "t_first_token - arrival_ns",
           "Time to first token as the user sees it: from sending the request to the moment its "
           "first token is visible.", _ENGINE),
    Metric("ttft_engine_ms", "ms", "t_first_token - t_submit",
           "Time to first token as the engine counts it: from the scheduler's add, so time spent "
           "before the add is left out.", _ENGINE),
    Metric("tpot_ms", "ms/token", "(t_last_token - t_first_token) / (output_len - 1)",
           "Time per output token after the first; needs two output tokens, other requests have "
           "none. 1000 / tpot_ms is the speed one user sees, in tokens/s.", _ENGINE),
    Metric("tpot_with_first_ms", "ms/token", "(t_last_token - arrival_ns) / output_len",
           "Normalised latency: the whole wait, first token and queueing included, spread over "
           "the output tokens.", "Yu et al., Orca, OSDI 2022; Kwon et al., vLLM, SOSP 2023"),
    Metric("e2e_ms", "ms", "t_finish - arrival_ns",
           "End-to-end latency: from sending the request to its end.", _OURS),
    Metric("queue_ms", "ms", "t_first_sched - arrival_ns",
           "Wait before the first chunk is scheduled.", _OURS),
    Metric("itl_ms", "ms", "differences of t_done over the steps that emitted for the request",
           "Inter-token latency: gaps between consecutive moments at which a request shows new "
           "tokens. Tokens that share a moment (accepted drafts) make one moment and no gap of "
           "zero. All requests count, finished or not. Needs step items.", _ENGINE),
    Metric("input_tok_s_gpu", "tokens/s/GPU",
           "(sum of n_prompt_rows - sum of n_recomputed_tokens) / span / GPUs",
           "Uncached prompt tokens processed. Tokens recomputed after a preemption are work, not "
           "input, and are left out.", _ENGINE),
    Metric("output_tok_s_gpu", "tokens/s/GPU", "sum of output_len / span / GPUs",
           "Tokens emitted, by unfinished requests too.", _ENGINE),
    Metric("requests_s", "1/s", "completed / span", "Completed requests.", _OURS),
    Metric("goodput_s", "1/s", "requests within every bound of the SLO / span",
           "Requests that completed within the SLO. Rejected, aborted and unfinished ones miss "
           "it; a one-token output has no TPOT and meets any TPOT bound.",
           "Zhong et al., DistServe, OSDI 2024"),
    Metric("goodput_share", "1", "requests within every bound of the SLO / all requests",
           "Share of all requests that completed within the SLO.",
           "Zhong et al., DistServe, OSDI 2024"),
    Metric("kv_occupancy_mean", "1", "time-weighted mean of 1 - free_blocks / (num_blocks - 1)",
           "Share of KV blocks in use after scheduling, each value weighted by the time until "
           "the rank schedules again. Block 0 is reserved and not counted.", _OURS),
    Metric("kv_occupancy_max", "1", "maximum of 1 - free_blocks / (num_blocks - 1)",
           "Highest share of KV blocks in use after scheduling, on any rank.", _OURS),
    Metric("batch_size", "sequences", "n_seqs per step, by kind",
           "Sequences in a step; every step counts once.", _OURS),
    Metric("device_ms", "ms", "t_dev_end - t_dev_start per step, by kind",
           "Time a step occupies its device.", _OURS),
    Metric("device_share", "1", "device time of a kind / device time of all steps",
           "Where device time goes, idle (placeholder) steps included.", _OURS),
    Metric("preemptions", "count", "sum of n_preempted",
           "Sequences that lost their blocks to others.", _OURS),
    Metric("recomputed_tokens", "tokens", "sum of n_recomputed_tokens",
           "Tokens computed again because of preemptions.", _OURS),
    Metric("dropped_rows", "rows", "sum of n_dropped",
           "Rows computed and thrown away because the sequence had ended while its next step was "
           "in flight.", _OURS),
    Metric("barrier_wait_share", "1", "sum of wait_ms / (span * ranks)",
           "Share of time that ranks wait for each other; nothing when no step recorded it.",
           _OURS),
    Metric("vote_wait_share", "1", "time before t_first_sched in steps that only votes hold / "
           "sum of ttft_ms",
           "Share of the time to first token in which a rank with a free seat and memory decoded "
           "or idled on because no vote was due, or the other ranks voted it down.", _OURS),
    Metric("rank_imbalance", "1", "max over ranks / mean over ranks of device time",
           "How unevenly prefill and decode work lies on the ranks; 1 is even. Idle steps are "
           "not counted as work.", _OURS),
)  # fmt: skip


def metrics_markdown() -> str:
    """Return the table of all metrics as GitHub-flavoured Markdown, one line per metric."""
    lines = ["| name | unit | formula | definition | source |", "|---|---|---|---|---|"]
    lines += [
        f"| `{m.name}` | {m.unit} | {m.formula} | {m.definition} | {m.source} |" for m in METRICS
    ]
    return "\n".join(lines) + "\n"
