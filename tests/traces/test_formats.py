"""Each public format, from small samples written by hand."""

import pytest

from mdi_shared.errors import ConfigError, TraceError
from mdi_traces.distributions import Burst, Poisson
from mdi_traces.formats import FORMATS, detect_format, load_requests

from .conftest import trace_of
from .samples import (
    AZURE,
    BAILIAN,
    BURSTGPT,
    BURSTGPT_SESSIONS,
    LENGTHS,
    MOONCAKE,
    OWN,
    TIMED_LENGTHS,
    tracelab,
)


def rows_of(trace, *names):
    return trace.table.select(list(names)).to_pylist()


def test_mooncake(write):
    trace = load_requests(write(MOONCAKE))
    assert rows_of(trace, "req_id", "arrival_ns", "prompt_len", "output_len", "max_tokens",
                   "cached_len", "hash_ids") == [
        {"req_id": "0", "arrival_ns": 0, "prompt_len": 600, "output_len": 5, "max_tokens": 5,
         "cached_len": 0, "hash_ids": [0, 1]},
        {"req_id": "1", "arrival_ns": 1_500_000_000, "prompt_len": 10, "output_len": 7,
         "max_tokens": 7, "cached_len": 0, "hash_ids": [2]},
    ]  # fmt: skip
    assert trace.metadata.hash_block_size == 512
    assert trace.metadata.licence.startswith("Apache-2.0")
    assert trace.metadata.config == {"format": "mooncake"}


@pytest.mark.parametrize("zone", ["", "+00:00", "Z", "+02:00"])
def test_azure_with_and_without_zones(zone, write):
    text = AZURE.replace("9600,", f"9600{zone},").replace("9601,", f"9601{zone},")
    trace = load_requests(write(text))
    assert trace.table["arrival_ns"].to_pylist() == [0, 52_000_100]
    assert trace.table["prompt_len"].to_pylist() == [4808, 3180]
    assert trace.table["output_len"].to_pylist() == [10, 8]


def test_azure_2024_leaves_out_zero_fractions(write):
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2024-05-10 00:00:00.009930+00:00,1,1\n2024-05-10 00:00:01+00:00,1,1\n"
    )
    trace = load_requests(write(text))
    assert trace.table["arrival_ns"].to_pylist() == [0, 990_070_000]


def test_burstgpt_counts_failed_calls(write):
    trace = load_requests(write(BURSTGPT))
    assert trace.table["arrival_ns"].to_pylist() == [0, 113_500_000_000]
    assert trace.table["req_id"].to_pylist() == ["0", "2"]
    assert trace.metadata.notes == ("1 failed call left out",)


def test_burstgpt_sessions_and_think_times(write):
    path = write(BURSTGPT_SESSIONS)
    trace = load_requests(path)
    assert trace.table["session_id"].to_pylist() == ["s1", "s2", "s1", "s2"]
    assert trace.table["turn"].to_pylist() == [0, 0, 1, 1]
    assert trace.table["think_ns"].null_count == 4
    closed = load_requests(path, closed_loop=True)
    # s1: sent at 5, done at 7.5, next at 10. s2: sent at 6, done at 15, next already at 11.
    assert closed.table["think_ns"].to_pylist() == [None, None, 2_500_000_000, 0]
    with pytest.raises(ConfigError, match="no column 'Session ID'"):
        load_requests(write(BURSTGPT), closed_loop=True)


def test_bailian_chains(write):
    trace = load_requests(write(BAILIAN), closed_loop=True)
    assert rows_of(trace, "req_id", "session_id", "turn", "arrival_ns", "think_ns") == [
        {"req_id": "7", "session_id": "7", "turn": 0, "arrival_ns": 0,
         "think_ns": None},
        {"req_id": "8", "session_id": "99", "turn": 0, "arrival_ns": 750_000_000,
         "think_ns": None},
        {"req_id": "9", "session_id": "7", "turn": 1, "arrival_ns": 60_614_000_000,
         "think_ns": 60_614_000_000},
        {"req_id": "10", "session_id": "7", "turn": 2, "arrival_ns": 69_500_000_000,
         "think_ns": 8_886_000_000},
        {"req_id": "11", "session_id": "99", "turn": 1, "arrival_ns": 79_500_000_000,
         "think_ns": 78_750_000_000},
    ]  # fmt: skip
    assert trace.metadata.hash_block_size == 16
    assert load_requests(write(BAILIAN)).table["think_ns"].null_count == 5


def test_a_child_may_stand_before_its_parent_of_the_same_time(write):
    lines = BAILIAN.replace("61.114", "0.5").splitlines()
    order = (2, 0, 1, 3, 4)  # chat 9 follows chat 7
    trace = load_requests(write("\n".join(lines[i] for i in order)), closed_loop=True)
    assert trace.table["req_id"].to_pylist() == ["7", "9", "8", "10", "11"]
    assert trace.table["turn"].to_pylist() == [0, 1, 0, 2, 1]
    assert trace.table["think_ns"].to_pylist()[:2] == [None, 0]


def test_turns_of_the_same_time_are_put_in_order_where_they_stand(write):
    rows = [("b", 3), ("a", 1), ("c", 0), ("a", 0)]
    text = "".join(
        f'{{"arrival_ns": 5, "prompt_len": 1, "output_len": 1, "req_id": "{s}{t}", '
        f'"session_id": "{s}", "turn": {t}}}\n' for s, t in rows
    )  # fmt: skip
    assert load_requests(write(text)).table["req_id"].to_pylist() == ["b3", "a0", "c0", "a1"]


def test_mooncake_turns_without_a_time_are_sent_by_their_delay(write):
    text = (
        '{"session_id": "a", "timestamp": 50, "input_length": 6, "output_length": 5}\n'
        '{"session_id": "a", "delay": 500, "input_length": 8, "output_length": 7}\n'
    )
    trace = load_requests(write(text), closed_loop=True)
    assert trace.table["arrival_ns"].to_pylist() == [0, 500_000_000]
    assert trace.table["think_ns"].to_pylist() == [None, 500_000_000]
    with pytest.raises(TraceError, match="row 2, column 'timestamp': missing"):
        load_requests(write(text))
    early = text.replace('"timestamp": 50', '"timestamp": 50, "delay": 9')
    assert load_requests(write(early), closed_loop=True).metadata.notes == (
        "1 first delay left out",
    )
    gaps = text.replace('"delay": 500', '"timestamp": 80')
    trace = load_requests(write(gaps), closed_loop=True)
    assert trace.table["think_ns"].to_pylist() == [None, 30_000_000], "the gap, an upper bound"


def test_lengths_with_and_without_times(write):
    trace = load_requests(write(TIMED_LENGTHS))
    assert trace.table["arrival_ns"].to_pylist() == [0, 1_250_000_000]
    path = write(LENGTHS)
    with pytest.raises(ConfigError, match=r"no column of arrival times .*give an arrival process"):
        load_requests(path)
    with pytest.raises(ConfigError, match="has times of its own"):
        load_requests(write(TIMED_LENGTHS, "timed"), arrivals=Burst())
    assert load_requests(path, arrivals=Burst()).table["arrival_ns"].to_pylist() == [0, 0]
    drawn = [load_requests(path, arrivals=Poisson(2.0), seed=s) for s in (1, 1, 2)]
    assert drawn[0].table.equals(drawn[1].table)
    assert not drawn[0].table.equals(drawn[2].table)
    assert drawn[2].metadata.seed == 2
    assert "Poisson(rate=2.0), seed 2" in drawn[2].metadata.notes[0]


def test_tracelab_thinks_as_long_as_its_longest_tool(write):
    trace = load_requests(write(tracelab()))
    assert rows_of(trace, "req_id", "session_id", "turn", "think_ns", "cached_len") == [
        {"req_id": "s/0", "session_id": "s", "turn": 0, "think_ns": None, "cached_len": 99},
        {"req_id": "s/1", "session_id": "s", "turn": 1, "think_ns": 4_000_000_000,
         "cached_len": 90},
        {"req_id": "s/2", "session_id": "s", "turn": 2, "think_ns": 8_000_000_000,
         "cached_len": 0},
        {"req_id": "t/5", "session_id": "t", "turn": 0, "think_ns": None, "cached_len": 0},
    ]  # fmt: skip
    assert trace.table["arrival_ns"].to_pylist() == [0, 8_100_000_000] + [19_000_000_000] * 2
    assert trace.metadata.notes == ("1 silent round left out",)


def test_own_formats_need_three_columns(write):
    path = write("arrival_ns,prompt_len,output_len,top_k\n0,5,2,\n9,6,3,40\n")
    trace = load_requests(path)
    assert rows_of(trace, "req_id", "max_tokens", "cached_len", "top_k") == [
        {"req_id": "0", "max_tokens": 2, "cached_len": 0, "top_k": None},
        {"req_id": "1", "max_tokens": 3, "cached_len": 0, "top_k": 40},
    ]
    jsonl = '{"arrival_ns": 0, "prompt_len": 5, "output_len": 2}\n'
    assert len(load_requests(write(jsonl))) == 1


def test_foreign_parquet_with_our_column_names(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "t.parquet"
    pq.write_table(
        pa.table({"arrival_ns": [0, 1], "prompt_len": [5, 6], "output_len": [1, 1]}), path
    )
    assert load_requests(path).table["prompt_len"].to_pylist() == [5, 6]
    pq.write_table(pa.table({"arrival_ns": [0], "prompt_length": [5], "output_len": [1]}), path)
    with pytest.raises(TraceError, match="column 'prompt_length': unknown column; known: req_id"):
        load_requests(path)


def test_a_run_can_be_read_as_an_input(tmp_path):
    trace = trace_of(
        arrival_ns=[0, 1], prompt_len=[5, 6], output_len=[4, 0], max_tokens=[9, 8],
        rank=[0, 1], t_finish=[10, 11], finish_reason=["stop", "prompt_length_exceeded"],
    )  # fmt: skip
    trace.save(tmp_path / "t.parquet")
    inputs = load_requests(tmp_path / "t.parquet")
    assert inputs.table["output_len"].to_pylist() == [4, 8]
    assert inputs.table["rank"].to_pylist() == [0, 1]
    assert inputs.table["t_finish"].null_count == inputs.table["finish_reason"].null_count == 2
    assert "requests without output get max_tokens" in inputs.metadata.notes[-1]


def test_detection_goes_by_content(write):
    samples = {"mooncake": MOONCAKE, "azure": AZURE, "burstgpt": BURSTGPT, "bailian": BAILIAN,
               "lengths": LENGTHS, "tracelab": tracelab(), "own": OWN}  # fmt: skip
    assert samples.keys() == FORMATS.keys()
    for name, text in samples.items():
        assert detect_format(write(text, "misleading.parquet")) == name
    assert detect_format(write("\n\n" + MOONCAKE)) == "mooncake"
    assert detect_format(write("\ufeff" + AZURE)) == "azure"


def test_an_unknown_format_lists_the_known_ones(write):
    for text in ("a,b\n1,2\n", '{"a": 1}\n', "hello\n"):
        with pytest.raises(TraceError, match="in no known format") as caught:
            load_requests(write(text))
        for name in (*FORMATS, "own", "TIMESTAMP, ContextTokens"):
            assert name in str(caught.value)
        assert "\n" not in str(caught.value)


def test_limit_and_sort(write):
    assert len(load_requests(write(MOONCAKE), limit=1)) == 1
    assert len(load_requests(write(AZURE), limit=1)) == 1
    assert len(load_requests(write(AZURE), limit=9)) == 2
    lines = BAILIAN.splitlines()
    shuffled = write("\n".join(lines[i] for i in (3, 0, 4, 2, 1)))
    with pytest.raises(TraceError, match=r"row 2, column 'arrival_ns': .* sort=True"):
        load_requests(shuffled)
    ordered = load_requests(shuffled, sort=True)
    assert ordered.table.equals(load_requests(write(BAILIAN, "ordered")).table)


def test_times_are_replaced_when_asked_for_and_a_note_says_so(write):
    path = write(AZURE)
    own = load_requests(path)
    assert not [note for note in own.metadata.notes if "arrival times" in note]
    at_once = load_requests(path, arrivals=Burst())
    assert set(at_once.table["arrival_ns"].to_pylist()) == {0}
    assert at_once.metadata.notes[-1] == "recorded arrival times replaced by Burst(), seed 0"
    faster = load_requests(path, rate=100.0)
    assert faster.table["arrival_ns"].to_pylist() == [0, 10_000_000]
    assert faster.metadata.notes[-1] == "recorded arrival times scaled to 100 requests per second"


def test_options_a_format_cannot_honour_are_refused(write):
    path = write(MOONCAKE)
    with pytest.raises(ConfigError, match=r"closed_loop = True: .* records no sessions"):
        load_requests(path, closed_loop=True)
    with pytest.raises(ConfigError, match=r"rate = 2.0: cannot be given together with arrivals"):
        load_requests(path, arrivals=Burst(), rate=2.0)
    with pytest.raises(ConfigError, match="format = 'csv': must be one of mooncake, azure"):
        load_requests(path, format="csv")
    with pytest.raises(ConfigError, match="limit = 0"):
        load_requests(path, limit=0)
    with pytest.raises(TraceError, match="column 'chat_id': the column is missing"):
        load_requests(path, format="bailian")
    with pytest.raises(TraceError, match="not found"):
        load_requests(path.with_name("other"))


@pytest.mark.parametrize(
    ("format", "column"),
    [("azure", "GeneratedTokens"), ("burstgpt", "Response tokens"), ("lengths", "num_prefill")],
)
def test_a_named_format_names_the_missing_column(format, column, tmp_path):
    path = tmp_path / "miss.csv"
    path.write_text("TIMESTAMP,ContextTokens,Timestamp\n2023-11-16 18:15:46.6805900,374,1\n")
    with pytest.raises(TraceError, match=f"column '{column}.*the column is missing"):
        load_requests(path, format=format)
