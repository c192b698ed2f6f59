"""A fitted model's two readings, one step and arrays of them, are one formula.

`LinearCost.device_ns` is what a simulation and the live chunk policy ask; a fit is judged by
`predict`.
"""

from itertools import accumulate

import hypothesis.strategies as st
import numpy as np
from hypothesis import given, settings

from mdi_shared.cost.linear import DecodeTerms, LinearCost, PrefillTerms, features
from mdi_shared.cost.shape import TINY
from mdi_shared.cost.work import decode_work, prefill_work
from mdi_sim.fit.features import DECODE, PREFILL, Steps
from mdi_sim.fit.steps import predict

rates = st.one_of(st.just(0.0), st.floats(1e-3, 1e5))
counts = st.integers(1, 300)


@st.composite
def tables(draw, most_entries=6):
    """Sizes that ascend and times that do not fall."""
    entries = draw(st.integers(0, most_entries))
    sizes = accumulate(draw(st.lists(st.integers(1, 60), min_size=entries, max_size=entries)))
    times = accumulate(draw(st.lists(st.integers(0, 10**7), min_size=entries, max_size=entries)))
    return tuple(zip(sizes, times, strict=True))


@st.composite
def prefill_terms(draw):
    names = ("const", "rows", "consumer_rows", "idx_pairs_r2", "idx_pairs_r1", "core_pairs",
             "swa_pairs", "cached_rows", "n_seqs")  # fmt: skip
    return PrefillTerms(base=draw(tables()), **{name: draw(rates) for name in names})


@st.composite
def decode_terms(draw):
    """A slope saves at most its graph's time: a step takes no negative time."""
    graphs = draw(tables())
    slopes = tuple(draw(st.floats(0, 1)) * ns / size for size, ns in graphs)
    return DecodeTerms(
        graphs=graphs, graph_slopes=slopes if draw(st.booleans()) else (),
        **{name: draw(rates) for name in ("const", "rows", "sum_k", "n_seqs")},
    )  # fmt: skip


prompts = st.tuples(counts, counts).map(lambda qc: (qc[0], sum(qc), sum(qc)))
prefill_works = st.lists(prompts, min_size=1, max_size=4).map(lambda r: prefill_work(TINY, r))
decode_works = st.lists(counts, min_size=1, max_size=40).map(lambda ks: decode_work(TINY, ks))
NO_PREFILL = PrefillTerms(**dict.fromkeys(PrefillTerms.__dataclass_fields__.keys() - {"base"}, 0.0))
NO_DECODE = DecodeTerms(const=0.0, rows=0.0, sum_k=0.0, n_seqs=0.0)


def assert_equal_times(cost, terms, kind, works):
    x = np.array([features(work) for work in works], dtype=np.float64)
    none = np.zeros(len(works), dtype=np.int64)
    predicted = predict(terms, Steps(kind, x, np.ones(len(works)), none, none, none, {}))
    for work, ns in zip(works, predicted.tolist(), strict=True):
        # Rounded to the nearest, and sums in another order may part in the last bits.
        assert abs(cost.device_ns(work) - max(ns, 1.0)) <= 0.5 + 1e-9 * ns


@settings(max_examples=300, deadline=None, derandomize=True)
@given(prefill_terms(), st.lists(prefill_works, min_size=1, max_size=8))
def test_prefill_times_agree(terms, works):
    cost = LinearCost(prefill=terms, decode=NO_DECODE)
    assert_equal_times(cost, terms, PREFILL, works)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(decode_terms(), st.lists(decode_works, min_size=1, max_size=8))
def test_decode_times_agree(terms, works):
    cost = LinearCost(prefill=NO_PREFILL, decode=terms)
    assert_equal_times(cost, terms, DECODE, works)
