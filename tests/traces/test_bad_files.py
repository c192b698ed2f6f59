"""Bad trace files are one line naming file, row and field."""

import pytest

from mdi_shared.errors import TraceError
from mdi_traces.formats import load_requests

from .samples import AZURE, BAILIAN, BURSTGPT, MOONCAKE, TIMED_LENGTHS, tracelab

BAD = [
    (MOONCAKE[:-20], "row 2: is not valid JSON, perhaps cut off"),
    (MOONCAKE.replace("600", "0"), "row 1, column 'input_length': 0 must be at least 1 token"),
    (MOONCAKE.replace("600", "-5"), "row 1, column 'input_length': -5 must be"),
    (MOONCAKE.replace("600", "6.5"), "row 1, column 'input_length': 6.5 is not a whole number"),
    (MOONCAKE.replace("600", "true"), "row 1, column 'input_length': True is not a whole"),
    (MOONCAKE.replace("600", "3000000000"), "'input_length': 3000000000 is too large"),
    (MOONCAKE.replace("1500", "NaN"), "row 2, column 'timestamp': missing"),
    (MOONCAKE.replace("1500", "-1"), "row 2, column 'timestamp': -1 must not be negative"),
    (MOONCAKE.replace("1500", '"x"'), "row 2, column 'timestamp': 'x' is not a time"),
    (MOONCAKE.replace("[2]", "[2.5]"), "row 2, column 'hash_ids': is not a list of whole"),
    (MOONCAKE.replace(', "output_length": 7', ""), "row 2, column 'output_length': missing"),
    (MOONCAKE + "\n[1]\n", "row 4: is not a JSON object"),
    (AZURE[:-2], "row 3: has 2 fields, the header has 3: perhaps cut off"),
    (AZURE.replace("3180", ""), "row 3, column 'ContextTokens': is empty"),
    (AZURE.replace("3180", "nan"), "row 3, column 'ContextTokens': 'nan' is not a whole number"),
    (AZURE.replace("3180", "0"), "row 3, column 'ContextTokens': 0 must be at least 1 token"),
    (AZURE.replace("\r\n2023-11-16 18:17:04", "\r\n2023-13-16 18:17:04"),
     "row 3, column 'TIMESTAMP': '2023-13-16 .*' is not a time"),
    (AZURE.replace("9601", "9601Z"), "row 3, column 'TIMESTAMP': .* has a zone, but the first"),
    (AZURE.replace("18:17:04", "18:17:02"), "row 3, column 'arrival_ns': 0 is earlier"),
    (AZURE.replace("\r\n2023", "\r\n\r\n2023", 1), "row 2, column 'ContextTokens': is empty"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "holds no requests"),
    (BURSTGPT.replace("118.5", "-1"), "row 4, column 'Timestamp': '-1' must not be negative"),
    (BURSTGPT.replace("118.5", "nan"), "row 4, column 'Timestamp': 'nan' is not a time"),
    (BURSTGPT.replace("417", "0"), "row 4, column 'Request tokens': 0 must be at least 1"),
    (BURSTGPT.replace("472,18", "472,0").replace("417,276", "417,0"), "every row is a failed"),
    (BAILIAN.replace('"chat_id": 9,', '"chat_id": 7,'), "row 3, column 'chat_id': '7' is also"),
    (TIMED_LENGTHS.replace("1.5", "inf"), "row 3, column 'arrival_time_s': 'inf' is not a time"),
    (tracelab().replace("2026-06-01T05:40:20.000Z", "soon"), "row 3, column 'timing_events': "),
    ("arrival_ns,prompt_len,output_len\n0,5,x\n", "column 'output_len': 'x' is not a whole"),
    ("arrival_ns,prompt_len,output_len\n0,5,\n", "row 2, column 'output_len': is empty"),
    ("arrival_ns,prompt_len,output_len\n0,5\n", "row 2: has 2 fields, the header has 3"),
    ("arrival_ns,prompt_len\n0,5\n", "column 'output_len': missing; a request needs"),
    ("arrival_ns,prompt_len,output_len,colour\n0,5,1,2\n", "column 'colour': unknown column"),
    ('{"arrival_ns": 0, "prompt_len": 5, "output_len": 1.5}', "row 1, column 'output_len': 1.5 is"),
    ('{"arrival_ns": 0, "prompt_len": 5, "output_len": 1, "a": 1}', "column 'a': unknown"),
    ("", "is empty"),
    ("\n\n", "is empty"),
    ("{not json\n", "row 1: is not valid JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BAD)
def test_bad_files_are_one_line_naming_file_row_and_field(text, message, write):
    with pytest.raises(TraceError, match=message) as caught:
        load_requests(write(text))
    assert "trace.txt" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_not_text(tmp_path):
    (tmp_path / "t").write_bytes(b"\x1f\x8b\x08\xff\xfe binary")
    with pytest.raises(TraceError, match="cannot be read: "):
        load_requests(tmp_path / "t")
    (tmp_path / "t").write_bytes(MOONCAKE.encode() + b'{"timestamp": "\xff"}\n')
    with pytest.raises(TraceError, match="not UTF-8"):
        load_requests(tmp_path / "t")
