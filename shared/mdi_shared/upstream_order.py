"""The order that the production engine's sorts leave equal members in; for `strict_upstream` only.

The engine sorts with C++'s `std::sort`, which is not stable, so the order of equals is that of a
library: GNU's introsort. Up to 16 elements it is an insertion sort, and stable. Above, parts are
split around a median of three until they are that short, which moves equals about. Where splits go
wrong 2 log2(n) times in a row the library goes on by heap sort, and this file by a stable sort; no
workload has come there.

Read next: `decode.py` (who sorts).
"""

from collections.abc import Callable
from typing import TypeVar

Item = TypeVar("Item")
SHORT = 16  # elements that are sorted by insertion


def sort_descending(items: list[Item], key: Callable[[Item], int]) -> None:
    """Sort in place, the largest key first, equals in the order that `std::sort` gives them."""
    pairs = [(key(item), item) for item in items]
    _split(pairs, 0, len(pairs), 2 * (len(pairs).bit_length() - 1))
    pairs.sort(key=lambda pair: -pair[0])  # the insertion sort at the end is stable
    items[:] = [item for _, item in pairs]


def _split(pairs: list[tuple[int, Item]], first: int, last: int, most_splits: int) -> None:
    """Order `pairs[first:last]` roughly: no member of a part belongs into a part before it."""
    while last - first > SHORT and most_splits > 0:
        most_splits -= 1
        _median_first(pairs, first, last)
        pivot, left, right = pairs[first][0], first + 1, last
        while True:
            while pairs[left][0] > pivot:
                left += 1
            right -= 1
            while pivot > pairs[right][0]:
                right -= 1
            if left >= right:
                break
            pairs[left], pairs[right] = pairs[right], pairs[left]
            left += 1
        _split(pairs, left, last, most_splits)
        last = left


def _median_first(pairs: list[tuple[int, Item]], first: int, last: int) -> None:
    """Swap the median of the second, the middle and the last member with the first one.

    Of equal ones it is the one that the library's comparisons end at.
    """
    second, middle, end = first + 1, first + (last - first) // 2, last - 1
    a, b, c = pairs[second][0], pairs[middle][0], pairs[end][0]
    if a > b:
        chosen = middle if b > c else end if a > c else second
    else:
        chosen = second if a > c else end if b > c else middle
    pairs[first], pairs[chosen] = pairs[chosen], pairs[first]
