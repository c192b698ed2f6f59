"""CUDA source that turns packed FP8 weight words into bfloat16 tensor-core operands.

A warpgroup's first wgmma operand may lie in registers: thread t of a warp then holds, for rows t/4
and t/4 + 8 of the warp's 16, columns 2(t%4) + {0, 1} of each 8. `ops/packing.py` puts the codes one
thread needs side by side, so that it reads them with one wide load, and places their bits such that
a shift and a mask give two bfloat16 numbers at once, off by a constant power of two. One packed
multiplication by the group's scale corrects that. Every step is exact.

Only sm_90a's register order is known here; other targets decode with `weight_gemm.py`'s own loop.
"""

DECODE_SOURCE = r"""
#include <cuda_bf16.h>

namespace mdi {

__device__ __forceinline__ unsigned times(unsigned pair, unsigned factor) {
  __nv_bfloat162 product = __hmul2(*reinterpret_cast<__nv_bfloat162*>(&pair),
                                   *reinterpret_cast<__nv_bfloat162*>(&factor));
  return *reinterpret_cast<unsigned*>(&product);
}

// Two equal bfloat16 powers of two, 2^(scale + bias - 127), from an E8M0 byte.
__device__ __forceinline__ unsigned power(unsigned scale, unsigned bias) {
  return (scale + bias) * 0x00800080u;
}

__device__ __forceinline__ unsigned fp8_pair(unsigned w) {
  return ((w << 8) & 0x80008000u) | ((w << 4) & 0x07F007F0u);
}

// The eight E4M3 codes of two words as four pairs, 2^-120 times their values.
__device__ __forceinline__ void split_fp8(const unsigned* w, unsigned (&pair)[4]) {
  pair[0] = fp8_pair(w[0]);
  pair[1] = fp8_pair(w[0] >> 8);
  pair[2] = fp8_pair(w[1]);
  pair[3] = fp8_pair(w[1] >> 8);
}

// Fill this thread's part of a [rows, 32 * groups] operand. Each warpgroup has its own rows, in
// blocks of 64.
template <int kRows, int kWarps, int kGroups, int kScaleStride>
__device__ __forceinline__ void decode(const int* words, const unsigned char* scales,
                                       void* operand, int thread) {
  constexpr int kWords = kGroups * 2, kBlocks = kRows / (16 * kWarps);
  const int lane = thread & 31, column = lane & 3;
  unsigned* out = reinterpret_cast<unsigned*>(operand);
  #pragma unroll
  for (int block = 0; block < kBlocks; ++block) {
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = (thread >> 7) * 64 * kBlocks + block * 64 + ((thread & 127) >> 5) * 16 +
                      half * 8 + (lane >> 2);
      const unsigned* from = reinterpret_cast<const unsigned*>(words) + (row * 4 + column) * kWords;
      unsigned w[kWords];
      if constexpr (kWords % 4 == 0) {
        #pragma unroll
        for (int i = 0; i < kWords; i += 4)
          *reinterpret_cast<uint4*>(w + i) = *reinterpret_cast<const uint4*>(from + i);
      } else {
        *reinterpret_cast<uint2*>(w) = *reinterpret_cast<const uint2*>(from);
      }
      #pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        const unsigned by = power(scales[(row >> 5) * kScaleStride + g], 120u);
        unsigned pair[4];
        split_fp8(w + 2 * g, pair);
        #pragma unroll
        for (int p = 0; p < 4; ++p)
          out[((2 * g + p / 2) * kBlocks + block) * 4 + (p % 2) * 2 + half] = times(pair[p], by);
      }
    }
  }
}

}  // namespace mdi
"""
