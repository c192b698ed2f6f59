"""Step-time models: host costs, the roofline, the fitted linear model and its file."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mdi_shared.cost.hardware import B200, H200, Hardware, hardware_by_name
from mdi_shared.cost.linear import (
    DECODE_FEATURES,
    PREFILL_FEATURES,
    DecodeTerms,
    LinearCost,
    PrefillTerms,
    features,
)
from mdi_shared.cost.roofline import Efficiencies, RooflineCost
from mdi_shared.cost.shape import TINY, V41_FLASH
from mdi_shared.cost.step_cost import NO_HOST_COST, ConstantCost, HostCost
from mdi_shared.cost.work import StepWork, decode_work, prefill_work
from mdi_shared.errors import ConfigError

PREFILL_TERMS = PrefillTerms(
    const=1e6, rows=100.0, consumer_rows=50.0, idx_pairs_r2=0.5, idx_pairs_r1=0.25, core_pairs=2.0,
    swa_pairs=1.0, cached_rows=3.0, n_seqs=1_000.0,
)  # fmt: skip
BENT = replace(PREFILL_TERMS, base=((10, 40_000), (20, 60_000), (100, 60_000)))
EAGER = DecodeTerms(const=5e5, rows=2_000.0, sum_k=1.5, n_seqs=300.0)
GRAPHED = DecodeTerms(
    const=5e5, rows=2_000.0, sum_k=1.5, n_seqs=300.0, graphs=((1, 9_000), (4, 10_000), (8, 16_000))
)


def linear(decode=EAGER, **options):
    return LinearCost(prefill=PREFILL_TERMS, decode=decode, **options)


# ---- host --------------------------------------------------------------------------------------


def test_host_cost_grows_with_sequences():
    host = HostCost(schedule_ns=10, schedule_ns_per_seq=2, launch_ns=7, process_ns=5,
                    process_ns_per_seq=3)  # fmt: skip
    assert [host.schedule(4), host.launch(4), host.process(4)] == [18, 7, 17]
    assert [NO_HOST_COST.schedule(9), NO_HOST_COST.launch(9), NO_HOST_COST.process(9)] == [0, 0, 0]


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_host_cost_refuses_what_is_no_time(value):
    with pytest.raises(ConfigError, match="launch_ns"):
        HostCost(launch_ns=value)


def test_constant_cost_by_kind():
    cost = ConstantCost(40_000_000, 9_000_000)
    assert cost.device_ns(prefill_work(TINY, [(9, 9, 9)])) == 40_000_000
    assert cost.device_ns(decode_work(TINY, [9, 8])) == 9_000_000
    assert cost.host == NO_HOST_COST
    with pytest.raises(ConfigError, match="decode_ns = 0"):
        ConstantCost(1, 0)


# ---- hardware and roofline ---------------------------------------------------------------------


def test_hardware_by_name():
    assert hardware_by_name("h200") is H200
    with pytest.raises(ConfigError, match=r"hardware = 'h20'.*h200, b200"):
        hardware_by_name("h20")
    with pytest.raises(ConfigError, match="hbm_bytes_per_s"):
        Hardware(name="x", hbm_bytes=1, hbm_bytes_per_s=0.0, fp8_flops_per_s=1.0,
                 bf16_flops_per_s=1.0, fp32_flops_per_s=1.0, nvlink_bytes_per_s=1.0)  # fmt: skip


def test_roofline_is_the_sum_of_what_it_explains():
    cost = RooflineCost(H200, V41_FLASH, ep=4)
    for work in (
        prefill_work(V41_FLASH, [(4_096, 131_072, 131_072)]),
        decode_work(V41_FLASH, [8_192] * 64),
    ):
        parts = cost.explain(work)
        assert cost.device_ns(work) == int(sum(part.ns for part in parts.values()) + 0.5)
        assert sum(part.flops for part in parts.values()) == work.flops_total
        assert parts["overhead"].ns == 40 * 10_000


def test_what_bounds_which_component():
    cost = RooflineCost(H200, V41_FLASH)
    prefill = cost.explain(prefill_work(V41_FLASH, [(8_192, 65_536, 65_536)]))
    decode = cost.explain(decode_work(V41_FLASH, [8_192]))
    assert prefill["dense"].bound == prefill["attention"].bound == "compute"
    assert decode["dense"].bound == decode["experts"].bound == decode["head"].bound == "memory"


def test_roofline_by_hand():
    """One component in each regime, at efficiencies that keep the sums short."""
    whole = Efficiencies(tensor=1.0, vector=1.0, memory=1.0, link=1.0, overhead_ns_per_layer=0)
    cost = RooflineCost(H200, V41_FLASH, efficiencies=whole)
    core = cost.explain(prefill_work(V41_FLASH, [(8_192, 65_536, 65_536)]))["attention"]
    pairs = 8_192 * (38 * 512 + 40 * 128)
    assert core.ns == pytest.approx(pairs * 4 * 64 * 512 / 989e12 * 1e9)  # bf16, 2 per madd
    head = cost.explain(decode_work(V41_FLASH, [100]))["head"]
    assert head.ns == pytest.approx((5_120 + 2) * 2 * 129_280 / 4.8e12 * 1e9)


def test_more_ranks_and_better_machines_are_faster():
    work = decode_work(V41_FLASH, [8_192] * 64)
    one, four = RooflineCost(H200, V41_FLASH), RooflineCost(H200, V41_FLASH, ep=4)
    assert four.device_ns(work) < one.device_ns(work)
    assert RooflineCost(B200, V41_FLASH).device_ns(work) < one.device_ns(work)
    with pytest.raises(ConfigError, match="ep = 5"):
        RooflineCost(H200, V41_FLASH, ep=5)


@pytest.mark.parametrize("wrong", [{"tensor": 0.0}, {"memory": 1.2}, {"overhead_ns_per_layer": -1}])
def test_efficiencies_are_shares(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Efficiencies(**wrong)


# ---- the protocol ------------------------------------------------------------------------------

COSTS = {
    "roofline": RooflineCost(H200, V41_FLASH, ep=4),
    "tiny": RooflineCost(B200, TINY),
    "eager": linear(),
    "graphed": linear(GRAPHED),
    "bent": replace(linear(), prefill=BENT),
    "constant": ConstantCost(7, 5),
}


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize("is_prefill", [True, False])
@settings(max_examples=60, deadline=None)
@given(
    st.tuples(*[st.integers(0, 10**6)] * 15),
    st.sampled_from(StepWork._fields[1:]),
    st.integers(1, 10**6),
)
def test_time_never_falls_when_any_field_grows(name, is_prefill, values, field, more):
    less = StepWork(is_prefill, *values)
    grown = less._replace(**{field: getattr(less, field) + more})
    cost = COSTS[name]
    assert 1 <= cost.device_ns(less) <= cost.device_ns(grown)


# ---- the linear model --------------------------------------------------------------------------


def test_linear_prefill_is_a_dot_product():
    work = StepWork(True, 2, 30, 20, 2, 700, 600, 100, 0, 0, 4_000, 3_000, 500, 80, 0, 0)
    assert features(work) == (30, 20, 4_000, 3_000, 500, 80, 700, 2)
    assert len(PREFILL_FEATURES) == len(features(work))
    expected = 1e6 + 3_000 + 1_000 + 2_000 + 750 + 1_000 + 80 + 2_100 + 2_000
    assert linear().device_ns(work) == expected


@pytest.mark.parametrize(
    ("rows", "base"),
    [(1, 40_000), (10, 40_000), (15, 50_000), (20, 60_000), (70, 60_000), (100, 60_000),
     (150, 65_000)],
)  # fmt: skip
def test_a_base_replaces_constant_and_rows(rows, base):
    work = StepWork(True, 0, rows, 20, 2, 0, 600, 100, 0, 0, 0, 0, 0, 0, 0, 0)
    assert replace(linear(), prefill=BENT).device_ns(work) == base + 1_000


def test_linear_eager_decode():
    work = decode_work(TINY, [10, 20, 31])
    assert features(work) == (3, 61, 3)
    assert linear().device_ns(work) == int(5e5 + 6_000 + 91.5 + 900 + 0.5)


@pytest.mark.parametrize(
    ("rows", "forward"),
    [(1, 9_000), (2, 10_000), (4, 10_000), (5, 16_000), (8, 16_000), (9, 5e5 + 9 * 2_000)],
)
def test_decode_graphs_are_a_staircase(rows, forward):
    work = decode_work(TINY, [2] * rows)
    assert linear(GRAPHED).device_ns(work) == forward + 2 * rows * 1.5 + 300 * rows


def test_ranges_tell_what_was_never_seen():
    seen = {name: (0, 10**9) for name in PREFILL_FEATURES}
    cost = linear(
        prefill_ranges=seen | {"rows": (100, 4_096), "n_seqs": (1, 1)},
        decode_ranges={"rows": (1, 8), "sum_k": (1, 1_000)},
    )
    assert cost.in_range(prefill_work(TINY, [(4_096, 4_096, 4_096)]))
    small_pair = prefill_work(TINY, [(40, 40, 40), (50, 50, 50)])
    assert cost.extrapolated(small_pair) == ("rows", "n_seqs")
    assert cost.extrapolated(decode_work(TINY, [2_000])) == ("sum_k", "n_seqs")
    assert not cost.in_range(decode_work(TINY, [2]))
    assert linear().extrapolated(decode_work(TINY, [2])) == DECODE_FEATURES


def full_model():
    return LinearCost(
        prefill=BENT,
        decode=GRAPHED,
        prefill_ranges={"rows": (1, 4_096)},
        decode_ranges={"sum_k": (1, 900)},
        host=HostCost(launch_ns=1),
        fit={"r2": 0.99, "dropped": ["swa_pairs"]},
    )


def test_json_round_trip(tmp_path):
    cost = full_model()
    path = tmp_path / "model.json"
    path.write_text(json.dumps(cost.to_json()))
    assert LinearCost.from_json(path) == cost
    assert LinearCost.from_json(str(path)) == cost
    assert LinearCost.from_json(cost.to_json()) == cost
    work = decode_work(TINY, [10, 20])
    assert LinearCost.from_json(path).device_ns(work) == cost.device_ns(work)


def change(path, value):
    """Return the model's JSON with one entry replaced, or dropped for None."""
    data = json.loads(json.dumps(full_model().to_json()))
    *parents, last = path.split(".")
    inner = data
    for name in parents:
        inner = inner[name]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    return data


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("schema_version", 2, "schema_version = 2: must be 1"),
        ("units", "ms", "units = 'ms'"),
        ("prefill", None, "cost model.prefill = None: is missing"),
        ("prefill.terms.rows", None, "prefill.terms.rows = None: is missing"),
        ("prefill.terms.rows", -0.5, "prefill.rows = -0.5"),
        ("prefill.terms.rows", "12", "prefill.rows = '12'"),
        ("prefill.terms.rows", float("nan"), "prefill.rows = nan"),
        ("prefill.terms.heads", 1.0, "prefill.terms.heads = 1.0: unknown; known: const, rows"),
        ("decode.terms.sum_k", float("inf"), "decode.sum_k = inf"),
        ("decode.terms.sum_k", True, "decode.sum_k = True"),
        ("prefill.base", [[4, 10], [8, 9]], r"prefill.base = \(8, 9\)"),
        ("decode.graphs", [[4, 10], [2, 12]], r"decode.graphs = \(2, 12\)"),
        ("decode.graphs", [[4, 10], [8, 9]], r"decode.graphs = \(8, 9\)"),
        ("decode.graphs", [[4, 10.5]], "decode.graphs.*must be two ints"),
        ("decode.ranges.rows", [5], "decode.ranges.rows"),
        ("decode.ranges.rows", [5, 4], "decode.ranges.rows"),
        ("decode.ranges.swa_pairs", [1, 2], "decode.ranges.swa_pairs.*unknown feature"),
        ("host.launch_ns", None, "host.launch_ns = None: is missing"),
        ("host.launch_ns", -3, "launch_ns = -3"),
        ("fit", [1], r"fit = \[1\]: must be an object"),
        ("extra", 1, "cost model.extra = 1: unknown"),
    ],
)
def test_a_wrong_model_is_refused_by_name(path, value, message):
    with pytest.raises(ConfigError, match=message):
        LinearCost.from_json(change(path, value))


def test_an_unreadable_file_is_refused(tmp_path):
    path = tmp_path / "model.json"
    with pytest.raises(ConfigError, match=r"model\.json.*cannot be read"):
        LinearCost.from_json(path)
    path.write_text(json.dumps(full_model().to_json())[:-9])
    with pytest.raises(ConfigError, match="is not JSON"):
        LinearCost.from_json(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        LinearCost.from_json(path)
    path.write_text("[1, 2]")
    with pytest.raises(ConfigError, match="must be an object"):
        LinearCost.from_json(path)


def test_bounded_replay_that_no_fit_has_seen_is_told():
    """Rows that are left out lie within the range of consumer rows; what they save is unknown."""
    ranges = {name: (0, 10**12) for name in PREFILL_FEATURES}
    fit = {"prefill": {"dropped": {"consumer_rows": "collinear"}}}
    whole = prefill_work(TINY, [(600, 600, 600)])
    cut = prefill_work(replace(TINY, replay_keep_tokens=140), [(600, 600, 600)])
    assert cut.consumer_rows < cut.rows
    blind = linear(prefill_ranges=ranges, fit=fit)
    assert blind.extrapolated(whole) == ()
    assert blind.extrapolated(cut) == ("consumer_rows",)
    assert linear(prefill_ranges=ranges).extrapolated(cut) == ()
