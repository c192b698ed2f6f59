"""The description of a run: it round-trips, chooses what can exist, refuses the rest in a line."""

import json
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.files import MODEL_FOLDERS, packaged_models, read_cost_file
from mdi_shared.cost.hardware import B300, H100, H200, Hardware
from mdi_shared.cost.memory import rank_weight_bytes
from mdi_shared.cost.roofline import RooflineCost
from mdi_shared.cost.shape import TINY, V41_FLASH
from mdi_shared.cost.step_cost import ConstantCost, HostCost
from mdi_shared.describe_run import describe_run
from mdi_shared.errors import ConfigError
from mdi_shared.placement import LeastKV
from mdi_shared.rank_view import UnseenRank
from mdi_shared.request import Request
from mdi_shared.run_description import RunDescription
from mdi_shared.run_notes import run_notes
from mdi_shared.served import Served

FITTED = "h200-flash-slice"
MINE = Hardware(name="mine", hbm_bytes=10**12, hbm_bytes_per_s=1e12, fp8_flops_per_s=1e15,
                bf16_flops_per_s=1e15, fp32_flops_per_s=1e14, nvlink_bytes_per_s=1e11)  # fmt: skip


@pytest.mark.parametrize(
    "run",
    [
        describe_run(),
        describe_run(cost=FITTED, seed=7, placement="least_tokens", until_s=2.5),
        describe_run(cost=FITTED, ranks=4, kv_cache_memory_gb=3),
        describe_run(hardware=MINE, shape=TINY, scheduler={"prefill_attempt_interval": 3}),
        describe_run(cost=ConstantCost(5, 6), shape=TINY, draft_accept_rate=0.25,
                     served=Served(workload="azure-conv", requests=9, rate=2.5)),
        RunDescription(scheduler=SchedulerConfig(max_num_seqs=8), ranks=2),
    ],
    ids=["default", "fitted", "group", "own-hardware", "constant", "real"],
)  # fmt: skip
def test_it_survives_json_and_toml(run):
    whole = run.to_json()
    for again in (
        RunDescription.from_json(json.loads(json.dumps(whole, allow_nan=False))),
        RunDescription.from_toml(run.to_toml()),
        RunDescription.from_metadata({**json.loads(json.dumps(whole)), "left_free": [1]}, None),
    ):
        assert again.to_json() == whole
        assert again.scheduler == run.scheduler
        assert again.served == run.served


def test_ranks_are_the_fewest_that_hold_the_model():
    for hardware, ranks in ((H100, 12), (H200, 6), (B300, 2), (MINE, 1)):
        run = describe_run(hardware=hardware)
        assert run.ranks == ranks == run.cost.ep
        assert run.assumed[0].startswith(f"{ranks} rank")
        assert run_notes(run) == []
        fewer = [n for n in range(1, ranks) if V41_FLASH.n_routed_experts % n == 0]
        assert all(rank_weight_bytes(V41_FLASH, n) > 0.8 * hardware.hbm_bytes for n in fewer)


def test_the_pool_is_what_memory_leaves():
    config = SchedulerConfig(max_num_seqs=2048)
    run = describe_run(scheduler={"max_num_seqs": 2048}, ranks=6)
    used = run.scheduler.num_blocks * V41_FLASH.kv_bytes_per_block()
    used += run.scheduler.num_slots * V41_FLASH.state_bytes_per_slot
    used += rank_weight_bytes(V41_FLASH, 6)
    assert 0 <= 0.9 * H200.hbm_bytes - used < V41_FLASH.kv_bytes_per_block()
    assert describe_run(scheduler=config).scheduler.num_blocks == config.num_blocks, "as given"
    few = describe_run(scheduler={"max_num_seqs": 4, "max_model_len": 1024}, shape="tiny")
    assert few.scheduler.num_blocks == 5 * 9 + 1, "no more than all seats can fill"
    sized = describe_run(scheduler=config, gpu_memory_utilization=0.9, ranks=6)
    assert sized.scheduler == run.scheduler
    assert describe_run(kv_cache_memory_gb=1).scheduler.num_blocks == 10**9 // 113_920


def test_what_does_not_fit_is_simulated_as_if_it_did_and_told():
    run = describe_run(ranks=1)
    assert run.scheduler.num_blocks == SchedulerConfig().num_blocks
    assert run.assumed == ()
    assert "needs 501 GB of weights" in run_notes(run)[0]
    small = replace(MINE, hbm_bytes=10**9)
    with pytest.raises(ConfigError, match="holds v41-flash on no number of ranks"):
        describe_run(hardware=small)


def test_a_description_can_be_changed():
    base = describe_run(seed=3, placement="least_kv")
    more = describe_run(base, ranks=8, hardware="b200")
    assert (more.seed, more.placement, more.ranks, more.cost.ep) == (3, "least_kv", 8, 8)
    assert more.cost.hardware.name == "b200"
    assert more.scheduler == base.scheduler
    assert describe_run(base, seed=4).to_json() == replace(base, seed=4).to_json()
    faster = describe_run(base, scheduler={"prefill_attempt_interval": 8})
    assert faster.scheduler == replace(base.scheduler, prefill_attempt_interval=8)
    smaller = describe_run(base, scheduler={"max_num_seqs": 8}, kv_cache_memory_gb=1)
    assert smaller.scheduler == replace(base.scheduler, max_num_seqs=8, num_blocks=8778)
    fitted = describe_run(base, cost=FITTED)
    assert fitted.shape == V41_FLASH, "the run is of another model than the cost"
    assert "fitted for flash-slice" in run_notes(fitted)[0]


def test_a_placement_of_the_callers_begins_anew_in_each_run():
    own = LeastKV()
    run = describe_run(shape="tiny", placement=own)
    request, ranks = Request(req_id="r", prompt_len=5), [UnseenRank()] * 2
    assert [run.new_placement().place(request, ranks) for _ in range(2)] == [0, 0]
    assert run.to_json()["placement"] == "LeastKV"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"rank": 2}, "rank = 2: unknown option; known: scheduler, cost"),
        ({"ranks": 0}, "ranks = 0: must be at least 1"),
        ({"ranks": 5}, "ep = 5"),
        ({"ranks": 2.0}, "ranks = 2.0: must be an int, at least 1"),
        ({"seed": -1}, "seed = -1: must be at least 0"),
        ({"policy": "sprt"}, "policy = 'sprt': 'sprt' is not a policy; known: fcfs, "),
        ({"placement": "x"}, "placement = 'x': 'x' is not a placement; known: round_robin, random"),
        ({"draft_accept_rate": 2.0}, "must be between 0 and 1"),
        ({"until_s": 0.0}, "until_s = 0.0: must be above 0"),
        ({"cost": "nothing"}, "must be a file FILE.json, or one of h200-flash-slice, h200-tiny"),
        ({"cost": FITTED, "ep": 2}, "ep = 2: belongs to the roofline"),
        ({"cost": FITTED, "ranks": 5}, "ranks = 5: must divide the 384 routed experts"),
        ({"hardware": "tpu"}, "must be one of h100, h200, b200, b300, or a file"),
        ({"shape": "big"}, "model = 'big': must be one of v41-flash, tiny"),
        ({"kv_cache_memory_gb": 1, "gpu_memory_utilization": 0.5}, "give one of them"),
        ({"kv_cache_memory_gb": -1.0}, "must be a finite number above 0"),
        ({"gpu_memory_utilization": 1.5}, "must be above 0 and at most 1"),
        ({"kv_cache_memory_gb": 1, "scheduler": {"num_blocks": 99}}, "contradicts num_blocks"),
        ({"scheduler": {"max_num_seq": 1}}, "max_num_seq = 1: unknown option"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(options, says):
    with pytest.raises(ConfigError) as refused:
        describe_run(**options)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("served", "says"),
    [
        ({"trace": "t", "workload": "w"}, "workload = 'w': contradicts the trace t"),
        ({"trace": "t", "requests": 3}, "requests = 3: belongs to a workload"),
        ({"workload": "w", "sort": True}, "sort = True: belongs to a trace file"),
        ({"limit": 0}, "limit = 0: must be at least 1"),
        ({"speed": float("inf")}, "speed = inf: must be a finite number above 0"),
    ],
)
def test_what_is_served_does_not_contradict_itself(served, says):
    with pytest.raises(ConfigError, match=says):
        Served(**served)
    with pytest.raises(ConfigError, match=r"served.tracks = 't': unknown; known: trace, workload"):
        Served.from_json({"tracks": "t"})


class Own:
    """A step-time model as a user might write it; the options are what may be wrong with it."""

    def __init__(self, ns=5, host=None, description=None):
        self.ns, self.description = ns, {"kind": "own"} if description is None else description
        self.host = HostCost() if host is None else host

    def device_ns(self, work):
        return self.ns if work.is_prefill else 3

    def describe(self):
        return self.description


class NoHost:
    def device_ns(self, work):
        return 1

    def describe(self):
        return {"kind": "own"}


@pytest.mark.parametrize(
    ("cost", "says"),
    [
        (NoHost(), "cost = 'NoHost': has no attribute host"),
        (Own(ns=2.5), "cost.device_ns = 2.5: of Own must be an int of at least 1 ns; this is for a "
         "prefill step of 1 token"),
        (Own(ns=0), "cost.device_ns = 0"),
        (Own(host=3), "cost.host = 3: of Own must be a HostCost"),
        (Own(description={"kind": "own", "f": {1, 2}}), "must return plain JSON data"),
        (Own(description={"kind": "own", "nan": float("nan")}), "must return plain JSON data"),
        (Own(description=["own"]), "must return a dict whose 'kind' names the model"),
    ],
)  # fmt: skip
def test_an_own_cost_is_checked_when_it_is_given(cost, says):
    with pytest.raises(ConfigError) as refused:
        describe_run(cost=cost, shape=TINY)
    assert says in str(refused.value)


def test_an_own_cost_runs_but_cannot_be_built_again():
    run = describe_run(cost=Own(), shape=TINY)
    assert run.ranks == 1
    assert run.scheduler == SchedulerConfig(), "what its hardware holds is not known"
    with pytest.raises(ConfigError, match=r"cost.kind = 'own': can be built again for roofline"):
        RunDescription.from_json(run.to_json())


def test_metadata_of_earlier_versions_is_read():
    """They had the scheduler's options, ranks, shape and cost, and no more."""
    whole = RunDescription(cost=RooflineCost(H200, TINY), shape=TINY).to_json()
    old = {name: whole[name] for name in ("scheduler", "ranks", "cost", "shape")}
    assert RunDescription.from_metadata(old, 5).to_json() == {**whole, "seed": 5}


def test_a_typo_in_a_description_is_named():
    with pytest.raises(ConfigError, match=r"run.rank = 2: unknown; known: scheduler, cost"):
        RunDescription.from_toml("rank = 2\n")
    with pytest.raises(ConfigError, match="is not TOML"):
        RunDescription.from_toml("[run\n")


def test_every_scheduler_option_is_in_the_toml_text():
    read = tomllib.loads(describe_run(shape="tiny").to_toml())
    assert set(read["scheduler"]) == set(SchedulerConfig.__dataclass_fields__)


def test_packaged_models_are_read_by_name():
    found = read_cost_file(FITTED)
    path = Path(__file__).parents[2] / "traces" / "models" / f"{FITTED}.json"
    assert found == read_cost_file(path)


def test_the_wheel_puts_the_models_where_they_are_looked_for():
    root = Path(__file__).parents[2]
    build = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    (source, target) = next(iter(build["targets"]["wheel"]["force-include"].items()))
    assert (root / source) == MODEL_FOLDERS[1]
    assert MODEL_FOLDERS[0].parts[-3:] == tuple(target.split("/"))
    assert {path.stem for path in (root / source).glob("*.json")} == set(packaged_models())
