"""Peak rates of accelerators, as their vendors state them.

Peaks are not what a kernel reaches; `roofline.py` multiplies them by stated efficiencies. Nothing
is measured or detected here.
"""

from dataclasses import dataclass

from mdi_shared.errors import ConfigError


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
        for field, value in (
            ("hbm_bytes", self.hbm_bytes),
            ("hbm_bytes_per_s", self.hbm_bytes_per_s),
            ("fp8_flops_per_s", self.fp8_flops_per_s),
            ("bf16_flops_per_s", self.bf16_flops_per_s),
            ("fp32_flops_per_s", self.fp32_flops_per_s),
            ("nvlink_bytes_per_s", self.nvlink_bytes_per_s),
        ):
            if not value > 0:
                raise ConfigError(field, value, "must be above 0")


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

HARDWARE: dict[str, Hardware] = {hardware.name: hardware for hardware in (H200, B200)}


def hardware_in(stated: str) -> Hardware | None:
    """Return the accelerator that a device's name speaks of, as "NVIDIA H200"; None if unknown."""
    return next((HARDWARE[word] for word in stated.lower().split() if word in HARDWARE), None)


def hardware_by_name(name: str) -> Hardware:
    """Return a known accelerator; raise `ConfigError` listing the names when there is none such."""
    if name not in HARDWARE:
        raise ConfigError("hardware", name, f"must be one of {', '.join(HARDWARE)}")
    return HARDWARE[name]
