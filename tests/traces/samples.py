"""Small samples of each public format, written by hand."""

import json

MOONCAKE = (
    '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 1500, "input_length": 10, "output_length": 7, "hash_ids": [2]}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:17:03.9799600,4808,10\r\n"
    "2023-11-16 18:17:04.0319601,3180,8"
)
BURSTGPT = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,472,18,490,Conversation log\n"
    "45,GPT-4,0,0,0,Conversation log\n"
    "118.5,GPT-4,417,276,693,API log\n"
)
BURSTGPT_SESSIONS = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,s1,2.5,ChatGPT,10,1,11,Conversation log\n"
    "6,s2,9,ChatGPT,20,2,22,Conversation log\n"
    "10,s1,1,ChatGPT,30,3,33,Conversation log\n"
    "11,s2,1,ChatGPT,40,4,44,Conversation log\n"
)
BAILIAN = "".join(
    f'{{"chat_id": {chat}, "parent_chat_id": {parent}, "timestamp": {t}, "input_length": 20, '
    f'"output_length": 3, "type": "text", "turn": {turn}, "hash_ids": [{chat}, 9]}}\n'
    for chat, parent, t, turn in (
        (7, -1, 0.5, 1),
        (8, 99, 1.25, 4),
        (9, 7, 61.114, 2),
        (10, 9, 70, 3),
        (11, 99, 80, 5),
    )
)
LENGTHS = "num_prefill_tokens,num_decode_tokens,num_total_tokens\n100,5,105\n200,6,206\n"
OWN = "arrival_ns,prompt_len,output_len,top_k\n0,5,2,\n9,6,3,40\n"
TIMED_LENGTHS = "arrival_time_s,input_tokens,output_tokens\n0.25,100,5\n1.5,200,6\n"


def event(kind, second, **more):
    return {"event_type": kind, "timestamp": f"2026-06-01T05:40:{second:06.3f}Z", **more}


def tool(emitted, wall_ms):
    return {"emitted_at": f"2026-06-01T05:40:{emitted:06.3f}Z", "tool_wall_latency_ms": wall_ms}


ROUNDS = [
    # Two tools side by side: the first ends 0.2 s, the second 4 s after the round's last event.
    dict(round_index=0, input_tokens_total=100, prefix_tokens=100, output_tokens=5,
         timing_events=[event("user_message", 1), event("text", 3), event("tool_call", 4),
                        event("tool_call", 5)],
         tools=[tool(4, 1200), tool(5, 4000)]),
    # Its request is sent a little after the last tool was done, which is not thinking.
    dict(round_index=1, input_tokens_total=120, prefix_tokens=90, output_tokens=6,
         timing_events=[event("tool_result", 5.2), event("tool_result", 9.1), event("text", 12)],
         tools=[]),
    # A person thinks from second 12 to 20.
    dict(round_index=2, input_tokens_total=130, prefix_tokens=0, output_tokens=7,
         timing_events=[event("user_message", 20), event("reasoning", 21)], tools=[]),
    dict(round_index=3, input_tokens_total=130, prefix_tokens=0, output_tokens=0,
         timing_events=[event("user_message", 30)], tools=[]),
]  # fmt: skip


def tracelab() -> str:
    other = {**ROUNDS[2], "session_id": "t", "round_index": 5}
    rows = [{"session_id": "s", **r} for r in ROUNDS] + [other]
    return "".join(json.dumps(row) + "\n" for row in rows)
