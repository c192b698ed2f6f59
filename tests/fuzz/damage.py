"""Bytes as careless hands, bad disks and other programs leave them.

`damaged` changes a file's bytes in one place or several, a text also as a text: fields swapped,
numbers out of range, lines out of order, in another encoding, packed.
"""

import gzip
import io
import re
import zipfile

import pyarrow as pa

PIECES = (b'"', b"'", b",", b"\n", b"\r", b"\0", b"{", b"[", b"]", b"}", b":", b"-", b"e9", b"\t",
          b";", b"|", b"NaN", b"null", b"true", b"[]", b"{}", b"\xff", b"\xed\xa0\x80", b"\\ud800",
          b"\\u0000", b"\xef\xbb\xbf", b"\x1f\x8b", b"\xff\xfe", b"PK\x03\x04", b"PAR1", b"=1+1",
          "\u2028".encode(), "\u0663".encode(), b" ", b"\x1e")  # fmt: skip
NUMBERS = ("-1", "-0", "0", "00", "1.5", "1e3", "1e999", "1e-999", "NaN", "Infinity", "2147483647",
           "2147483648", "9007199254740993", "9223372036854775807", "9223372036854775808",
           "18446744073709551616", "9" * 401, "9" * 5_000, "0.1", "1_000", "+5", " 7 ", "0x10",
           "1,5", "1e400", "123456789012345678.5", "true", '""', "null")  # fmt: skip
ENCODINGS = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8-sig", "latin-1", "cp500", "utf-7")
LINE_ENDS = (b"\r\n", b"\r", b"\n\n", b"\x0b", b"\xc2\x85", b" \n", b"\t\n")
_NUMBER, _FIELD = re.compile(rb"-?\d+(\.\d+)?"), re.compile(rb"[^\s,:;{}\[\]]+")


def damaged(raw, rng, *, is_text=True):
    """Return `raw` changed."""
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        kinds = BINARY + TEXT * is_text if raw else (put_in,)
        raw = rng.choice(kinds)(raw, rng)
    return packed(raw, rng) if rng.random() < 0.1 else raw


def flip_bits(raw, rng):
    changed = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 8))):
        changed[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def cut_off(raw, rng):
    at = rng.randrange(len(raw))
    return raw[:at] if rng.random() < 0.7 else raw[at:]


def cut_out(raw, rng):
    at = rng.randrange(len(raw))
    return raw[:at] + raw[at + rng.choice((1, 2, 5, 40, 4096)) :]


def double(raw, rng):
    at = rng.randrange(len(raw))
    end = at + rng.choice((1, 5, 40, 4096))
    return raw[:end] + raw[at:]


def put_in(raw, rng):
    at = rng.randint(0, len(raw))
    return raw[:at] + rng.choice((rng.choice(PIECES), rng.randbytes(1), bytes(9))) + raw[at:]


def zero(raw, rng):
    """A block that was never written."""
    at = rng.randrange(len(raw))
    size = len(raw[at : at + rng.choice((1, 8, 512, 4096))])
    return raw[:at] + bytes(size) + raw[at + size :]


def swap_fields(raw, rng):
    found = list(_FIELD.finditer(raw))
    if len(found) < 2:
        return raw
    first, second = sorted(rng.sample(found, 2), key=lambda match: match.start())
    return b"".join((raw[: first.start()], second[0], raw[first.end() : second.start()], first[0],
                     raw[second.end() :]))  # fmt: skip


def other_number(raw, rng):
    found = list(_NUMBER.finditer(raw))
    if not found:
        return raw
    match = rng.choice(found)
    return raw[: match.start()] + rng.choice(NUMBERS).encode() + raw[match.end() :]


def other_lines(raw, rng):
    lines = raw.splitlines(keepends=True)
    at = rng.randrange(len(lines))
    change = rng.randrange(4)
    if change == 0:
        del lines[at]
    elif change == 1:
        lines.insert(rng.randrange(len(lines)), lines[at])
    elif change == 2:
        rng.shuffle(lines)
    else:
        return raw.replace(b"\n", rng.choice(LINE_ENDS))
    return b"".join(lines)


def encode_otherwise(raw, rng):
    return raw.decode("utf-8", "replace").encode(rng.choice(ENCODINGS), "replace")


def packed(raw, rng):
    """Return `raw` as an archive or a compressed file, whole or damaged again."""
    how = rng.randrange(3)
    if how == 0:
        raw = gzip.compress(raw, 1, mtime=0)
    elif how == 1:
        raw = pa.compress(raw, codec="zstd", asbytes=True)
    else:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("a/trace.csv", raw)
        raw = file.getvalue()
    return rng.choice(BINARY)(raw, rng) if rng.random() < 0.7 else raw


BINARY = (flip_bits, cut_off, cut_out, double, put_in, zero)
TEXT = (swap_fields, other_number, other_number, other_lines, encode_otherwise)
