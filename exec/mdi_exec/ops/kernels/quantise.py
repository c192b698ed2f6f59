"""Rounding kernels, bit-exact: codes and scales, or the rounded values in bfloat16.

An E4M3 code times a power of two is exact in bfloat16, so a product of rounded values is the exact
product of the quantised operands. The `encode_*` macros work on one thread's 8 values and serve the
other families too. Products with reciprocals stand only where they are exact: powers of two.
"""

import tilelang.language as T
import torch
from torch import Tensor

from mdi_exec.ops.kernels.jit import Sample, compiled
from mdi_exec.ops.kernels.lanes import CHUNK, FLAT_THREADS, group_max
from mdi_exec.ops.quantise import (
    ACTIVATION_FLOOR,
    E2M1_MAX,
    E4M3_MAX,
    ENTRY_FLOOR,
    ENTRY_GROUP,
    GROUP,
    INDEX_FLOOR,
    Quantised,
)

# A format's name, by the torch dtypes of its codes and scales.
FP8, FP4, FP4_E4M3 = "fp8", "fp4", "fp4_e4m3"
FORM_OF = {
    (torch.float8_e4m3fn, torch.float8_e8m0fnu): FP8,
    (torch.uint8, torch.float8_e8m0fnu): FP4,
    (torch.uint8, torch.float8_e4m3fn): FP4_E4M3,
}
_INVERSE_EXPONENT = 254  # the exponent field of 1/s is 254 minus that of s, a power of two


def group_of(form: str) -> int:
    return ENTRY_GROUP if form == FP4_E4M3 else GROUP


def code_bytes(form: str) -> int:
    """Bytes of one thread's 8 codes."""
    return CHUNK if form == FP8 else CHUNK // 2


@T.macro
def power_of_two_scale(amax, floor, reciprocal, exponent, scale, inverse):
    """Round max(amax, floor) * reciprocal up to a power of two; scale, 1/scale, exponent field.

    Neither the scale nor its inverse is ever subnormal: floors keep exponents in 1 .. 253.
    """
    bits = T.reinterpret(T.max(amax[0], T.float32(floor)) * T.float32(reciprocal), "uint32")
    exponent[0] = T.shift_right(bits + T.uint32(0x7FFFFF), T.uint32(23))
    scale[0] = T.reinterpret(T.shift_left(exponent[0], T.uint32(23)), "float32")
    inverse_exponent = T.uint32(_INVERSE_EXPONENT) - exponent[0]
    inverse[0] = T.reinterpret(T.shift_left(inverse_exponent, T.uint32(23)), "float32")


@T.macro
def fp8_codes(values, codes, exponent, scale):
    """E4M3 codes of a thread's 8 values, and their group's power-of-two scale (4 lanes)."""
    amax = T.alloc_local((1,), "float32")
    inverse = T.alloc_local((1,), "float32")
    group_max(values, amax, 4)
    power_of_two_scale(amax, ACTIVATION_FLOOR, 1.0 / E4M3_MAX, exponent, scale, inverse)
    for i in T.vectorized(CHUNK):
        codes[i] = T.cast(values[i] * inverse[0], "float8_e4m3fn")  # saturates at 448


@T.macro
def round_fp8(values, rounded):
    """Round a thread's 8 float32 values (QA) to 8 bfloat16 ones."""
    codes = T.alloc_local((CHUNK,), "float8_e4m3fn")
    exponent = T.alloc_local((1,), "uint32")
    scale = T.alloc_local((1,), "float32")
    fp8_codes(values, codes, exponent, scale)
    for i in T.vectorized(CHUNK):
        rounded[i] = T.cast(T.cast(codes[i], "float32") * scale[0], "bfloat16")


def _step(magnitude, step, rise, tie_goes_up):
    passed = magnitude >= T.float32(step) if tie_goes_up else magnitude > T.float32(step)
    return T.if_then_else(passed, rise, rise - rise)


def e2m1_code(value):
    """Round a float32 expression to its 4-bit E2M1 code (uint32), ties to the even code."""
    magnitude, one = T.abs(value), T.uint32(1)
    code = T.shift_left(T.shift_right(T.reinterpret(value, "uint32"), T.uint32(31)), T.uint32(3))
    for step, tie_goes_up in ((0.25, False), (0.75, True), (1.25, False), (1.75, True),
                              (2.5, False), (3.5, True), (5.0, False)):  # fmt: skip
        code = code + _step(magnitude, step, one, tie_goes_up)
    return code


def e2m1_value(code):
    """Float32 value of a 4-bit E2M1 code (uint32); negative zero keeps its sign."""
    index = T.cast(code & T.uint32(7), "float32")
    high = T.if_then_else(index < 6, index - 2, 2 * index - 8)
    magnitude = T.if_then_else(index < 4, index * T.float32(0.5), high)
    sign = T.shift_left(code & T.uint32(8), T.uint32(28))
    return T.reinterpret(T.reinterpret(magnitude, "uint32") | sign, "float32")


@T.macro
def fp4_codes(values, codes, exponent, scale):
    """4-bit codes (uint32) of a thread's 8 values, and their group's power-of-two scale."""
    amax = T.alloc_local((1,), "float32")
    inverse = T.alloc_local((1,), "float32")
    scaled = T.alloc_local((1,), "float32")
    group_max(values, amax, 4)
    power_of_two_scale(amax, INDEX_FLOOR, 1.0 / E2M1_MAX, exponent, scale, inverse)
    for i in T.unroll(CHUNK):
        scaled[0] = values[i] * inverse[0]
        codes[i] = e2m1_code(scaled[0])


@T.macro
def round_values_fp4(values, rounded):
    """Round a thread's 8 float32 values (QI) to 8 bfloat16 ones."""
    codes = T.alloc_local((CHUNK,), "uint32")
    exponent = T.alloc_local((1,), "uint32")
    scale = T.alloc_local((1,), "float32")
    fp4_codes(values, codes, exponent, scale)
    for i in T.unroll(CHUNK):
        rounded[i] = T.cast(e2m1_value(codes[i]) * scale[0], "bfloat16")


@T.macro
def fp4_e4m3_codes(values, codes, scale_code):
    """4-bit codes (uint32) of a thread's 8 values, and their group's E4M3 scale (2 lanes)."""
    amax = T.alloc_local((1,), "float32")
    scaled = T.alloc_local((1,), "float32")
    group_max(values, amax, 2)
    scaled[0] = T.ieee_fdiv(T.max(amax[0], T.float32(ENTRY_FLOOR)), T.float32(E2M1_MAX))
    scale_code[0] = T.cast(scaled[0], "float8_e4m3fn")  # saturates at 448
    for i in T.unroll(CHUNK):
        # A quotient beyond 6 (of a saturated scale) has the highest code without a clamp.
        scaled[0] = T.ieee_fdiv(values[i], T.cast(scale_code[0], "float32"))
        codes[i] = e2m1_code(scaled[0])


@T.macro
def pack(codes, packed):
    """Two 4-bit codes a byte, the even element in the low nibble."""
    for i in T.unroll(CHUNK // 2):
        packed[i] = T.cast(codes[2 * i] | T.shift_left(codes[2 * i + 1], T.uint32(4)), "uint8")


@T.macro
def encode(form, values, stored, scale_byte):
    """Code bytes of a thread's 8 values, and the byte of their group's scale."""
    scale = T.alloc_local((1,), "float32")
    exponent = T.alloc_local((1,), "uint32")
    if form == FP8:
        codes = T.alloc_local((CHUNK,), "float8_e4m3fn")
        fp8_codes(values, codes, exponent, scale)
        for i in T.unroll(CHUNK):
            stored[i] = T.reinterpret(codes[i], "uint8")
        scale_byte[0] = T.cast(exponent[0], "uint8")
    elif form == FP4:
        nibbles = T.alloc_local((CHUNK,), "uint32")
        fp4_codes(values, nibbles, exponent, scale)
        pack(nibbles, stored)
        scale_byte[0] = T.cast(exponent[0], "uint8")
    else:
        entry_nibbles = T.alloc_local((CHUNK,), "uint32")
        scale_code = T.alloc_local((1,), "float8_e4m3fn")
        fp4_e4m3_codes(values, entry_nibbles, scale_code)
        pack(entry_nibbles, stored)
        scale_byte[0] = T.reinterpret(scale_code[0], "uint8")


@T.macro
def load_chunk(x, row, column, values):
    """Load 8 bfloat16 values with one access, as float32."""
    raw = T.alloc_local((CHUNK,), "bfloat16")
    for i in T.vectorized(CHUNK):
        raw[i] = x[row, column + i]
    for i in T.vectorized(CHUNK):
        values[i] = T.cast(raw[i], "float32")


def quantise_groups(form: str):
    """x [G, group] to code bytes [G, ...] and scale bytes [G, 1]; G is dynamic."""
    groups, group, size = T.dynamic("groups"), group_of(form), code_bytes(form)
    lanes = group // CHUNK

    @T.prim_func
    def quantise_groups_kernel(
        x: T.Tensor((groups, group), "bfloat16"),
        codes: T.Tensor((groups, lanes * size), "uint8"),
        scales: T.Tensor((groups,), "uint8"),
    ):
        with T.Kernel(T.ceildiv(groups * lanes, FLAT_THREADS), threads=FLAT_THREADS) as block:
            chunk = block * FLAT_THREADS + T.get_thread_binding()
            values = T.alloc_local((CHUNK,), "float32")
            stored = T.alloc_local((size,), "uint8")
            scale_byte = T.alloc_local((1,), "uint8")
            T.clear(values)
            if chunk < groups * lanes:
                load_chunk(x, chunk // lanes, chunk % lanes * CHUNK, values)
            encode(form, values, stored, scale_byte)  # all threads: their lanes exchange maxima
            if chunk < groups * lanes:
                for i in T.vectorized(size):
                    codes[chunk // lanes, chunk % lanes * size + i] = stored[i]
                if chunk % lanes == 0:
                    scales[chunk // lanes] = scale_byte[0]

    return quantise_groups_kernel


def round_groups(form: str):
    """x [G, 32] to its rounded values [G, 32]; form FP8 (QA) or FP4 (QI); G is dynamic."""
    groups, lanes = T.dynamic("groups"), GROUP // CHUNK

    @T.prim_func
    def round_groups_kernel(
        x: T.Tensor((groups, GROUP), "bfloat16"),
        out: T.Tensor((groups, GROUP), "bfloat16"),
    ):
        with T.Kernel(T.ceildiv(groups * lanes, FLAT_THREADS), threads=FLAT_THREADS) as block:
            chunk = block * FLAT_THREADS + T.get_thread_binding()
            values = T.alloc_local((CHUNK,), "float32")
            rounded = T.alloc_local((CHUNK,), "bfloat16")
            T.clear(values)
            if chunk < groups * lanes:
                load_chunk(x, chunk // lanes, chunk % lanes * CHUNK, values)
            if form == FP8:
                round_fp8(values, rounded)
            else:
                round_values_fp4(values, rounded)
            if chunk < groups * lanes:
                for i in T.vectorized(CHUNK):
                    out[chunk // lanes, chunk % lanes * CHUNK + i] = rounded[i]

    return round_groups_kernel


def _grouped(x: Tensor, group: int) -> Tensor:
    """View x [..., d] as groups [G, group]; d must be a multiple of the group."""
    return torch.unflatten(x.contiguous(), -1, (-1, group)).flatten(0, -2)


def _quantise(x: Tensor, form: str, code_dtype: torch.dtype, scale_dtype: torch.dtype) -> Quantised:
    group, size = group_of(form), code_bytes(form)
    lead, width = x.shape[:-1], x.shape[-1]
    codes = torch.empty(*lead, width * size // CHUNK, dtype=torch.uint8, device=x.device)
    scales = torch.empty(*lead, width // group, dtype=torch.uint8, device=x.device)
    if x.numel():
        kernel = compiled(quantise_groups, form)
        kernel(_grouped(x, group), codes.view(-1, group * size // CHUNK),
               scales.view(-1))  # fmt: skip
    return Quantised(codes.view(code_dtype), scales.view(scale_dtype))


def quantise_fp8(x: Tensor) -> Quantised:
    return _quantise(x, FP8, torch.float8_e4m3fn, torch.float8_e8m0fnu)


def quantise_fp4(x: Tensor) -> Quantised:
    return _quantise(x, FP4, torch.uint8, torch.float8_e8m0fnu)


def quantise_fp4_e4m3(x: Tensor) -> Quantised:
    return _quantise(x, FP4_E4M3, torch.uint8, torch.float8_e4m3fn)


def _round(x: Tensor, form: str) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        kernel = compiled(round_groups, form)
        kernel(_grouped(x, GROUP), _grouped(out, GROUP))
    return out


def round_activation(x: Tensor) -> Tensor:
    """QA as values: x [..., d] to bfloat16 [..., d]."""
    return _round(x, FP8)


def round_fp4(x: Tensor) -> Tensor:
    """QI as values: x [..., d] to bfloat16 [..., d]."""
    return _round(x, FP4)


SAMPLES = (
    *(Sample(quantise_groups, (form,)) for form in (FP8, FP4, FP4_E4M3)),
    Sample(round_groups, (FP8,)),
    Sample(round_groups, (FP4,)),
)
