"""Model, hardware and run descriptions by mutation: refused in one line, or good to simulate with.

Whatever is read is then used as far as anything uses it; nothing may fail there.
"""

import json
from collections import Counter
from dataclasses import asdict, replace

import pytest

from mdi_analysis.options_diff import option_differences
from mdi_shared.chunking import fallback_note, why_not_control
from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.files import packaged_models, read_cost_file
from mdi_shared.cost.group import assumed_group_cost
from mdi_shared.cost.hardware import B200, H200, hardware_by_name
from mdi_shared.cost.linear import LinearCost
from mdi_shared.cost.predicted import PredictedCost
from mdi_shared.cost.roofline import Efficiencies, RooflineCost
from mdi_shared.cost.shape import TINY
from mdi_shared.cost.step_cost import HostCost
from mdi_shared.cost.work import decode_work, prefill_work
from mdi_shared.describe_run import describe_run
from mdi_shared.errors import MiniDeepInferError, TraceError
from mdi_shared.json_input import parse_json
from mdi_shared.run_description import RunDescription
from mdi_shared.run_notes import run_notes
from mdi_sim.search.model_error import held_out_error, unfit_kinds
from mdi_sim.simulate import simulate
from mdi_traces import generate_workload
from mdi_traces.run import Run
from mdi_traces.schema import Metadata
from minideepinfer.run_summary import label, summarize
from tests.fuzz.mutations import BAD_NUMBERS, mutations, places

CONTROL = SchedulerConfig(chunk_policy="cost_target", prefill_target_ms=10.0)


def fitted() -> dict:
    """A packaged model with a group, without most of its diagnostics, which nothing reads."""
    document = json.loads(packaged_models()["h200-flash-slice"].read_text())
    fit = document["fit"]
    kept = ("held_out_mape", "usable_for_control", "dropped", "n", "r2")
    for kind in ("prefill", "decode"):
        fit[kind] = {name: value for name, value in fit[kind].items() if name in kept}
    for name in ("host", "units", "traces"):
        fit.pop(name, None)
    document["decode"]["graphs"] = document["decode"]["graphs"][:3]
    document["decode"]["graph_slopes"] = document["decode"]["graph_slopes"][:3]
    document["prefill"]["base"] = document["prefill"].get("base", [])[:3]
    document["group"] = assumed_group_cost(H200, TINY, 2).to_json()
    return document


def predicted() -> dict:
    share = Efficiencies()
    cost = PredictedCost(hardware=replace(B200, name="own"), shape=TINY, ep=2, prefill=share,
                         decode=share, host=HostCost(), basis={"model": "tiny"})  # fmt: skip
    return cost.to_json()


DOCUMENTS = {"fitted": fitted(), "predicted": predicted()}
FREE = ("fit", "basis")  # diagnostics for people: any finite number


def tried(action, given, what):
    """Return the answer; None when it is refused in one line. Else fail, naming `what`."""
    try:
        return action(given) or True
    except MiniDeepInferError as error:
        refusal = str(error)
    except Exception as error:
        raise AssertionError(what) from error
    assert "\n" not in refusal, what
    assert len(refusal) < 1_500, what
    return None


def use(cost) -> None:
    """Ask all that a simulation, a tuning and a summary ask of a model."""
    shape = getattr(cost, "shape", TINY)
    for work in (prefill_work(shape, [(1, 1, 1)]), prefill_work(shape, [(2_048, 9_000, 9_000)]),
                 decode_work(shape, [100]), decode_work(shape, [131_072] * 256)):  # fmt: skip
        ns = cost.device_ns(work)
        assert type(ns) is int
        assert ns >= 1
        if isinstance(cost, LinearCost):
            cost.extrapolated(work)
            if cost.group is not None:
                assert cost.group.device_ns([ns, ns], [work, work]) >= 1
    for seqs in (0, 1, 256):
        assert all(part >= 0 for part in cost.host.of_step(seqs, 8_192, is_alone=True))
    held_out_error(cost), unfit_kinds(cost), why_not_control(cost), fallback_note(CONTROL, cost)
    run = describe_run(cost=cost, shape=shape, scheduler={"num_blocks": 2_048}, ranks=2)
    again = RunDescription.from_toml(run.to_toml())
    assert again == run
    run_notes(run)
    metadata = type("M", (), {"source": "simulator", "config": run.to_json()})
    assert "\n" not in label(metadata)
    json.dumps(cost.to_json(), allow_nan=False)


@pytest.mark.parametrize("name", DOCUMENTS)
def test_cost_models(tmp_path, name):
    counts, used = Counter(), set()
    file = tmp_path / "m.json"
    document = DOCUMENTS[name]
    file.write_text(json.dumps(document))
    use(read_cost_file(file))
    for path, value, text in mutations(document):
        file.write_text(text)
        cost = tried(read_cost_file, file, (path, value))
        counts["refused" if cost is None else "read"] += 1
        if cost is None:
            continue
        is_free = any(part in FREE for part in path) and "shape" not in path
        assert is_free or value not in BAD_NUMBERS, (path, value)
        assert value not in ("NaN", "Infinity", "-Infinity", "1e999"), (path, value)
        if repr(cost) not in used:
            used.add(repr(cost))
            tried(use, cost, (path, value))  # may contradict the shape or the ranks
    assert counts["refused"] > 1_000
    assert counts["read"] > 50


def test_hardware(tmp_path):
    file, counts = tmp_path / "h.json", Counter()
    for path, value, text in mutations(asdict(B200)):
        file.write_text(text)
        found = tried(hardware_by_name, str(file), (path, value))
        counts["refused" if found is None else "read"] += 1
        if found is not None:
            assert value not in BAD_NUMBERS, (path, value)
            RooflineCost(found, TINY).device_ns(prefill_work(TINY, [(2_048, 9_000, 9_000)]))
    assert counts["refused"] > 150
    assert counts["read"] > 10


def test_run_descriptions():
    """As a saved run holds them in its metadata, and as TOML."""
    run = describe_run(shape=TINY, ranks=2, scheduler={"num_draft_tokens": 1}, until_s=5.0)
    document, counts = run.to_json(), Counter()
    for path, value, text in mutations(document):
        try:
            data = parse_json(text)
        except ValueError:
            counts["refused"] += 1
            continue
        found = tried(RunDescription.from_json, data, (path, value))
        counts["refused" if found is None else "read"] += 1
        if found is not None:
            bad = ("NaN", "Infinity", "-Infinity", "1e999", "-1", "-0.5", "9" * 401)
            assert value not in bad or path[-1] == "eos_token_id", (path, value)
            found.to_json()
            run_notes(found)
    assert counts["refused"] > 1_000
    assert counts["read"] > 100


def test_metadata_of_runs():
    """What another program wrote there is refused, or does not stop a summary."""
    work = generate_workload("azure-conv", num_requests=4, seed=1)
    run = simulate(work, cost=read_cost_file("h200-tiny"), shape=TINY)
    counts, document = Counter(), json.loads(run.metadata.to_json())
    document["config"]["cost"]["fit"] = {"hardware": "NVIDIA H200"}
    for path, value, text in mutations(document):
        try:
            metadata = Metadata.from_json(text, "file")
        except TraceError as error:
            counts["refused"] += "\n" not in str(error)
            continue
        counts["read"] += 1
        if value in ("0", "-1", '"x"', "[]", "[[]]", "{}", "null", "1" + "0" * 30):
            changed = Run(run.steps_table, run.requests_table, metadata, run.items_table)
            tried(lambda changed: summarize(changed, itl=False).sentences(), changed, (path, value))
            option_differences(changed, run)
    assert counts["refused"] > 1_000
    assert counts["read"] > 1_000


def test_every_place_is_visited():
    assert list(places({"a": [1, {"b": 2}]})) == [(), ("a",), ("a", 0), ("a", 1), ("a", 1, "b")]
