"""CUDA source of the experts' products on sm_90a: who loads, who multiplies, and in which order.

A block stays on its multiprocessor and takes *items*, one band of 256 weight rows by one tile of
tokens, from a queue in memory, so that no block waits for another's larger experts. One warp takes
items and loads their weights, a second loads tokens; four warpgroups decode 64 weight rows each and
multiply. They share a ring of stages, one block of inputs each, which runs on from item to item.
While one warpgroup waits for its product the others decode: four of them are what hides both.

Weights are the left operand, from registers: thread t of a warp holds, for two of the warp's 16
rows, columns 2(t%4) + {0, 1} of each 8. `ops/packing.py` puts the codes one thread needs side by
side, and their bits such that a shift and a mask give two bfloat16 numbers, off by a constant power
of two; one packed multiplication by the group's scale corrects that, exactly. Sums run over K in
ascending steps of 16, so a row's bits do not depend on its tile. Read next: `expert_gemm.py`.
"""

EXPERT_SOURCE = r"""
#include <tl_templates/cuda/instruction/wgmma.h>
#include <tl_templates/cuda/intrin.h>
#include <tl_templates/cuda/barrier.h>
#include <tl_templates/cuda/copy_sm90.h>
#include <cuda_bf16.h>

namespace mdi {

constexpr int kBand = 256;  // weight rows of an item
constexpr int kBox = 16;    // tokens of one copy

struct Item { int band, start, rows, expert; };  // a negative band: there is no more work

__device__ __forceinline__ bool is_first_lane() { return (threadIdx.x & 31) == 0; }

__device__ __forceinline__ void wait(Barrier& barrier, int phase) {
  barrier.wait(phase);
  asm volatile("" ::: "memory");  // nothing the barrier guards is read before
}

// Ask for the next item; the first lane gets the answer, `told` gives it to all.
__device__ __forceinline__ int ask(int* queue) { return is_first_lane() ? atomicAdd(queue, 1) : 0; }
__device__ __forceinline__ int told(int item) { return __shfl_sync(0xFFFFFFFFu, item, 0); }

// The last block to leave empties the queue for the next launch.
__device__ __forceinline__ void leave(int* queue, int blocks) {
  if (is_first_lane() && atomicAdd(queue + 1, 1) == blocks - 1) queue[0] = queue[1] = 0;
}

__device__ __forceinline__ void tell(void* slot, int band, int start, int rows, int expert,
                                     Barrier& told) {
  *static_cast<int4*>(slot) = make_int4(band, start, rows, expert);
  asm volatile("" ::: "memory");
  told.arrive();
}

// Read the item of this turn, and give its slot back.
__device__ __forceinline__ Item hear(const void* items, Barrier* told, Barrier* heard, int turn) {
  const int slot = turn & 1;
  wait(told[slot], turn >> 1 & 1);
  const int4 item = static_cast<const int4*>(items)[slot];
  __syncwarp();
  if (is_first_lane()) heard[slot].arrive();
  return {item.x, item.y, item.z, item.w};
}

template <int kStages>
struct Place {  // in the ring
  int stage = 0, phase;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) stage = 0, phase ^= 1;
  }
};

// Load all items' tokens: rows of 128 bytes, kParts of them for each block of inputs.
template <int kStages, int kTile, int kParts, int kBlocks>
__device__ __forceinline__ void load_tokens(const CUtensorMap& x, Barrier* ready, Barrier* free,
                                            Barrier* told, Barrier* heard, const void* items,
                                            void* tokens) {
  constexpr int kPartBytes = kTile * 128, kRowInputs = 128 / kParts;
  const bool leads = cute::elect_one_sync();
  Place<kStages> at{0, 1};
  for (int turn = 0;; ++turn) {
    const Item item = hear(items, told, heard, turn);
    if (item.band < 0) return;
    const int boxes = (item.rows + kBox - 1) / kBox;
    #pragma unroll 1
    for (int block = 0; block < kBlocks; ++block, at.advance()) {
      wait(free[at.stage], at.phase);
      if (!leads) continue;
      ready[at.stage].arrive_and_expect_tx(boxes * (kParts * kBox * 128));
      unsigned char* to = static_cast<unsigned char*>(tokens) + at.stage * (kParts * kPartBytes);
      #pragma unroll 1
      for (int box = 0; box < boxes; ++box, to += kBox * 128)
        #pragma unroll
        for (int part = 0; part < kParts; ++part)
          tl::tma_load(x, ready[at.stage], to + part * kPartBytes,
                       (block * kParts + part) * kRowInputs, item.start + box * kBox);
    }
  }
}

// Load an item's codes, 64 bytes a row and block of inputs, and the 4 bytes of their scales.
template <int kStages, int kBlocks>
__device__ __forceinline__ void load_weights(Barrier* ready, Barrier* free, void* codes,
                                             void* scales, const void* all_codes,
                                             const void* all_scales, int expert, int n, int first,
                                             int rows, int& stage, int& phase) {
  const size_t row = static_cast<size_t>(expert) * kBlocks * n + first;
  const unsigned char* from = static_cast<const unsigned char*>(all_codes) + row * 64;
  const unsigned char* by = static_cast<const unsigned char*>(all_scales) + row * 4;
  const bool leads = cute::elect_one_sync();
  Place<kStages> at{stage, phase};
  #pragma unroll 1
  for (int block = 0; block < kBlocks; ++block, at.advance()) {
    wait(free[at.stage], at.phase);
    if (leads) {
      ready[at.stage].arrive_and_expect_tx(rows * 68);
      tl::tma_load(static_cast<unsigned char*>(codes) + at.stage * (kBand * 64), from,
                   ready[at.stage], rows * 64);
      tl::tma_load(static_cast<unsigned char*>(scales) + at.stage * (kBand * 4), by,
                   ready[at.stage], rows * 4);
    }
    from += n * 64;
    by += n * 4;
  }
  stage = at.stage;
  phase = at.phase;
}

// What a multiplying thread knows. Of its warp's 16 rows it decodes two, two apart; in this order
// four sums of a token are neighbours in memory once an 8 x 8 matrix has been transposed.
template <int kStages>
struct Worker {
  Barrier *ready, *free;
  const unsigned char *codes, *scales;  // of the thread's first row, in stage 0
  uint64_t tokens;                      // descriptor of stage 0
  __nv_bfloat16* out;
  int n, row;                           // the first row, within the band
  Place<kStages> at{0, 0};

  __device__ __forceinline__ Worker(Barrier* ready, Barrier* free, const void* codes,
                                    const void* scales, const void* tokens, void* out, int n)
      : ready(ready), free(free), out(static_cast<__nv_bfloat16*>(out)), n(n) {
    const int lane = threadIdx.x & 31;
    row = (threadIdx.x >> 5) * 16 + (lane >> 3) * 4 + (lane >> 2 & 1);
    this->codes = static_cast<const unsigned char*>(codes) + row * 64 + (lane & 3) * 16;
    this->scales = static_cast<const unsigned char*>(scales) + row * 4;
    tl::GmmaDescriptor descriptor;
    tl::initialize_wgmma_descriptor<1, 1, 64>(descriptor,
                                              static_cast<const unsigned char*>(tokens));
    this->tokens = uint64_t(descriptor);
  }

  // Wait for a block of inputs and load the codes and scales of both rows.
  __device__ __forceinline__ void load(unsigned (&words)[2][4], unsigned (&by)[2]) {
    wait(ready[at.stage], at.phase);
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      *reinterpret_cast<uint4*>(words[half]) =
          *reinterpret_cast<const uint4*>(codes + at.stage * (kBand * 64) + half * 128);
      by[half] = *reinterpret_cast<const unsigned*>(scales + at.stage * (kBand * 4) + half * 8);
    }
  }

  __device__ __forceinline__ void release() {
    if (is_first_lane()) free[at.stage].arrive();
    at.advance();
  }

  // Where the thread writes: token lane / 4 of each eight, four columns of it.
  __device__ __forceinline__ __nv_bfloat16* place(const Item& item, int& columns) const {
    const int lane = threadIdx.x & 31;
    const int column = item.band * kBand + (threadIdx.x >> 5) * 16 + (lane & 3) * 4;
    columns = n - column;
    return out + long(item.start + (lane >> 2)) * n + column;
  }
};

__device__ __forceinline__ unsigned transposed(float first, float second) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  unsigned in = *reinterpret_cast<unsigned*>(&pair), out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(in));
  return out;
}

// Multiply every item with the first of kSizes tokens that its rows fit in.
template <class Multiplier, int... kSizes, class... Args>
__device__ __forceinline__ void work(Barrier* told, Barrier* heard, const void* items,
                                     Args... args) {
  Multiplier multiplier(args...);
  for (int turn = 0;; ++turn) {
    const Item item = hear(items, told, heard, turn);
    if (item.band < 0) return;
    bool is_done = false;
    ((is_done = is_done || (item.rows <= kSizes &&
                            (multiplier.template tile<kSizes>(item), true))), ...);
  }
}

__device__ __forceinline__ unsigned times(unsigned pair, unsigned factor) {
  __nv_bfloat162 product = __hmul2(*reinterpret_cast<__nv_bfloat162*>(&pair),
                                   *reinterpret_cast<__nv_bfloat162*>(&factor));
  return *reinterpret_cast<unsigned*>(&product);
}

// The eight E2M1 codes of a word as four pairs, 2^-126 times their values.
__device__ __forceinline__ void split_fp4(unsigned w, unsigned (&pair)[4]) {
  pair[0] = w & 0x81C081C0u;
  pair[1] = (w << 3) & 0x81C081C0u;
  pair[2] = ((w << 1) & 0x80008000u) | ((w << 6) & 0x01C001C0u);
  pair[3] = ((w << 2) & 0x80008000u) | ((w >> 3) & 0x01C001C0u);
}

template <int kStages, int kTile, int kBlocks>
struct ExactMultiplier : Worker<kStages> {
  using Worker<kStages>::Worker;

  // The operand of one half of the block: 64 inputs, four steps of 16.
  static __device__ __forceinline__ void decode(const unsigned (&words)[2][4],
                                                const unsigned (&by)[2], int part,
                                                unsigned (&a)[4][4]) {
    #pragma unroll
    for (int half = 0; half < 2; ++half) {
      #pragma unroll
      for (int g = 0; g < 2; ++g) {
        const unsigned scale = by[half] >> (16 * part + 8 * g) & 0xFFu;
        const unsigned factor = scale * 0x00800080u + 126u * 0x00800080u;  // 2^(scale - 1), twice
        unsigned pair[4];
        split_fp4(words[half][2 * part + g], pair);
        #pragma unroll
        for (int p = 0; p < 4; ++p) a[2 * g + p / 2][(p % 2) * 2 + half] = times(pair[p], factor);
      }
    }
  }

  template <int kTokens>
  __device__ __forceinline__ void tile(const Item& item) {
    float sums[kTokens / 2] = {};
    #pragma unroll 1
    for (int block = 0; block < kBlocks; ++block) {
      unsigned words[2][4], by[2], a[4][4];
      this->load(words, by);
      #pragma unroll
      for (int part = 0; part < 2; ++part) {
        decode(words, by, part, a);
        const uint64_t b = this->tokens + ((this->at.stage * 2 + part) * (kTile * 128) >> 4);
        tl::warpgroup_fence_operand(reinterpret_cast<uint32_t*>(&a[0][0]), 16);
        tl::warpgroup_fence_operand(sums, kTokens / 2);
        tl::warpgroup_arrive();
        #pragma unroll
        for (int step = 0; step < 4; ++step)
          tl::wgmma_rs<tl::DataType::kBFloat16, tl::DataType::kBFloat16, tl::DataType::kFloat32, 64,
                       kTokens, 16, false, false, 1, 1>(a[step], b + step * 2,
                                                        reinterpret_cast<uint32_t*>(sums), true);
        tl::warpgroup_commit_batch();
        tl::warpgroup_wait<0>();
      }
      this->release();
    }
    tl::warpgroup_fence_operand(sums, kTokens / 2);
    int columns;
    __nv_bfloat16* to = this->place(item, columns);
    const int token = (threadIdx.x & 31) >> 2;
    #pragma unroll
    for (int j = 0; j < kTokens / 8; ++j, to += 8 * this->n) {
      const float* sum = sums + 4 * j;
      const uint2 four = {transposed(sum[0], sum[1]), transposed(sum[2], sum[3])};
      if (8 * j + token < item.rows && columns > 0) *reinterpret_cast<uint2*>(to) = four;
    }
  }
};
"""
