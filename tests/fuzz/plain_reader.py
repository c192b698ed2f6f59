"""What a trace's text says, read a second time by the standard library alone.

Slow, and only the lengths and, where they are plain numbers, the times: enough to notice a reader
that gives wrong numbers for a damaged file instead of refusing it.
"""

import codecs
import csv
import io
import json
from collections import Counter
from decimal import Decimal

# Format -> (prompt, output, time in units of so many ns); several spellings of one.
FIELDS = {
    "mooncake": (("input_length", "output_length", "timestamp", 10**6),),
    "azure": (("ContextTokens", "GeneratedTokens", None, 0),),
    "burstgpt": (("Request tokens", "Response tokens", "Timestamp", 10**9),),
    "bailian": (("input_length", "output_length", "timestamp", 10**9),),
    "lengths": (("num_prefill_tokens", "num_decode_tokens", None, 0),
                ("input_tokens", "output_tokens", "arrival_time_s", 10**9)),
    "tracelab": (("input_tokens_total", "output_tokens", None, 0),),
    "own": (("prompt_len", "output_len", "arrival_ns", 1),),
}  # fmt: skip
LEAVES_OUT_EMPTY = ("burstgpt", "tracelab")
MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF32_LE, "utf-32"),
         (codecs.BOM_UTF32_BE, "utf-32"), (codecs.BOM_UTF16_LE, "utf-16"),
         (codecs.BOM_UTF16_BE, "utf-16"))  # fmt: skip


def rows_of(raw):
    """Return the file's records as dicts of texts and numbers."""
    encoding = next((name for mark, name in MARKS if raw.startswith(mark)), "utf-8")
    text = raw.decode(encoding).removeprefix("\ufeff").lstrip("\r\n \t\f\v")
    if text[0] in "{[":
        return [row for row in _json_values(text) if "mdi" not in row]
    first = text.splitlines()[0]
    delimiter = max(",\t;|", key=first.count)
    names, *lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    return [dict(zip([name.strip() for name in names], line, strict=True)) for line in lines]


def _json_values(text):
    decoder, at = json.JSONDecoder(parse_float=Decimal), 0
    while text[at:].strip("\r\n\t\f\v \x1e"):
        at += len(text[at:]) - len(text[at:].lstrip("\r\n\t\f\v \x1e,"))
        value, at = decoder.raw_decode(text, at)
        yield from value if isinstance(value, list) else [value]


def requests_of(raw, name):
    """Return how often each (time since the first in ns or None, prompt, output) is there."""
    rows = rows_of(raw)
    prompt, output, time, unit_ns = next(
        (each for each in FIELDS[name] if each[0] in rows[0]), FIELDS[name][0]
    )
    found = [
        (None if time is None else _number(row[time]) * unit_ns, int(_number(row[prompt])),
         int(_number(row[output])))
        for row in rows
    ]  # fmt: skip
    if name in LEAVES_OUT_EMPTY:
        found = [each for each in found if each[2] > 0]
    first = min((each[0] for each in found if each[0] is not None), default=0)
    return Counter(
        (None if at is None else round(at) - round(first), prompt, output)
        for at, prompt, output in found
    )


def _number(cell):
    return Decimal(str(cell).strip().removeprefix("'"))
