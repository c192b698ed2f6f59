"""TraceLab (uw-syfi/TraceLab): rounds of coding-agent sessions, always a closed loop.

One line is one model call. It is sent at the last user message or tool result before its first
output event, and ends with its last output event (reasoning, text or tool call). Tools start when
their call is emitted, run side by side, and `tool_wall_latency_ms` counts from that emission, any
waiting included; so the next round may start when the last of them is done, and

    think time = max over tools (emitted_at + tool_wall_latency_ms) - end of the round,

the longest tool as seen from the end of the round, never the sum. After a user message, or where
a latency is not known, think time is the recorded gap. `prefix_tokens` came from the provider's
cache: `cached_len`, at most one less than the prompt. Rounds without output are left out and
counted. The file is grouped by session; rows are put in order of time here.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pyarrow as pa

from mdi_shared.errors import TraceError
from mdi_traces.columns import Ints, numbers, texts
from mdi_traces.formats.base import (
    Format,
    Imported,
    Options,
    Turns,
    left_out,
    length_columns,
    session_columns,
)
from mdi_traces.formats.rows import NS_PER_MS, Rows
from mdi_traces.formats.values import exact, shown

_INPUTS = ("user_message", "tool_result")
_OUTPUTS = ("reasoning", "text", "tool_call")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LONGEST_MS = 10**12  # 31 years


@dataclass(frozen=True, slots=True)
class _Round:
    """Times of one round, ns since 1970; `tools_done_ns` is None where it is not known."""

    sent_ns: int
    ended_ns: int
    after_tools: bool  # what it was sent for is the results of the round before
    tools_done_ns: int | None


def _matches(names: Set[str]) -> bool:
    return names >= {"session_id", "round_index", "input_tokens_total", "timing_events"}


def _read(rows: Rows, options: Options) -> Imported:
    prompt, output = rows.tokens("input_tokens_total"), rows.tokens("output_tokens", minimum=0)
    prefix = rows.tokens("prefix_tokens", minimum=0)
    events, tools = rows.object_lists("timing_events"), rows.object_lists("tools")
    rounds = [_round(rows, row, events[row], tools[row]) for row in range(len(rows))]
    sent = np.array([each.sent_ns for each in rounds], dtype=np.int64)
    order = np.argsort(sent, kind="stable")
    order = order[output[order] > 0]
    if len(order) == 0:
        raise TraceError(rows.file, "no round has output tokens")
    columns = length_columns(sent[order], prompt[order], output[order])
    columns["cached_len"] = numbers(np.minimum(prefix, prompt - 1)[order], pa.int32())
    columns |= _sessions(rows, rounds, order)
    silent = len(rows) - len(order)
    return Imported(
        columns=columns,
        kept=order,
        licence="CC-BY-4.0 (TraceLab, University of Washington, 2026)",
        notes=left_out(silent, "silent round"),
    )


def _sessions(rows: Rows, rounds: list[_Round], order: Ints) -> dict[str, Any]:
    names, index = rows.texts("session_id"), rows.texts("round_index")
    turns = Turns()
    turn: list[int | None] = []
    think: list[int | None] = []
    tools_done: dict[str, int | None] = {}
    for row in order.tolist():
        name, this = names[row], rounds[row]
        done = tools_done.get(name) if this.after_tools else None
        ready_ns = this.sent_ns if done is None else done
        place, pause = turns.add(name, ready_ns, this.ended_ns)
        turn.append(place)
        think.append(pause)
        tools_done[name] = this.tools_done_ns
    req_ids = texts([f"{names[row]}/{index[row]}" for row in order.tolist()])
    return {"req_id": req_ids} | session_columns(
        [names[row] for row in order.tolist()], turn, think
    )


def _round(
    rows: Rows, row: int, found: list[dict[str, Any]], tools: list[dict[str, Any]]
) -> _Round:
    """Read the times of one round; raises `TraceError` when it has none."""
    events = list(_events(rows, row, found))
    if not events:
        rows.fail(row, "timing_events", "is empty: the round has no time")
    outputs = [ns for kind, ns in events if kind in _OUTPUTS]
    first_output = min(outputs, default=max(ns for _, ns in events))
    inputs = [(ns, kind) for kind, ns in events if kind in _INPUTS and ns <= first_output]
    sent_ns, cause = max(inputs, default=(min(ns for _, ns in events), ""))
    return _Round(
        sent_ns=sent_ns,
        ended_ns=max(outputs, default=sent_ns),
        after_tools=cause == "tool_result",
        tools_done_ns=_tools_done(rows, row, tools),
    )


def _events(rows: Rows, row: int, found: list[dict[str, Any]]) -> Iterator[tuple[str, int]]:
    for event in found:
        yield str(event.get("event_type")), _time_ns(rows, row, "timing_events", event, "timestamp")


def _tools_done(rows: Rows, row: int, tools: list[dict[str, Any]]) -> int | None:
    done: list[int] = []
    for tool in tools:
        wall_ms = exact(tool.get("tool_wall_latency_ms"))
        if wall_ms is None or not 0 <= wall_ms < _LONGEST_MS:
            return None
        done.append(_time_ns(rows, row, "tools", tool, "emitted_at") + round(wall_ms * NS_PER_MS))
    return max(done, default=None)


def _time_ns(rows: Rows, row: int, name: str, owner: dict[str, Any], key: str) -> int:
    text = owner.get(key)
    try:
        time = datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        time = None
    if time is None or time.tzinfo is None:
        rows.fail(row, name, f"{key} = {shown(text)} is not a time with a zone, like "
                  "2026-06-01T05:40:20.151Z")  # fmt: skip
    return (time - _EPOCH) // timedelta(microseconds=1) * 1000


TRACELAB = Format(
    name="tracelab",
    needs="session_id, round_index, input_tokens_total, prefix_tokens, output_tokens, "
    "timing_events, tools",
    matches=_matches,
    read=_read,
)
