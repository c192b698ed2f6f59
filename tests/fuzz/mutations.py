"""JSON documents with one value changed: every place, and what a careless or hostile hand puts in.

`mutations` yields them one by one; the same document gives the same ones. `mutated` draws one of a
document that has too many places.
"""

import json
from collections.abc import Iterator
from copy import deepcopy
from random import Random
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


def mutated(document: Any, rng: Random) -> str:
    """Return the document as text with one value, drawn at random, replaced, moved or left out."""
    paths = list(places(document))
    path, other = rng.choice(paths), rng.choice(paths)
    changed = deepcopy({"top": document})
    holder: Any = changed
    for key in ("top", *path)[:-1]:
        holder = holder[key]
    last = ("top", *path)[-1]
    value = holder[last]
    how = rng.random()
    if how < 0.1 and path:
        del holder[last]
    elif how < 0.2 and isinstance(holder, dict):
        holder["unknown"] = holder.pop(last)
    elif how < 0.3:  # another place's value
        found: Any = document
        for key in other:
            found = found[key]
        holder[last] = found
    elif how < 0.5 and isinstance(value, int):
        holder[last] = rng.choice(
            (value + 1, value - 1, value * 2, value // 2, -value, value << 32)
        )
    else:
        holder[last] = _MARK
    new = rng.choice((*BAD_NUMBERS, *OTHERS))
    return json.dumps(changed.get("top")).replace(json.dumps(_MARK), new)
