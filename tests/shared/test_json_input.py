"""What describes something is small, finite and plain, or refused in one line at once."""

import os

import pytest

from mdi_shared.cost.files import read_cost_file
from mdi_shared.cost.hardware import hardware_by_name
from mdi_shared.errors import ConfigError
from mdi_shared.json_input import MOST_BYTES, parse_json, parse_toml, read_json, read_text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"a":' * 10**5, "nested too deeply"),
        ("[" * 65 + "]" * 65, "nested too deeply, more than 64"),
        ('{"a": {"b": [0, NaN]}}', "holds NaN"),
        ('{"a": {"b": [0, 1e999]}}', "a.b.1 holds inf, must be a finite number"),
        ("9" * 401, "401 digits"),
        ("9" * 5_000, "5000 digits"),
        ('{"a": 18446744073709551616}', "a holds a number that does not fit into 64 bits"),
        ('{"a": "\\ud800"}', "a holds half a character"),
        ('{"\\udfff": 1}', "it holds half a character"),
        ('{"a": 1, "a": 2}', "a key comes twice"),
        ("{", "Expecting"),
        ("", "Expecting"),
    ],
)
def test_json_that_is_refused(tmp_path, text, says):
    with pytest.raises(ValueError, match=says):
        parse_json(text)
    path = tmp_path / "f.json"
    path.write_text(text)
    for read in (read_json, read_cost_file, lambda path: hardware_by_name(str(path))):
        with pytest.raises(ConfigError, match=f"f.json': is not JSON: .*{says}") as refused:
            read(path)
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 500


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a = inf", "a holds inf"),
        ("a.b = nan", "a.b holds nan"),
        ("a = 1979-05-27", "dates and times have no meaning"),
        (f"a = {'9' * 401}", "does not fit into 64 bits"),
        (f"a = {'[' * 10**4}", "nested too deeply"),
        ("a = [" + "[" * 70 + "]" * 70 + "]", "nested too deeply"),
    ],
)
def test_toml_that_is_refused(text, says):
    with pytest.raises(ValueError, match=says):
        parse_toml(text)


def test_64_bits_and_a_byte_order_mark_are_fine(tmp_path):
    path = tmp_path / "f.json"
    path.write_bytes(b'\xef\xbb\xbf{"a": [18446744073709551615, -9223372036854775808, null]}')
    assert read_json(path) == {"a": [2**64 - 1, -(2**63), None]}


def test_only_regular_files_of_a_bearable_size(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "large").open("wb") as large:
        large.truncate(MOST_BYTES + 1)
    (tmp_path / "latin").write_bytes(b"\xe9")
    for name, says in (("pipe", "must be a regular file"), ("large", "at most 67,108,864 bytes"),
                       ("latin", "is not UTF-8 text"), ("", "must be a regular file"),
                       ("no", "No such file"), ("n" * 300, "File name too long"),
                       ("a\0b", "null byte"), ("latin/x", "Not a directory")):  # fmt: skip
        with pytest.raises(ConfigError, match=says) as refused:
            read_text(tmp_path / name, "thing")
        assert str(refused.value).startswith("thing = ")
        assert "\n" not in str(refused.value)
    with pytest.raises(ConfigError, match="must be a regular file"):
        read_json(type(tmp_path)("/dev/zero"))
