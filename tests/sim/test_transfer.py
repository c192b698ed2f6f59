"""Predictions for hardware and models never recorded: known truths, official figures, recordings.

Run with `-s` to see the efficiencies that the official figures imply.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from mdi_shared.cost.files import read_cost_file
from mdi_shared.cost.hardware import B200, H200
from mdi_shared.cost.linear import LinearCost
from mdi_shared.cost.predicted import PredictedCost
from mdi_shared.cost.roofline import PEAK, Efficiencies, RooflineCost
from mdi_shared.cost.shape import TINY, V41_FLASH
from mdi_shared.cost.step_cost import HostCost
from mdi_shared.cost.work import decode_work, prefill_work
from mdi_shared.errors import ConfigError
from mdi_sim.fit import reached
from mdi_sim.fit.reached import reached_by
from mdi_sim.fit.transfer import fitted_shape, prediction_errors, transfer
from tests.sim.test_recorded_fit import MODELS, runs_in

TRUE = Efficiencies(tensor=0.3, tensor_bf16=0.5, memory=0.45, overhead_ns_per_layer=150_000)
# One rank's step of the official setting (R36): 4,096 new tokens, 126,976 cached, EP4.
OFFICIAL = prefill_work(V41_FLASH, [(4_096, 131_072, 131_072)])


@dataclass
class Fitted:
    """Stands for a fitted model whose times are those of a known roofline."""

    cost: RooflineCost
    fit: dict
    host: HostCost
    prefill_ranges: dict
    decode_ranges: dict

    def device_ns(self, work):
        return self.cost.device_ns(work)

    def in_range(self, work):
        return True


def fitted(hardware=H200, shape=V41_FLASH, efficiencies=TRUE):
    lengths = {"rows": (128, 8_192), "n_seqs": (1, 16), "cached_rows": (128, 131_072)}
    return Fitted(
        RooflineCost(hardware, shape, efficiencies=efficiencies),
        {"hardware": f"NVIDIA {hardware.name.upper()}", "shape": asdict(shape)},
        HostCost(launch_ns=7),
        lengths,
        {"rows": (1, 256), "n_seqs": (1, 256), "sum_k": (256, 2_000_000)},
    )


def shipped(name):
    return LinearCost.from_json(MODELS / f"{name}.json")


def test_known_efficiencies_are_found_again():
    expected = replace(Efficiencies(), memory=TRUE.memory)
    found = reached_by(fitted(), H200, V41_FLASH, is_prefill=True, expected=expected)
    assert found.efficiencies.tensor == pytest.approx(TRUE.tensor, rel=0.03)
    assert found.efficiencies.memory == pytest.approx(TRUE.memory, rel=0.03)
    assert found.fit["max"] < 0.05
    assert sum(found.shares.values()) == pytest.approx(1.0)
    decode = reached_by(fitted(), H200, V41_FLASH, is_prefill=False).efficiencies
    assert decode.memory == pytest.approx(TRUE.memory, rel=0.03)
    assert decode.overhead_ns_per_layer == pytest.approx(150_000, rel=0.03)


def test_what_took_no_part_keeps_its_assumption():
    found = reached_by(fitted(), H200, V41_FLASH, is_prefill=False)
    assert {"fp8", "fp32"} <= set(found.assumed)
    assert found.efficiencies.tensor == Efficiencies().tensor
    assert found.describe()["terms"]["fp8"]["from"] == "assumed"
    assert found.describe()["terms"]["memory"]["from"] == "fitted"


def test_a_transfer_predicts_what_the_known_efficiencies_give_elsewhere():
    predicted = transfer(fitted(), hardware=B200, shape=V41_FLASH, ep=4)
    truth = RooflineCost(B200, V41_FLASH, ep=4, efficiencies=TRUE)
    for work in (OFFICIAL, prefill_work(V41_FLASH, [(1_024, 1_024, 1_024)] * 4),
                 decode_work(V41_FLASH, [4_096] * 64)):  # fmt: skip
        assert predicted.device_ns(work) == pytest.approx(truth.device_ns(work), rel=0.02)
    assert predicted.host == HostCost(launch_ns=7)


def test_official_prefill_figures_imply_plausible_efficiencies():
    """Seed and production engine on B200, EP4 x DP4 (R36); ours implied, one H200 (337bdce)."""
    implied = {}
    for engine, hardware, ep, ms in (("production", B200, 4, 113.2), ("seed", B200, 4, 949.0),
                                     ("ours", H200, 1, 417.2)):  # fmt: skip
        floor = RooflineCost(hardware, V41_FLASH, ep=ep, efficiencies=PEAK)
        if hardware is B200:
            assert floor.device_ns(OFFICIAL) / 1e6 == pytest.approx(49.2, abs=0.05)
        share = floor.device_ns(OFFICIAL) / 1e6 / ms
        implied[engine] = share
        print(f"{engine}: {ms} ms on {hardware.name}, ep {ep}: {share:.1%} of all peak rates")  # noqa: T201 - with -s
        at = Efficiencies(tensor=share, vector=share, memory=share, link=share,
                          overhead_ns_per_layer=0)  # fmt: skip
        prior = RooflineCost(hardware, V41_FLASH, ep=ep, efficiencies=at)
        assert prior.device_ns(OFFICIAL) / 1e6 == pytest.approx(ms, rel=1e-6)
    assert implied["production"] == pytest.approx(0.435, abs=0.005)
    assert implied["seed"] == pytest.approx(0.052, abs=0.001)
    assert implied["ours"] == pytest.approx(0.279, abs=0.003)


def test_the_slice_predicts_the_whole_model():
    """Recorded on six layers; 417.2 ms are implied for forty by parts measured on six (337bdce)."""
    predicted = transfer(shipped("h200-flash-slice"), shape=V41_FLASH).device_ns(OFFICIAL) / 1e6
    assert predicted == pytest.approx(432.4, rel=0.01)
    assert predicted == pytest.approx(417.2, rel=0.05)


def test_other_figures_the_docs_state():
    fit = shipped("h200-flash-slice")
    shape = fitted_shape(fit)
    prefill = prefill_work(shape, [(4_096, 131_072, 131_072)])
    assert fit.in_range(prefill)
    assert fit.device_ns(prefill) / 1e6 == pytest.approx(82.6, rel=0.01)
    assert transfer(fit).device_ns(prefill) / 1e6 == pytest.approx(81.4, rel=0.01)
    for batch, ms in ((64, 20.4), (8, 6.2)):
        decode = decode_work(shape, [131_072] * batch)
        assert fit.extrapolated(decode) == ("sum_k",)
        assert fit.device_ns(decode) / 1e6 == pytest.approx(ms, rel=0.01)
    elsewhere = transfer(fit, hardware=B200, shape=V41_FLASH, ep=4)
    assert elsewhere.device_ns(OFFICIAL) / 1e6 == pytest.approx(215, rel=0.01)


@pytest.mark.parametrize(("weight", "ms"), [(0.25, 204), (1, 215), (2, 235), (3, 233)])
def test_how_strongly_assumptions_are_held_moves_another_gpus_times(monkeypatch, weight, ms):
    monkeypatch.setattr(reached, "PRIOR_WEIGHT", weight * reached.PRIOR_WEIGHT)
    cost = transfer(shipped("h200-flash-slice"), hardware=B200, shape=V41_FLASH, ep=4)
    assert cost.device_ns(OFFICIAL) / 1e6 == pytest.approx(ms, rel=0.01)


def test_small_steps_would_make_the_whole_model_too_slow(monkeypatch):
    """What LEAST_ROWS was chosen by: the very step it is judged by above."""
    monkeypatch.setattr(reached, "LEAST_ROWS", 0.0)
    cost = transfer(shipped("h200-flash-slice"), shape=V41_FLASH)
    assert cost.device_ns(OFFICIAL) / 1e6 == pytest.approx(1.12 * 417.2, rel=0.01)


@pytest.mark.parametrize(("batch", "context", "predicted", "measured"), [
    (1, 4_096, 3.74, 3.51), (8, 4_096, 5.29, 5.10), (64, 4_096, 13.13, 12.13),
    (1, 131_072, 3.75, 3.69), (8, 131_072, 5.33, 5.35), (64, 131_072, 13.44, 12.89),
])  # fmt: skip
def test_decode_steps_of_the_benchmark(batch, context, predicted, measured):
    """Measured as docs/performance.md says (2a4bae4), in runs that no fit has seen."""
    cost = transfer(shipped("h200-flash-slice"))
    ms = cost.device_ns(decode_work(cost.shape, [context] * batch)) / 1e6
    assert ms == pytest.approx(predicted, rel=0.01)
    assert ms == pytest.approx(measured, rel=0.09)


@pytest.mark.parametrize(("source", "target", "prefill", "decode"), [
    ("h200-flash-slice", "h200-flash-slice", 0.090, 0.031),
    ("h200-tiny", "h200-flash-slice", 0.356, 0.394),
    ("h200-flash-slice", "h200-tiny", 0.724, 1.602),
])  # fmt: skip
def test_errors_on_recordings_are_those_the_docs_state(source, target, prefill, decode):
    predicted = transfer(shipped(source), shape=fitted_shape(shipped(target)))
    found = prediction_errors(predicted, runs_in(target))
    assert found["prefill"]["mape"] == pytest.approx(prefill, rel=0.05)
    assert found["decode"]["mape"] == pytest.approx(decode, rel=0.05)


def test_runs_of_another_model_or_hardware_are_no_check():
    predicted = transfer(shipped("h200-tiny"), shape=V41_FLASH)
    with pytest.raises(ConfigError, match=r"model = 'v41-flash': is predicted, but .* tiny"):
        prediction_errors(predicted, runs_in("h200-tiny"))
    with pytest.raises(ConfigError, match=r"hardware = 'b200'.* recorded on NVIDIA H200"):
        prediction_errors(transfer(shipped("h200-tiny"), hardware=B200), runs_in("h200-tiny"))


def test_unknown_hardware_and_dimensions_are_refused():
    unnamed = fitted()
    unnamed.fit["hardware"] = "AMD MI300X"
    with pytest.raises(ConfigError, match=r"from_hardware = 'AMD MI300X'.*h200, b200"):
        transfer(unnamed)
    assert transfer(unnamed, source_hardware=H200).hardware is H200
    with pytest.raises(ConfigError, match=r"fit\.shape = None"):
        transfer(replace(shipped("h200-tiny"), fit={"hardware": "h200"}))
    with pytest.raises(ConfigError, match="ep = 5"):
        transfer(fitted(), ep=5)


# ---- the file ----------------------------------------------------------------------------------


@pytest.fixture
def document():
    cost = transfer(shipped("h200-tiny"), hardware=B200, ep=4, origin={"name": "m.json"})
    return json.loads(json.dumps(cost.to_json()))


def test_a_prediction_survives_its_file(document, tmp_path):
    path = tmp_path / "p.json"
    path.write_text(json.dumps(document))
    again = read_cost_file(path)
    assert isinstance(again, PredictedCost)
    assert again.to_json() == document == again.describe()
    assert (again.shape, again.hardware, again.ep) == (fitted_shape(shipped("h200-tiny")), B200, 4)
    assert again.shape == replace(TINY, name=again.shape.name)
    assert isinstance(read_cost_file(MODELS / "h200-tiny.json"), LinearCost)


@pytest.mark.parametrize(("path", "value", "says"), [
    (("kind",), "linear", "kind = 'linear': must be 'predicted'"),
    (("schema_version",), 9, "schema_version = 9: must be 1"),
    (("hardware",), "mi300", "hardware = 'mi300': must be one of h100, h200"),
    (("ep",), "4", "ep = '4': must be an int, at least 1"),
    (("ep",), 5, "ep = 5: must divide"),
    (("shape",), [], r"shape = \[\]: must be an object"),
    (("shape", "head_dim"), None, "shape.head_dim = None: is missing"),
    (("efficiencies", "decode"), None, "efficiencies.decode = None: is missing"),
    (("efficiencies", "prefill", "memory"), -0.1, "prefill.memory = -0.1: must be a finite number"),
    (("efficiencies", "prefill", "tensor"), "all", "efficiencies.prefill.tensor = 'all': must be"),
    (("host", "launch_ns"), -5, "launch_ns = -5: must be at least 0"),
    (("basis",), 3, "basis = 3: must be an object"),
])  # fmt: skip
def test_a_prediction_edited_into_nonsense_is_refused(document, path, value, says):
    *keys, last = path
    place = document
    for key in keys:
        place = place[key]
    if value is None:
        del place[last]
    else:
        place[last] = value
    with pytest.raises(ConfigError, match=says):
        PredictedCost.from_json(document)


def test_a_file_that_is_no_model_is_refused(tmp_path):
    path = Path(tmp_path / "p.json")
    path.write_text("[1]")
    with pytest.raises(ConfigError, match=r"cost model = .*must be an object"):
        read_cost_file(path)
