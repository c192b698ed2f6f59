"""CUDA source of dense bfloat16 products on sm_90a: who loads, who multiplies, who stores.

A block stays on its multiprocessor and takes tiles of 128 rows in turn, so that loading runs on
from tile to tile and no tile begins with an empty ring. One thread copies 64 inputs of rows and
weights a stage; two warpgroups multiply 64 rows each, and store their half of a tile by way of
shared memory, 64 columns at a time, in whole lines. Sums run over K in ascending steps of 16 in one
accumulator: they are those of `gemm.py` bit for bit, whatever the tile. Read next: `dense_gemm.py`.
"""

DENSE_SOURCE = r"""
#include <tl_templates/cuda/instruction/wgmma.h>
#include <tl_templates/cuda/intrin.h>
#include <tl_templates/cuda/barrier.h>
#include <tl_templates/cuda/copy_sm90.h>
#include <tl_templates/cuda/ldsm.h>
#include <cuda_bf16.h>

namespace mdi {

__device__ __forceinline__ void wait(Barrier& barrier, int phase) {
  barrier.wait(phase);
  asm volatile("" ::: "memory");  // nothing the barrier guards is read before
}

__device__ __forceinline__ unsigned pair_of(float first, float second) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<unsigned*>(&pair);
}

// x [rows, kGroups * kInputs] times kGroups weights [kWidth, kInputs]^T, tiles of kColumns.
template <int kWidth, int kInputs, int kGroups, int kColumns, int kStages>
struct Dense {
  static constexpr int kRows = 128, kBytes = 128;  // of a tile; of 64 inputs, or of 64 results
  static constexpr int kSteps = kInputs / 64, kTall = 16;
  static constexpr int kBands = (kWidth + kColumns - 1) / kColumns;
  static constexpr int kPatch = 64 * kBytes;  // 64 x 64 results on their way out

  struct Place {  // in the ring
    int stage = 0, phase;
    __device__ __forceinline__ void advance() {
      if (++stage == kStages) stage = 0, phase ^= 1;
    }
  };

  struct Tile { int row, group, column; };

  // Blocks at work have tiles of few rows and columns: sixteen tiles below each other come first.
  static __device__ __forceinline__ Tile tile(int number, int tall) {
    const int first = number / (kTall * kBands * kGroups) * kTall;
    const int rest = number % (kTall * kBands * kGroups), height = min(kTall, tall - first);
    const int band = rest / height;
    return {(first + rest % height) * kRows, band / kBands, band % kBands * kColumns};
  }

  // One thread copies all tiles' inputs.
  static __device__ __forceinline__ void load(const CUtensorMap& x, const CUtensorMap& w,
                                              Barrier* ready, Barrier* free, void* left,
                                              void* right, int rows) {
    const int tall = (rows + kRows - 1) / kRows;
    Place at{0, 1};
    for (int number = blockIdx.x; number < tall * kBands * kGroups; number += gridDim.x) {
      const Tile to = tile(number, tall);
      #pragma unroll 1
      for (int step = 0; step < kSteps; ++step, at.advance()) {
        wait(free[at.stage], at.phase);
        ready[at.stage].arrive_and_expect_tx((kRows + kColumns) * kBytes);
        tl::tma_load(x, ready[at.stage],
                     static_cast<unsigned char*>(left) + at.stage * (kRows * kBytes),
                     to.group * kInputs + step * 64, to.row);
        tl::tma_load(w, ready[at.stage],
                     static_cast<unsigned char*>(right) + at.stage * (kColumns * kBytes),
                     step * 64, to.group * kWidth + to.column);
      }
    }
  }

  static __device__ __forceinline__ uint64_t descriptor(const void* from) {
    tl::GmmaDescriptor made;
    tl::initialize_wgmma_descriptor<1, 1, 64>(made, static_cast<const unsigned char*>(from));
    return uint64_t(made);
  }

  // A warpgroup multiplies its 64 rows of all tiles.
  static __device__ __forceinline__ void work(const CUtensorMap& out, Barrier* ready, Barrier* free,
                                              const void* left, const void* right, void* patches,
                                              int rows) {
    const int half = threadIdx.x >> 7, tall = (rows + kRows - 1) / kRows;
    const uint64_t a = descriptor(static_cast<const unsigned char*>(left) + half * 64 * kBytes);
    const uint64_t b = descriptor(right);
    unsigned char* patch = static_cast<unsigned char*>(patches) + half * 2 * kPatch;
    Place at{0, 0};
    for (int number = blockIdx.x; number < tall * kBands * kGroups; number += gridDim.x) {
      const Tile to = tile(number, tall);
      float sums[kColumns / 2];
      int before = 0;
      #pragma unroll 1
      for (int step = 0; step < kSteps; ++step, at.advance()) {
        wait(ready[at.stage], at.phase);
        tl::warpgroup_fence_operand(sums, kColumns / 2);
        tl::warpgroup_arrive();
        #pragma unroll
        for (int part = 0; part < 4; ++part)
          tl::wgmma_ss<tl::DataType::kBFloat16, tl::DataType::kBFloat16, tl::DataType::kFloat32, 64,
                       kColumns, 16, false, false, 1, 1>(
              a + (at.stage * (kRows * kBytes) >> 4) + part * 2,
              b + (at.stage * (kColumns * kBytes) >> 4) + part * 2,
              reinterpret_cast<uint32_t*>(sums), step + part > 0);
        tl::warpgroup_commit_batch();
        tl::warpgroup_fence_operand(sums, kColumns / 2);
        tl::warpgroup_wait<1>();
        if (step > 0 && (threadIdx.x & 31) == 0) free[before].arrive();
        before = at.stage;
      }
      tl::warpgroup_wait<0>();
      tl::warpgroup_fence_operand(sums, kColumns / 2);
      if ((threadIdx.x & 31) == 0) free[before].arrive();
      #pragma unroll
      for (int at_column = 0; at_column < kColumns; at_column += 64)
        if (to.column + at_column < kWidth)
          store(out, sums + at_column / 2, patch + at_column / 64 % 2 * kPatch, half,
                to.group * kWidth + to.column + at_column, to.row + half * 64);
    }
    if ((threadIdx.x & 127) == 0) tl::tma_store_wait<0>();
  }

  // Store 64 columns by way of a patch of shared memory; the one before may still be on its way.
  static __device__ __forceinline__ void store(const CUtensorMap& out, const float* sums,
                                               unsigned char* patch, int half, int column,
                                               int row) {
    const bool leads = (threadIdx.x & 127) == 0;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5 & 3;
    if (leads) tl::tma_store_wait<1>();
    together(half);
    // Four 8 x 8 matrices: two of rows, two of columns; 16-byte pieces change places by row.
    const int own_row = warp * 16 + (lane & 15);
    #pragma unroll
    for (int piece = 0; piece < 8; piece += 2) {
      const float* sum = sums + 4 * piece;
      tl::ptx_stmatrix_x4(patch + own_row * kBytes + ((piece + (lane >> 4)) ^ (own_row & 7)) * 16,
                          pair_of(sum[0], sum[1]), pair_of(sum[2], sum[3]),
                          pair_of(sum[4], sum[5]), pair_of(sum[6], sum[7]));
    }
    tl::fence_proxy_async();
    together(half);
    if (leads) {
      tl::tma_store(out, patch, column, row);
      tl::tma_store_arrive();
    }
  }

  static __device__ __forceinline__ void together(int half) {
    asm volatile("bar.sync %0, 128;" ::"r"(half + 1) : "memory");
  }
};

}  // namespace mdi
"""
