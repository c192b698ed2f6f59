"""JSON documents with one value changed: every place, and what a careless or hostile hand puts in.

`mutations` yields them one by one; the same document gives the same ones.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

# JSON as text: some of these no Python value stands for.
BAD_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "-1", "-0.5", "1e300", "1" + "0" * 30,
               "9" * 401, "9" * 5_000)  # fmt: skip
OTHERS = ("null", "true", "false", "0", "0.5", "1", "7", "4611686018427387904", '"x"', '""',
          '"\\ud800"', '"a\\u0000b"', "[]", "{}", "[[]]", '{"a": 1}', "[1, 2]", '"1"',
          "[" * 70 + "]" * 70)  # fmt: skip
_MARK = "@@ here @@"


def places(document: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value, the document's own included."""
    yield path
    inner = document.items() if isinstance(document, dict) else (
        enumerate(document) if isinstance(document, list) else ()
    )  # fmt: skip
    for key, value in inner:
        yield from places(value, (*path, key))


def mutations(document: Any) -> Iterator[tuple[tuple[Any, ...], str, str]]:
    """Yield (path, new value as text, the whole document as text)."""
    for path in places(document):
        changed = deepcopy({"top": document})
        holder: Any = changed
        for key in ("top", *path)[:-1]:
            holder = holder[key]
        last = ("top", *path)[-1]
        holder[last] = _MARK
        text = json.dumps(changed["top"])
        for value in (*BAD_NUMBERS, *OTHERS):
            yield path, value, text.replace(json.dumps(_MARK), value)
        if path and isinstance(holder, dict):
            del holder[last]
            yield path, "left out", json.dumps(changed["top"])
            holder["unknown"] = 1
            yield path, "renamed", json.dumps(changed["top"])
