"""CUDA source that loads packed FP4 index keys and decodes them into tensor-core operands.

A thread owns a quarter of a key's codes for two of its warp's rows. Codes are paired four apart (i,
i + 4 of every eight), so the operand's column order is a permutation of the key's;
`index_scores.py` stores the queries in the same order, which leaves every dot product as it was.
"""

INDEX_SOURCE = r"""
#include <cuda_bf16.h>

namespace mdi {

__device__ __forceinline__ unsigned scaled(unsigned pair, unsigned factor) {
  const unsigned lift = 253u * 0x00800080u;  // 2^126: how far too small the placed bits are
  __nv_bfloat162 out = __hmul2(__hmul2(*reinterpret_cast<const __nv_bfloat162*>(&pair),
                                       *reinterpret_cast<const __nv_bfloat162*>(&lift)),
                               *reinterpret_cast<const __nv_bfloat162*>(&factor));
  return *reinterpret_cast<unsigned*>(&out);
}

// Codes and scale of this thread's quarter of a key: kWidth / 32 words, then the scale.
template <int kWidth>
__device__ __forceinline__ void load_quarter(const unsigned char* codes,
                                             const unsigned char* scales, int quarter, int* raw) {
  constexpr int kWords = kWidth / 32;
  const unsigned* from = reinterpret_cast<const unsigned*>(codes) + quarter * kWords;
  if constexpr (kWords == 4) {
    *reinterpret_cast<uint4*>(raw) = __ldg(reinterpret_cast<const uint4*>(from));
  } else {
    #pragma unroll
    for (int i = 0; i < kWords; ++i) raw[i] = __ldg(from + i);
  }
  raw[kWords] = scales[quarter * kWords / 4];
}

// Two rows' quarters (`raw` as loaded above, one after the other) into the thread's operand.
template <int kWidth>
__device__ __forceinline__ void decode_quarters(const int* raw, void* operand) {
  constexpr int kWords = kWidth / 32;
  unsigned* out = reinterpret_cast<unsigned*>(operand);
  #pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int* mine = raw + half * (kWords + 1);
    const unsigned factor = static_cast<unsigned>(mine[kWords]) * 0x00800080u;
    #pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const unsigned low = mine[i], high = low >> 8;
      const unsigned pair[4] = {((low & 0x000F000Fu) * 0x1040u) & 0x81C081C0u,
                                ((low & 0x00F000F0u) * 0x0104u) & 0x81C081C0u,
                                ((high & 0x000F000Fu) * 0x1040u) & 0x81C081C0u,
                                ((high & 0x00F000F0u) * 0x0104u) & 0x81C081C0u};
      #pragma unroll
      for (int j = 0; j < 4; ++j) out[(4 * i + j) * 2 + half] = scaled(pair[j], factor);
    }
  }
}

}  // namespace mdi
"""
