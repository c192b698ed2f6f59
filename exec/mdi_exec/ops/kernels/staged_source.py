"""CUDA source of staged attention: what moves keys, queries and outputs, and the softmax.

Lines of shared memory lie in panels of 64 columns, whose 16-byte chunks are swizzled as the tensor
core expects. Of an accumulator's row four lanes hold two neighbouring values of every eight each.
"""

STAGED_SOURCE = r"""
#include <cuda_bf16.h>

namespace mdi {

// Word i of lane j becomes word j of lane i, among four neighbouring lanes.
__device__ __forceinline__ void turn_quad(unsigned (&words)[4]) {
  const bool is_upper = threadIdx.x & 2, is_odd = threadIdx.x & 1;
  #pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned found = __shfl_xor_sync(~0u, is_upper ? words[i] : words[i + 2], 2);
    if (is_upper) words[i] = found; else words[i + 2] = found;
  }
  #pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const unsigned found = __shfl_xor_sync(~0u, is_odd ? words[i] : words[i + 1], 1);
    if (is_odd) words[i] = found; else words[i + 1] = found;
  }
}

// Loads the left operand of a product, 16 columns a step, from panels of 64 swizzled lines.
template <int kSteps, int kPanel>
__device__ __forceinline__ void load_operand(const void* lines, void* operand) {
  unsigned* out = reinterpret_cast<unsigned*>(operand);
  const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(lines));
  const int line = threadIdx.x / 32 * 16 + threadIdx.x % 16, upper = threadIdx.x % 32 / 16;
  const int swizzle = kPanel == 64 ? line % 8 : line / 2 % 4;
  #pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int chunk = step * 2 % (kPanel / 8) + upper;
    const unsigned address = from + step * 16 / kPanel * kPanel * 128 + line * kPanel * 2 +
                             (chunk ^ swizzle) * 16;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[4 * step]), "=r"(out[4 * step + 1]), "=r"(out[4 * step + 2]),
                   "=r"(out[4 * step + 3])
                 : "r"(address));
  }
}

// Starts copying this thread's part of a row into a line of swizzled panels; zeros if it is not
// there. Eight threads copy a line, 16 bytes of each panel.
template <int kPanels, int kPanel>
__device__ __forceinline__ void copy_line(const void* row, const void* lines, int line,
                                          bool is_there) {
  const int chunk = threadIdx.x % 8;
  const int swizzle = kPanel == 64 ? line % 8 : line / 2 % 4;
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(lines)) + line * kPanel * 2 +
                      (chunk ^ swizzle) * 16;
  const char* from = static_cast<const char*>(row) + chunk * 16;
  if (kPanel == 64 || chunk < kPanel / 8) {
    #pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                   :: "r"(to + panel * kPanel * 128), "l"(from + panel * kPanel * 2),
                      "r"(is_there ? 16 : 0)
                   : "memory");
    }
  }
}

// Makes probabilities, relative to the highest score so far, of a thread's scores of two heads, 16
// each. `chances` are rounded pairs of them; `sums`, which are not rounded, are still to be added
// up over the four threads of a row. The arithmetic is that of `attention_softmax.py` in the same
// order, but no instruction waits long for another.
__device__ __forceinline__ void soften(float* scores, float scale, float* top, float* fade,
                                       float* sums, void* chances) {
  float high[2];
  #pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float higher = fmaxf(scores[2 * i], scores[2 * i + 1]);
    high[i % 2] = i < 2 ? higher : fmaxf(high[i % 2], higher);
  }
  #pragma unroll
  for (int lane = 2; lane > 0; lane /= 2) {
    #pragma unroll
    for (int row = 0; row < 2; ++row) {
      high[row] = fmaxf(high[row], __shfl_xor_sync(~0u, high[row], lane));
    }
  }
  fade[0] = fade[1] = 1;
  // Also keeps the compiler from turning to the second row when it is through with the first.
  if (__any_sync(~0u, high[0] > top[0] || high[1] > top[1])) {
    #pragma unroll
    for (int row = 0; row < 2; ++row) {
      const float old = top[row];
      top[row] = fmaxf(old, high[row]);
      fade[row] = power((old - top[row]) * scale);
    }
  }
  const float low[2] = {-top[0] * scale, -top[1] * scale};
  __nv_bfloat162* pairs = reinterpret_cast<__nv_bfloat162*>(chances);
  #pragma unroll
  for (int i = 0; i < 16; ++i) {
    scores[2 * i] = power(fmaf(scores[2 * i], scale, low[i % 2]));
    scores[2 * i + 1] = power(fmaf(scores[2 * i + 1], scale, low[i % 2]));
    pairs[i] = __floats2bfloat162_rn(scores[2 * i], scores[2 * i + 1]);
  }
  sums[0] = sums[1] = 0;
  #pragma unroll
  for (int e = 0; e < 2; ++e) {
    #pragma unroll
    for (int i = 0; i < 16; ++i) sums[i % 2] += scores[2 * i + e];
  }
}

// Adds a block's sums to the totals.
__device__ __forceinline__ void add_sums(const float* sums, const float* fade, float* total) {
  #pragma unroll
  for (int row = 0; row < 2; ++row) {
    float sum = sums[row] + __shfl_xor_sync(~0u, sums[row], 2);
    sum += __shfl_xor_sync(~0u, sum, 1);
    total[row] = fmaf(total[row], fade[row], sum);
  }
}

// Stores a 64 x 64 left operand into swizzled lines.
__device__ __forceinline__ void store_operand(const void* operand, void* lines) {
  const unsigned* words = reinterpret_cast<const unsigned*>(operand);
  const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(lines));
  const int line = threadIdx.x / 32 * 16 + threadIdx.x % 16, upper = threadIdx.x % 32 / 16;
  #pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
                 :: "r"(to + line * 128 + ((2 * i + upper) ^ line % 8) * 16), "r"(words[4 * i]),
                    "r"(words[4 * i + 1]), "r"(words[4 * i + 2]), "r"(words[4 * i + 3])
                 : "memory");
  }
}

// Writes this thread's two rows, eight apart, times a factor each; `count` of the eight exist.
template <int kChunks>
__device__ __forceinline__ void store_rows(const float* sums, const float* factor, void* row,
                                           int stride, int count) {
  uint4* to = reinterpret_cast<uint4*>(row) + threadIdx.x % 4;
  #pragma unroll
  for (int half = 0; half < 2; ++half) {
    #pragma unroll
    for (int i = 0; i < kChunks; i += 4) {
      unsigned words[4];
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float* pair = sums + (i + j) * 4 + half * 2;
        const __nv_bfloat162 both =
            __floats2bfloat162_rn(pair[0] * factor[half], pair[1] * factor[half]);
        words[j] = *reinterpret_cast<const unsigned*>(&both);
      }
      turn_quad(words);
      if (half * 8 < count) {
        __stcs(to + half * stride + i, make_uint4(words[0], words[1], words[2], words[3]));
      }
    }
  }
}

}  // namespace mdi
"""
