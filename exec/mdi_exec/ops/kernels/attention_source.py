"""CUDA source that decodes cached keys, 16 bytes of codes at a time, into bfloat16.

Both formats come out exactly: an E2M1 or E4M3 number times its scale has at most six significant
bits. Numbers are built in pairs four elements apart (i, i + 4 of every eight), which costs one shift
and mask for two; `order` undoes or redoes that for the query and the output.
"""

KEY_SOURCE = r"""
#include <cuda_bf16.h>
#include <cuda_fp8.h>

namespace mdi {

__device__ __forceinline__ unsigned product(unsigned pair, __nv_bfloat162 factor) {
  __nv_bfloat162 out = __hmul2(*reinterpret_cast<__nv_bfloat162*>(&pair), factor);
  return *reinterpret_cast<unsigned*>(&out);
}

// A bfloat16 power of two, twice.
__device__ __forceinline__ __nv_bfloat162 exponent(unsigned biased) {
  unsigned bits = biased * 0x00800080u;
  return *reinterpret_cast<__nv_bfloat162*>(&bits);
}

// 32 E2M1 codes with two E4M3 scales, one for each 16.
__device__ __forceinline__ void entry_keys(const unsigned char* codes, const unsigned char* scales,
                                           void* keys) {
  const unsigned* words = reinterpret_cast<const unsigned*>(codes);
  unsigned* out = reinterpret_cast<unsigned*>(keys);
  const __nv_bfloat162 lift = exponent(253);  // 2^126: how far too small the placed bits are
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __half_raw half = __nv_cvt_fp8_to_halfraw(scales[i / 2], __NV_E4M3);
    const __nv_bfloat162 scale = __float2bfloat162_rn(__half2float(__half(half)));
    const unsigned w = words[i];
    const unsigned pair[4] = {
        ((w << 12) & 0x80008000u) | ((w << 6) & 0x01C001C0u),
        ((w << 8) & 0x80008000u) | ((w << 2) & 0x01C001C0u),
        ((w << 4) & 0x80008000u) | ((w >> 2) & 0x01C001C0u),
        (w & 0x80008000u) | ((w >> 6) & 0x01C001C0u)};
    #pragma unroll
    for (int j = 0; j < 4; ++j) out[4 * i + j] = product(product(pair[j], lift), scale);
  }
}

// 16 E4M3 codes with one E8M0 scale.
__device__ __forceinline__ void window_keys(const unsigned char* codes, const unsigned char* scales,
                                            void* keys) {
  const unsigned* words = reinterpret_cast<const unsigned*>(codes);
  unsigned* out = reinterpret_cast<unsigned*>(keys);
  const __nv_bfloat162 lift = exponent(247), scale = exponent(scales[0]);  // lift is 2^120
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    #pragma unroll
    for (int j = 0; j < 4; ++j) {
      // Byte j of either word, in the high byte of a half.
      const unsigned w = __byte_perm(words[2 * i], words[2 * i + 1], (j << 4) | ((4 + j) << 12));
      const unsigned pair = (w & 0x80008000u) | ((w & 0x7F007F00u) >> 4);
      out[4 * i + j] = product(product(pair, lift), scale);
    }
  }
}

}  // namespace mdi
"""
