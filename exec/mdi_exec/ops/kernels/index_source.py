"""CUDA source of index scores on FP8 tensor cores, sm_90a: keys decoded straight into operands.

E2M1 times any of 15 powers of two in a row is an E4M3 number. So a vector's four scales become one,
that of its largest group, and the codes of other groups take up the difference: exactly, unless a
group lies more than 14 octaves below, which then counts as zero. That is less than 2^-14 of the
vector's largest value. Products are exact in the tensor core, whose accumulator keeps 13 bits below
the leading one; it starts anew with every key, after 128 inputs. Where a vector's groups lie within
an octave or two of one another, as they mostly do, that too is exact.

Keys are the 64 rows of a product, its left operand, and come from memory through registers. Lane c
of four owns a quarter of two neighbouring keys, so eight keys are 512 bytes in one piece. Word j of
every quarter, 32 codes, is step j of the product; queries are stored in the same order of columns.

Dot products become bfloat16, as in the reference, and are the left operand of a second product:
with the head weights, which sums over heads. No lane needs another's numbers. Read next:
`index_scores.py`.
"""

INDEX_SOURCE = r"""
#include <tl_templates/cuda/instruction/wgmma.h>
#include <tl_templates/cuda/intrin.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>

namespace mdi {

constexpr int kTop = 15;   // a vector's largest scale; 1 is 2^-14 of it, 0 is zero
constexpr int kShift = 6;  // a key's codes are 2^6 too large

// The eight magnitudes at every scale: two words of four E4M3 codes each.
__device__ __forceinline__ void make_table(uint2* table) {
  if (threadIdx.x <= kTop) {
    unsigned words[2] = {0, 0};
    const unsigned exponent = threadIdx.x ? 127 - kTop + kShift + threadIdx.x : 0;
    #pragma unroll
    for (int code = 0; code < 8; ++code) {
      const float value = code < 2 ? code * 0.5f : (1 + code % 2 * 0.5f) * (1 << (code / 2 - 1));
      const float scaled = value * __uint_as_float(exponent << 23);
      words[code / 4] |= unsigned(__nv_cvt_float_to_fp8(scaled, __NV_SATFINITE, __NV_E4M3))
                         << code % 4 * 8;
    }
    table[threadIdx.x] = make_uint2(words[0], words[1]);
  }
}

// Look four codes without signs up. `__byte_perm` would mask them once more.
__device__ __forceinline__ unsigned look_up(uint2 table, unsigned codes) {
  unsigned found;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(found) : "r"(table.x), "r"(table.y), "r"(codes));
  return found;
}

// Queries that are multiplied at once; registers hold no more products.
template <int kQueries>
constexpr int kGroupOf = kQueries < 4 ? 1 : 4;

template <int kHeads, int kWidth, int kQueries>
struct Queries {
  static constexpr int kWords = kWidth / 32, kVectors = kQueries * kHeads;
  static constexpr int kGroup = kGroupOf<kQueries>;

  // Fold one query's head, a quarter of it in each of four lanes, into a line of 128 bytes.
  static __device__ __forceinline__ float fold(const __nv_bfloat16* vector, unsigned char* lines,
                                               int line) {
    const int quarter = threadIdx.x % 4;
    float values[kWidth / 4], largest = 0;
    #pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint4 eight = __ldg(reinterpret_cast<const uint4*>(vector) + quarter * kWords + i);
      const unsigned pairs[4] = {eight.x, eight.y, eight.z, eight.w};
      #pragma unroll
      for (int j = 0; j < 4; ++j) {
        values[8 * i + 2 * j] = __uint_as_float(pairs[j] << 16);
        values[8 * i + 2 * j + 1] = __uint_as_float(pairs[j] & 0xFFFF0000u);
      }
    }
    for (float value : values) largest = fmaxf(largest, fabsf(value));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
    // The largest value becomes 256 or 384.
    const int exponent = max(int(__float_as_uint(largest) >> 23), 9);
    const float inverse = __uint_as_float((262 - exponent) << 23);
    #pragma unroll
    for (int i = 0; i < 2 * kWords; ++i) {
      unsigned codes = 0;
      #pragma unroll
      for (int j = 0; j < 4; j += 2) {
        const float* from = values + 4 * i + j;
        const float2 pair = make_float2(from[0] * inverse, from[1] * inverse);
        codes |= unsigned(__nv_cvt_float2_to_fp8x2(pair, __NV_SATFINITE, __NV_E4M3)) << 8 * j;
      }
      unsigned char* to = lines + line * 128 + (i ^ line % 8) * 16 + quarter * 4;
      *reinterpret_cast<unsigned*>(to) = codes;
    }
    return __uint_as_float((exponent - 8) << 23);
  }

  // Fold a tile's queries. Their scales go into the head weights, which are the right operand of a
  // product of their own: query i of a group has column 2i, the other columns stay zero.
  static __device__ __forceinline__ void load(const __nv_bfloat16* q, const __nv_bfloat16* by_head,
                                              int count, unsigned char* lines,
                                              __nv_bfloat16* weights) {
    for (int i = threadIdx.x; i < kVectors / kGroup * 8; i += blockDim.x)
      weights[i] = __float2bfloat16_rn(0);
    __syncthreads();
    for (int line = threadIdx.x / 4; line < kVectors; line += blockDim.x / 4) {
      const int query = min(line / kHeads, count - 1), head = line % kHeads;
      const int vector = query * kHeads + head;
      const float scale = fold(q + vector * kWidth, lines, line);
      if (threadIdx.x % 4 == 0) {
        const int group = line / kHeads / kGroup, column = line / kHeads % kGroup * 2;
        const int lane = column * 4 + head % 8 / 2;
        weights[((group * 32 + lane) * (kHeads / 8) + head / 8) * 2 + head % 2] =
            __float2bfloat16_rn(__bfloat162float(by_head[vector]) * scale);
      }
    }
  }
};

// Keys as the left operand of a product, and their scales.
template <int kWords>
struct Operand {
  unsigned a[kWords][4];
  float scale[2];
};

// Where keys stand: entry e of a sequence is row table[e / kPerBlock] * kPerBlock + e % kPerBlock.
// With kListed, columns are entries of `listed` blocks of so many.
template <int kWidth, int kPerBlock, int kListed>
struct Keys {
  static constexpr int kWords = kWidth / 32;
  const unsigned char *codes, *scales;  // this lane's quarter of row 0
  const int *table, *listed;
  unsigned last;                // column
  unsigned id, entry, block;    // looked up one and two steps ahead, so that nothing waits
  unsigned words[2][kWords];    // of two neighbouring keys
  int by[2];

  __device__ __forceinline__ unsigned inside(unsigned column) const { return min(column, last); }
  __device__ __forceinline__ void find_listed(unsigned column) {
    if constexpr (kListed > 0) id = __ldg(listed + inside(column) / kListed);
  }
  __device__ __forceinline__ void find_block(unsigned column) {
    entry = inside(column);
    if constexpr (kListed > 0) entry = id * kListed + entry % kListed;
    block = __ldg(table + entry / kPerBlock);
  }
  __device__ __forceinline__ void load() {
    const size_t row = block * kPerBlock + entry % kPerBlock;
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      const unsigned char* from = codes + row * (kWidth / 2) + half * (kWidth / 2);
      if constexpr (kWords == 4) {
        *reinterpret_cast<uint4*>(words[half]) = __ldg(reinterpret_cast<const uint4*>(from));
      } else {
        #pragma unroll
        for (int i = 0; i < kWords; ++i)
          words[half][i] = __ldg(reinterpret_cast<const unsigned*>(from) + i);
      }
      by[half] = __ldg(scales + row * kWords + half * kWords);
    }
  }

  // The two keys as an operand, and their scales.
  __device__ __forceinline__ void decode(const uint2* magnitudes, Operand<kWords>& to) const {
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      int top = max(by[half], __shfl_xor_sync(~0u, by[half], 2));
      top = max(top, __shfl_xor_sync(~0u, top, 1));
      to.scale[half] = __int_as_float(max(top - kShift, 0) << 23);
      const uint2 table = magnitudes[max(by[half] - top + kTop, 0)];
      #pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const unsigned word = words[half][i], which = word & 0x77777777u, odd = word << 4;
        const unsigned signs[2] = {__byte_perm(odd, word, 0x5140), __byte_perm(odd, word, 0x7362)};
        to.a[i][half] = look_up(table, which) | (signs[0] & 0x80808080u);
        to.a[i][2 + half] = look_up(table, which >> 16) | (signs[1] & 0x80808080u);
      }
    }
  }
};

// Multiply keys with kColumns of the queries' heads.
template <int kColumns, int kWords>
__device__ __forceinline__ void multiply(Operand<kWords>& keys, uint64_t lines, float* dots) {
  tl::warpgroup_fence_operand(reinterpret_cast<uint32_t*>(&keys.a[0][0]), 4 * kWords);
  tl::warpgroup_fence_operand(dots, kColumns / 2);
  tl::warpgroup_arrive();
  #pragma unroll
  for (int step = 0; step < kWords; ++step)
    tl::wgmma_rs<tl::DataType::kFloat8_e4m3, tl::DataType::kFloat8_e4m3, tl::DataType::kFloat32, 64,
                 kColumns, 32, false, false, 1, 1>(
        keys.a[step], lines + step * 2, reinterpret_cast<uint32_t*>(dots), step > 0);
  tl::warpgroup_commit_batch();
  tl::warpgroup_wait<0>();
  tl::warpgroup_fence_operand(dots, kColumns / 2);
}

// ReLU of two dot products, rounded as the reference rounds them; `first` in the lower half.
__device__ __forceinline__ unsigned relu_pair(float first, float second) {
  unsigned pair;
  asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

// Sum one query's heads, weighted, for a warp's 16 keys. Sums lie as dot products do.
template <int kHeads>
__device__ __forceinline__ void sum_heads(const float* dots, const unsigned (&by)[kHeads / 8],
                                          float (&sums)[4]) {
  #pragma unroll
  for (int i = 0; i < 4; ++i) sums[i] = 0;
  #pragma unroll
  for (int i = 0; i < kHeads / 8; i += 2) {
    const float* four = dots + 4 * i;
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(relu_pair(four[0], four[1])), "r"(relu_pair(four[2], four[3])),
          "r"(relu_pair(four[4], four[5])), "r"(relu_pair(four[6], four[7])), "r"(by[i]),
          "r"(by[i + 1]));
  }
}

// A group's scores of a thread's two keys; lane i of four has those of query i.
template <int kHeads, int kGroup>
__device__ __forceinline__ float2 group_scores(const float* dots, const void* weights) {
  unsigned by[kHeads / 8];
  float sums[kGroup][4];
  const unsigned* from = static_cast<const unsigned*>(weights) + threadIdx.x % 32 * (kHeads / 8);
  #pragma unroll
  for (int i = 0; i < kHeads / 8; ++i) by[i] = from[i];
  #pragma unroll
  for (int query = 0; query < kGroup; ++query)
    sum_heads<kHeads>(dots + query * (kHeads / 2), by, sums[query]);
  float2 found = make_float2(sums[0][0], sums[0][2]);
  #pragma unroll
  for (int query = 1; query < kGroup; ++query)
    if (threadIdx.x % 4 == query) found = make_float2(sums[query][0], sums[query][2]);
  return found;
}

// Score a tile: `count` queries that share keys, against every `splits`-th step from `split` on.
template <int kHeads, int kWidth, int kQueries, int kPerBlock, int kListed, int kWarpgroups>
__device__ __forceinline__ void score_tile(const void* q, const void* by_head, const void* codes,
                                           const void* scales, const void* table,
                                           const void* listed, void* scores, int pitch, int count,
                                           int limit, int split, int splits, void* lines,
                                           void* weights, void* magnitudes) {
  constexpr int kWords = kWidth / 32, kStep = 64 * kWarpgroups, kGroup = kGroupOf<kQueries>;
  constexpr int kColumns = kGroup * kHeads;
  static_assert(kWidth <= 128, "a lane's quarter of a key has one scale");
  static_assert(kHeads % 16 == 0, "heads are summed sixteen at a time");
  static_assert(kPerBlock % 2 == 0 && kListed % 2 == 0, "a lane has two keys side by side");
  uint2* const magnitude_table = static_cast<uint2*>(magnitudes);
  make_table(magnitude_table);
  Queries<kHeads, kWidth, kQueries>::load(
      static_cast<const __nv_bfloat16*>(q), static_cast<const __nv_bfloat16*>(by_head), count,
      static_cast<unsigned char*>(lines), static_cast<__nv_bfloat16*>(weights));
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the tensor core reads these
  __syncthreads();
  tl::GmmaDescriptor descriptor;
  tl::initialize_wgmma_descriptor<1, 1, 64>(descriptor, static_cast<unsigned char*>(lines));
  const int stride = kStep * splits, quarter = threadIdx.x % 4;
  int column = split * kStep + threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4 * 2;
  __nv_bfloat16* const to = static_cast<__nv_bfloat16*>(scores) + long(quarter) * pitch;
  Keys<kWidth, kPerBlock, kListed> keys{
      static_cast<const unsigned char*>(codes) + quarter * (kWidth / 8),
      static_cast<const unsigned char*>(scales) + quarter * kWords / 4,
      static_cast<const int*>(table), static_cast<const int*>(listed),
      (max(limit, 1) - 1u) & ~1u};
  keys.find_listed(column);
  keys.find_block(column);
  keys.load();
  keys.find_listed(column + stride);
  keys.find_block(column + stride);
  keys.find_listed(column + 2 * stride);
  #pragma unroll 1
  for (int base = split * kStep; base < limit; base += stride, column += stride) {
    Operand<kWords> operand;
    keys.decode(magnitude_table, operand);
    keys.load();
    keys.find_block(column + 2 * stride);
    keys.find_listed(column + 3 * stride);
    #pragma unroll 1
    for (int first = 0; first < (kQueries > kGroup ? count : 1); first += kGroup) {
      float dots[kColumns / 2];
      multiply<kColumns>(operand, uint64_t(descriptor) + (first * kHeads * 128 >> 4), dots);
      const float2 pair = group_scores<kHeads, kGroup>(
          dots, static_cast<const unsigned*>(weights) + first / kGroup * 32 * (kHeads / 8));
      if (quarter < min(count - first, kGroup) && column < limit)
        *reinterpret_cast<__nv_bfloat162*>(to + long(first) * pitch + column) =
            __floats2bfloat162_rn(pair.x * operand.scale[0], pair.y * operand.scale[1]);
    }
  }
}

}  // namespace mdi
"""
