"""Bad trace files are one line naming file, row and field."""

import json
import random
from pathlib import Path

import pytest

from mdi_shared.errors import TraceError
from mdi_traces.formats import load_requests
from mdi_traces.schema import Metadata

from .conftest import refusal
from .samples import AZURE, BAILIAN, BURSTGPT, MOONCAKE, OWN, TIMED_LENGTHS, tracelab

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
    ('{"a":' * 100_000, "row 1: is nested too deeply"),
    (MOONCAKE + "[" * 100_000, "row 3: is nested too deeply"),
    (MOONCAKE.replace("1500", "9" * 401), "row 2, column 'timestamp': 9.* is too late to be a"),
    (MOONCAKE.replace("1500", "9" * 5000), "row 2: holds a number of too many digits"),
    (MOONCAKE.replace("1500", "1e999999999999999999999"), "row 2: holds a number of too many"),
    (MOONCAKE.replace("600", "9" * 401), "row 1, column 'input_length': 9.* is too large"),
    (MOONCAKE.replace("[2]", "[1e99]"), "row 2, column 'hash_ids': is not a list of whole numbers"),
    (MOONCAKE.replace("[2]", "7"), "row 2, column 'hash_ids': 7 is not a list of whole numbers"),
    (MOONCAKE.replace('"output_length": 7', '"output_length": 7, "output_length": 8'),
     "row 2: the key 'output_length' comes twice in one object"),
    ("[" + MOONCAKE.splitlines()[0], "row 1: is a JSON array without an end"),
    ("[" + MOONCAKE.splitlines()[0] + "] x", "row 1: goes on after its JSON array"),
    ("[1, 2]", "row 1: is not a JSON object"),
    ("[]", "holds no requests"),
    (OWN.replace("top_k", "prompt_len"), "column 'prompt_len': 2 columns have this name"),
    (OWN.replace("top_k", "y" * 200_000), "column 'y+': unknown column; known: req_id"),
    (OWN.replace("2,\n", "2," + "1" * 200_000 + "\n"), "row 2, column 'top_k': '1+.* is too large"),
    (OWN.replace("top_k", "temperature").replace(",40", "," + "9" * 401), "row 3.* is too large"),
    ('{"arrival_ns": 0, "prompt_len": 5, "output_len": 1, "session_id": "\\ud800"}',
     r"row 1, column 'session_id': '\\ud800' holds half a character"),
    ('{"\\ud800\\n": 0}', r"in no known format; its fields are \\ud800\\n\."),
    ('{"mdi": 5}\n{"arrival_ns": 0}', "missing; a request needs|has no schema_version"),
    (BAILIAN.replace('"parent_chat_id": 7', '"parent_chat_id": 10'),
     "row 3, column 'parent_chat_id': chat 9 comes after itself"),
    ("\n\n", "is empty"),
    ("{not json\n", "row 1: is not valid JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BAD)
def test_bad_files_are_one_line_naming_file_row_and_field(text, message, write):
    with pytest.raises(TraceError, match=message) as caught:
        load_requests(write(text))
    assert "trace.txt" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("notes", None, "notes = None; must be of type list"),
        ("notes", [5], "has notes that are not text"),
        ("notes", ["\ud800"], "holds half a character"),
        ("config", 5, "config = 5; must be of type dict"),
        ("seed", "x", "seed = 'x'; must be of type int or null"),
        ("hash_block_size", 0, "hash_block_size = 0; must be at least 1"),
        ("table", [], r"table = \[\]; allowed: steps, items, requests"),
        ("table", "steps", "holds a steps table, but requests are wanted"),
        ("schema_version", True, "has no schema_version"),
    ],
)
def test_bad_metadata_is_named(key, value, message, write):
    metadata = json.loads(Metadata(table="requests", source="import").to_json())
    header = json.dumps({"mdi": metadata | {key: value}})
    path = write(header + '\n{"arrival_ns": 0, "prompt_len": 5, "output_len": 1}')
    with pytest.raises(TraceError, match=message) as caught:
        load_requests(path)
    assert "\n" not in str(caught.value)


PIECES = [b'"', b"'", b",", b"\n", b"\0", b"{", b"[", b"]", b"}", b":", b"-", b"e9", b"9" * 401,
          b"NaN", b"null", b"true", b"\xff", b"\xed\xa0\x80", b"\\ud800", b"\t", b";", b"1e999",
          b"1.5", b"\xef\xbb\xbf", b"\x1f\x8b", b"\xff\xfe"]  # fmt: skip


def test_mutated_files_are_read_or_refused_in_one_line(tmp_path):
    """Bits flipped, pieces cut out, doubled and put in: 600 files, always the same."""
    draw = random.Random(0)
    samples = [text.encode() for text in
               (MOONCAKE, AZURE, BURSTGPT, BAILIAN, OWN, TIMED_LENGTHS, tracelab())]  # fmt: skip
    samples += [path.read_bytes() for path in sorted((Path(__file__).parent / "cases").iterdir())]
    path = tmp_path / "t"
    for _ in range(600):
        raw = bytearray(draw.choice(samples))
        for _ in range(draw.choice([1, 1, 2, 8])):
            at = draw.randrange(len(raw))
            end = at + draw.choice([0, 1, 5, 40])
            change = draw.choice([draw.choice(PIECES), raw[at:end] * 2, b"", draw.randbytes(1)])
            raw[at:end] = change or raw[at : at + 1]
        path.write_bytes(bytes(raw))
        message = refusal(lambda: load_requests(path)) or ""
        assert "\n" not in message
        assert len(message.encode()) < 2000


def test_files_that_are_not_text(tmp_path):
    (tmp_path / "t").write_bytes(b"\x1f\x8b\x08\xff\xfe binary")
    with pytest.raises(TraceError, match="cannot be read: "):
        load_requests(tmp_path / "t")
    (tmp_path / "t").write_bytes(MOONCAKE.encode() + b'{"timestamp": "\xff"}\n')
    with pytest.raises(TraceError, match="not UTF-8"):
        load_requests(tmp_path / "t")
