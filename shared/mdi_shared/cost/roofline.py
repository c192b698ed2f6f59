"""A step-time model from first principles: per component, the slower of arithmetic and memory.

It needs no measurement, so it says what a machine could do at stated efficiencies; it has no
calibration and must not be quoted as one. Components run one after another: nothing overlaps.

Read next: `traffic.py` (what is counted), `step_cost.py` (the protocol), `linear.py` (fitted).
"""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from mdi_shared.cost.hardware import HARDWARE, Hardware
from mdi_shared.cost.shape import ModelShape
from mdi_shared.cost.step_cost import HostCost
from mdi_shared.cost.traffic import ByComponent, step_bytes, step_flops
from mdi_shared.cost.work import StepWork, decode_work
from mdi_shared.errors import require


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiencies:
    """Shares of peak rates that kernels reach, and the fixed time of a layer.

    The defaults are assumptions, not measurements: 60 % of peak arithmetic and 70 % of peak
    bandwidth are what good kernels reach at large sizes, and 10 us per layer stand for kernel
    launches and the latency of collectives. `tensor` is the share of FP8 tensor cores, and of
    bf16 ones unless `tensor_bf16` states their own. Raises `ConfigError` outside (0, 1] and
    below 0.
    """

    tensor: float = 0.6
    vector: float = 0.6
    memory: float = 0.7
    link: float = 0.7
    overhead_ns_per_layer: int = 10_000
    tensor_bf16: float | None = None

    def __post_init__(self) -> None:
        shares = {name: getattr(self, name) for name in ("tensor", "vector", "memory", "link")}
        for name, value in {**shares, "tensor_bf16": self.bf16}.items():
            require(0 < value <= 1, name, value, "must be above 0 and at most 1")
        require(self.overhead_ns_per_layer >= 0, "overhead_ns_per_layer",
                self.overhead_ns_per_layer, "must be at least 0")  # fmt: skip

    @property
    def bf16(self) -> float:
        """The share of peak rate that bf16 tensor cores reach."""
        return self.tensor if self.tensor_bf16 is None else self.tensor_bf16


# All of the peak rates and no fixed time: the floor that efficiencies are shares of.
PEAK = Efficiencies(tensor=1.0, vector=1.0, memory=1.0, link=1.0, overhead_ns_per_layer=0)

# Which units a component computes on, in the order of `ByComponent`; exchange computes nothing.
UNITS_OF_COMPONENT = ("fp8", "fp32", "fp8", "fp8", "bf16", "fp8", None, "bf16")


class ComponentTime(NamedTuple):
    """One component of a step: FP8-equivalent FLOPs, bytes, and the times they take, in ns."""

    flops: int
    moved_bytes: int
    compute_ns: float
    memory_ns: float

    @property
    def ns(self) -> float:
        return max(self.compute_ns, self.memory_ns)

    @property
    def bound(self) -> str:
        """Which of the two decides."""
        return "compute" if self.compute_ns >= self.memory_ns else "memory"


class RooflineCost:
    """Step time of one rank of `shape` on `hardware`, its experts split over `ep` ranks.

    Bytes and FLOPs are those of `traffic.py`. FP8-equivalent FLOPs turn back into operations of
    the precision a component runs in: core attention and LM head bf16 tensor cores,
    hyper-connections f32 vector units, index scores FP8 (neither machine is assumed to use FP4
    arithmetic), the rest FP8. Engram tables are assumed to be in device memory.
    """

    __slots__ = (
        "_compute", "_memory", "_overhead_ns", "efficiencies", "ep", "hardware", "host", "shape",
    )  # fmt: skip

    def __init__(
        self,
        hardware: Hardware,
        shape: ModelShape,
        *,
        ep: int = 1,
        efficiencies: Efficiencies | None = None,
        host: HostCost | None = None,
    ) -> None:
        self.hardware, self.shape, self.ep = hardware, shape, ep
        self.efficiencies = share = Efficiencies() if efficiencies is None else efficiencies
        self.host = HostCost() if host is None else host
        fp8 = 1e9 / (hardware.fp8_flops_per_s * share.tensor)
        bf16 = 1e9 / (hardware.bf16_flops_per_s * share.bf16)
        fp32 = 1e9 / (hardware.fp32_flops_per_s * share.vector)
        hbm = 1e9 / (hardware.hbm_bytes_per_s * share.memory)
        link = 1e9 / (hardware.nvlink_bytes_per_s * share.link)
        # ns per FP8-equivalent FLOP: one bf16 operation counts 2, f32 counts 4, FP4 a half. Index
        # scores are counted as FP4 and run as FP8.
        rate = {"fp8": fp8, "fp32": fp32 / 4, "bf16": bf16 / 2, None: 0.0}
        rates = [rate[units] for units in UNITS_OF_COMPONENT]
        rates[ByComponent._fields.index("index_scores")] *= 2
        self._compute = tuple(rates)
        self._memory = (hbm, hbm, hbm, hbm, hbm, hbm, link, hbm)
        self._overhead_ns = float(shape.num_hidden_layers * share.overhead_ns_per_layer)
        step_bytes(shape, decode_work(shape, []), ep)  # raises when ep does not divide the experts

    def device_ns(self, work: StepWork) -> int:
        """Return the device time of a step, at least 1 ns."""
        if work.rows == 0:
            return 1
        total = self._overhead_ns
        flops, moved = step_flops(self.shape, work), step_bytes(self.shape, work, self.ep)
        for count, rate, size, slowness in zip(
            flops, self._compute, moved, self._memory, strict=True
        ):
            compute, memory = count * rate, size * slowness
            total += compute if compute >= memory else memory
        return max(int(total + 0.5), 1)

    def explain(self, work: StepWork) -> dict[str, ComponentTime]:
        """Return the components of `device_ns`, and its fixed part as "overhead", for people."""
        flops, moved = step_flops(self.shape, work), step_bytes(self.shape, work, self.ep)
        parts = {
            name: ComponentTime(flops[i], moved[i], flops[i] * self._compute[i],
                                moved[i] * self._memory[i])
            for i, name in enumerate(ByComponent._fields)
        }  # fmt: skip
        parts["overhead"] = ComponentTime(0, 0, 0.0, self._overhead_ns if work.rows else 0.0)
        return parts

    def describe(self) -> dict[str, Any]:
        """Return hardware, efficiencies and host times: assumptions, no calibration.

        `peaks` are the rates of hardware that is not one of ours.
        """
        known = HARDWARE.get(self.hardware.name) == self.hardware
        return {
            "kind": "roofline",
            "hardware": self.hardware.name,
            **({} if known else {"peaks": asdict(self.hardware)}),
            "ep": self.ep,
            "efficiencies": asdict(self.efficiencies),
            "host": asdict(self.host),
        }
