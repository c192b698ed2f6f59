"""CUDA source that decodes cached keys, 16 bytes of codes at a time, into bfloat16.

Both formats come out exactly: an E2M1 or E4M3 number times its scale has at most six significant
bits. All keys are a power of two smaller than they should be, which keeps every factor in range;
the kernel multiplies scores and output back. Numbers are built in pairs four elements apart (i,
i + 4 of every eight), which takes one shift or multiplication for two; the kernel orders queries
likewise and puts the output in its usual order again.
"""

POWER_SOURCE = r"""
namespace mdi {

// A power of two; below 2^-126 it is zero.
__device__ __forceinline__ float power(float x) {
  float out;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(out) : "f"(x));
  return out;
}

}  // namespace mdi
"""

KEY_SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp8.h>

namespace mdi {

__device__ __forceinline__ unsigned product(__nv_bfloat162 pair, __nv_bfloat162 factor) {
  __nv_bfloat162 out = __hmul2(pair, factor);
  return *reinterpret_cast<unsigned*>(&out);
}

__device__ __forceinline__ unsigned product(unsigned pair, __nv_bfloat162 factor) {
  return product(*reinterpret_cast<__nv_bfloat162*>(&pair), factor);
}

// A bfloat16 power of two, twice.
__device__ __forceinline__ __nv_bfloat162 exponent(unsigned biased) {
  unsigned bits = biased * 0x00800080u;
  return *reinterpret_cast<__nv_bfloat162*>(&bits);
}

// 32 E2M1 codes with two E4M3 scales, one for each 16; keys come out kShift powers of two smaller.
template <int kShift>
__device__ __forceinline__ void entry_keys(const unsigned char* codes, const unsigned char* scales,
                                           void* keys) {
  const unsigned* words = reinterpret_cast<const unsigned*>(codes);
  unsigned* out = reinterpret_cast<unsigned*>(keys);
  // Bits stand 2^126 too small. With the shift, this times any scale (448 at most) is in range.
  const __nv_bfloat162 lift = exponent(253 - kShift);
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __half_raw half = __nv_cvt_fp8_to_halfraw(scales[i / 2], __NV_E4M3);
    const __nv_bfloat162 factor =
        __hmul2(__float2bfloat162_rn(__half2float(__half(half))), lift);
    // Multiplying copies a code to two places, which takes turns with masking on another unit.
    const unsigned low = words[i], high = low >> 8;
    out[4 * i + 0] = product(((low & 0x000F000Fu) * 0x1040u) & 0x81C081C0u, factor);
    out[4 * i + 1] = product(((low & 0x00F000F0u) * 0x0104u) & 0x81C081C0u, factor);
    out[4 * i + 2] = product(((high & 0x000F000Fu) * 0x1040u) & 0x81C081C0u, factor);
    out[4 * i + 3] = product(((high & 0x00F000F0u) * 0x0104u) & 0x81C081C0u, factor);
  }
}

// 16 E4M3 codes with one E8M0 scale; keys come out kShift powers of two smaller.
template <int kShift>
__device__ __forceinline__ void window_keys(const unsigned char* codes, const unsigned char* scales,
                                            void* keys) {
  const unsigned* words = reinterpret_cast<const unsigned*>(codes);
  unsigned* out = reinterpret_cast<unsigned*>(keys);
  const __nv_bfloat162 lift = exponent(247 - kShift), scale = exponent(scales[0]);  // 2^120
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      // Byte j of either word, in the high byte of a half.
      const unsigned w = __byte_perm(words[2 * i], words[2 * i + 1], (j << 4) | ((4 + j) << 12));
      const unsigned pair = (w & 0x80008000u) | ((w & 0x7F007F00u) >> 4);
      out[4 * i + j] = product(__hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair), lift),
                               scale);
    }
  }
}

}  // namespace mdi
"""
