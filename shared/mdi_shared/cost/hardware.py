"""Peak rates of accelerators, as their vendors state them, or as a user's JSON file does.

Peaks are not what a kernel reaches; `roofline.py` multiplies them by stated efficiencies. Nothing
is measured or detected here.
"""

from dataclasses import dataclass, fields
from math import inf
from pathlib import Path

from mdi_shared.errors import ConfigError, is_number, require
from mdi_shared.json_input import read_json, require_object


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One accelerator. FLOP rates are dense (no sparsity), 2 per multiply-add.

    `fp8` and `bf16` are tensor-core rates, `fp32` is that of the vector units. `nvlink` is the
    total of both directions. Raises `ConfigError` for a rate that is not above 0.
    """

    name: str
    hbm_bytes: int
    hbm_bytes_per_s: float
    fp8_flops_per_s: float
    bf16_flops_per_s: float
    fp32_flops_per_s: float
    nvlink_bytes_per_s: float

    def __post_init__(self) -> None:
        require(isinstance(self.name, str) and self.name != "", "name", self.name, "must be a text")
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            holds = is_number(value) and 0 < value < inf
            require(holds, field.name, value, "must be a finite number above 0")


# NVIDIA H100 Tensor Core GPU datasheet, SXM; its tensor figures "with sparsity" are halved.
H100 = Hardware(
    name="h100",
    hbm_bytes=80_000_000_000,
    hbm_bytes_per_s=3.35e12,
    fp8_flops_per_s=1979e12,
    bf16_flops_per_s=989e12,
    fp32_flops_per_s=67e12,
    nvlink_bytes_per_s=900e9,
)

# NVIDIA H200 Tensor Core GPU datasheet, SXM; its tensor figures "with sparsity" are halved.
H200 = Hardware(
    name="h200",
    hbm_bytes=141_000_000_000,
    hbm_bytes_per_s=4.8e12,
    fp8_flops_per_s=1979e12,
    bf16_flops_per_s=989e12,
    fp32_flops_per_s=67e12,
    nvlink_bytes_per_s=900e9,
)

# NVIDIA DGX B200 and HGX B200 datasheets, per GPU. Of 192 GB, 180 GB are usable.
B200 = Hardware(
    name="b200",
    hbm_bytes=180_000_000_000,
    hbm_bytes_per_s=8e12,
    fp8_flops_per_s=4.5e15,
    bf16_flops_per_s=2.25e15,
    fp32_flops_per_s=80e12,
    nvlink_bytes_per_s=1.8e12,
)

# NVIDIA HGX B300 specifications, an eighth of the board; figures "with sparsity" are halved.
B300 = Hardware(
    name="b300",
    hbm_bytes=288_000_000_000,
    hbm_bytes_per_s=8e12,
    fp8_flops_per_s=4.5e15,
    bf16_flops_per_s=2.25e15,
    fp32_flops_per_s=75e12,
    nvlink_bytes_per_s=1.8e12,
)

HARDWARE: dict[str, Hardware] = {each.name: each for each in (H100, H200, B200, B300)}


def hardware_in(stated: str) -> Hardware | None:
    """Return the accelerator that a device's name speaks of, as "NVIDIA H200"; None if unknown."""
    return next((HARDWARE[word] for word in stated.lower().split() if word in HARDWARE), None)


def hardware_by_name(name: str) -> Hardware:
    """Return a known accelerator, or the one that a file FILE.json states.

    Raises `ConfigError` for an unknown name and a file that does not hold just the fields of
    `Hardware`.
    """
    if name.endswith(".json"):
        return hardware_from_json(read_json(Path(name), "hardware"), name)
    if name not in HARDWARE:
        raise ConfigError("hardware", name, f"must be one of {', '.join(HARDWARE)}, or a file "
                          "NAME.json of peak rates")  # fmt: skip
    return HARDWARE[name]


def hardware_from_json(data: object, where: str = "peaks") -> Hardware:
    """Return the accelerator of that name, or the one whose fields a JSON object holds."""
    if isinstance(data, str):
        return hardware_by_name(data)
    own = require_object(where, data, tuple(field.name for field in fields(Hardware)))
    try:
        return Hardware(**own)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.field}", error.value, error.allowed) from error
