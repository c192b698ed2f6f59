"""Everything that decides what a run does, in one object.

`simulate`, `tune` and whatever compares runs take it, and it stands in the metadata of every
trace. It is plain data with its rules: `describe_run.py` makes one and chooses what was left out.

Read next: `config.py` (the scheduler's options), `served.py` (the requests), `describe_run.py`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from mdi_shared.config import SchedulerConfig
from mdi_shared.cost.described import cost_from_description, require_step_cost
from mdi_shared.cost.shape import V41_FLASH, ModelShape, shape_from_mapping
from mdi_shared.cost.step_cost import StepCost
from mdi_shared.errors import MOST_SEED, ConfigError, Rule, is_number, require_int, require_rules
from mdi_shared.json_input import parse_toml, require_mapping, require_object, require_texts
from mdi_shared.placement import Placement, new_placement, placement_name
from mdi_shared.policies import NO_POLICY, Policy, new_policy, policy_name
from mdi_shared.policies.phases import require_allowed
from mdi_shared.served import Served
from mdi_shared.toml_text import to_toml, without_none

LONGEST_RUN_S = 9e9  # what int64 nanoseconds hold


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDescription:
    """One run: what is served, how, on what, from which seed.

    `cost` is what steps take, None where real devices take the time. `policy` and `placement` are
    specifications (policies/registry.py, placement.py), or objects of the caller's.
    `draft_accept_rate` is the chance that a draft token is accepted; the run ends at `until_s`
    virtual seconds. `assumed` says in words what `describe_run` chose. Raises `ConfigError` naming
    the field, its value and what is allowed.
    """

    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    cost: StepCost | None = None
    shape: ModelShape = V41_FLASH
    ranks: int = 1
    policy: str | Policy = NO_POLICY
    placement: str | Placement = "round_robin"
    seed: int = 0
    draft_accept_rate: float = 0.7
    until_s: float | None = None
    served: Served = field(default_factory=Served)
    assumed: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_int("ranks", self.ranks, 1)
        require_int("seed", self.seed, 0, MOST_SEED)
        require_rules(self, self._rules())
        new_placement(self.placement)
        require_allowed(new_policy(self.policy), self.scheduler)
        if self.cost is not None:
            require_step_cost(self.cost, self.shape)

    def _rules(self) -> Iterator[Rule]:
        rate = self.draft_accept_rate
        yield ("draft_accept_rate", is_number(rate) and 0 <= rate <= 1, "must be between 0 and 1")
        until = self.until_s
        yield ("until_s", until is None or (is_number(until) and 0 < until < LONGEST_RUN_S),
               f"must be above 0 and below {LONGEST_RUN_S:g} s")  # fmt: skip

    @property
    def step_cost(self) -> StepCost:
        """What steps take; raises `ConfigError` for a run on real devices."""
        if self.cost is None:
            raise ConfigError("cost", None, "a simulation needs step times")
        return self.cost

    def new_placement(self) -> Placement:
        """Return a placement that has placed nothing yet."""
        return new_placement(self.placement)

    def new_policy(self) -> Policy | None:
        """Return a policy that has decided nothing yet; None is first come, first served."""
        return new_policy(self.policy)

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts, lists and numbers; `from_json` inverts it.

        A policy, placement or cost of the caller's own becomes its name or description.
        """
        return {
            "scheduler": asdict(self.scheduler),
            "shape": {name: list(value) if isinstance(value, tuple) else value
                      for name, value in asdict(self.shape).items()},
            **({} if self.cost is None else {"cost": self.cost.describe()}),
            "ranks": self.ranks,
            "policy": policy_name(self.policy),
            "placement": placement_name(self.placement),
            "seed": self.seed,
            "draft_accept_rate": self.draft_accept_rate,
            "until_s": self.until_s,
            "served": self.served.to_json(),
            "assumed": list(self.assumed),
        }  # fmt: skip

    @classmethod
    def from_json(cls, data: object) -> "RunDescription":
        """Build from what `to_json` returned; names left out have their defaults.

        Raises `ConfigError` for unknown names, bad values, and a policy, cost or placement that
        only its author can build.
        """
        own = require_object("run", data, (), tuple(field.name for field in fields(cls)))
        parts: dict[str, Any] = {}
        if "shape" in own:
            parts["shape"] = shape_from_mapping(require_mapping("shape", own["shape"]))
        if "cost" in own:
            shape = parts.get("shape", V41_FLASH)
            parts["cost"] = cost_from_description(own["cost"], shape)
        if "scheduler" in own:
            options = require_mapping("scheduler", own["scheduler"])
            parts["scheduler"] = SchedulerConfig.from_mapping(options)
        if "served" in own:
            parts["served"] = Served.from_json(require_mapping("served", own["served"]))
        for name in ("policy", "placement"):
            if not isinstance(own.get(name, ""), str):
                raise ConfigError(name, own[name], "must be a name")
        parts["assumed"] = require_texts("assumed", own.get("assumed", ()))
        return cls(**{**own, **parts})

    def to_toml(self) -> str:
        """Return `to_json` as TOML text; `from_toml` inverts it."""
        return to_toml(self.to_json())

    @classmethod
    def from_toml(cls, text: str) -> "RunDescription":
        """Build from TOML text; raises `ConfigError` as `from_json` does."""
        try:
            document = parse_toml(text)
        except ValueError as error:
            raise ConfigError("run", "", f"is not TOML: {error}") from error
        return cls.from_json(without_none(document))

    @classmethod
    def from_metadata(cls, config: Mapping[str, Any], seed: int | None) -> "RunDescription":
        """Build from the metadata of a trace, whatever else that holds; raises as `from_json`.

        A real run has no cost; runs of earlier versions lack what was not written then.
        """
        names = {field.name for field in fields(cls)}
        own = {name: value for name, value in config.items() if name in names}
        return cls.from_json({**own, "seed": own.get("seed", seed or 0)})
