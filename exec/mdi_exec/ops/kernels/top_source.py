"""CUDA source of exact top-k over rows of bfloat16 scores: every score is read from memory once.

A block keeps up to 32,768 scores in registers, two a word, and searches for the k-th best by
counting how many are at least some number: comparing two scores and adding to two counts are one
instruction each, and some seven counts find it among the 65,536 numbers of bfloat16. Nothing is
sorted, and there are no atomics. A longer row goes through in parts: the best k so far stay in
front of the next part, whose columns are all higher. Only integers decide, so the order of threads
does not show.

A warp owns neighbouring columns, so chosen columns come out in ascending order once every warp
knows how many the warps before it have. Read next: `top_entries.py`.
"""

TOP_SOURCE = r"""
#include <cuda_bf16.h>

namespace mdi {

constexpr int kThreads = 512, kWarps = kThreads / 32;
constexpr int kVector = 8, kWords = kVector / 2;          // scores of 16 bytes, and words
constexpr int kSteps = 8;                                 // vectors of one thread
constexpr int kOfWarp = 32 * kVector;                     // columns of one step
constexpr int kCapacity = kWarps * kOfWarp * kSteps;      // of a block
constexpr int kLowest = 0x7F;                             // the rank of minus infinity
constexpr unsigned kNan = 0x7FFF7FFFu;                    // not there: never as good as anything

// The number of a rank, twice. Both zeros are equal.
__device__ __forceinline__ __nv_bfloat162 of_rank(int rank) {
  const unsigned bits = rank < 0x8000 ? 0xFFFF - rank : rank - 0x8000, twice = bits * 0x10001u;
  return *reinterpret_cast<const __nv_bfloat162*>(&twice);
}

__device__ __forceinline__ __nv_bfloat162 pair(const unsigned& word) {
  return *reinterpret_cast<const __nv_bfloat162*>(&word);
}

// A row's scores so far: the best `carried` of older parts, then new ones from column `first` on.
struct Part {
  const int* columns;            // of carried scores
  const unsigned short* values;
  int carried, first, count, steps;

  __device__ __forceinline__ int place(int step) const {
    return (threadIdx.x / 32 * steps + step) * kOfWarp + threadIdx.x % 32 * kVector;
  }
  __device__ __forceinline__ int column(int place) const {
    return place < carried ? columns[place] : first + place - carried;
  }
  __device__ __forceinline__ void load(const unsigned* scores, unsigned (&words)[kSteps][kWords]) {
    #pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int at = place(step);
      uint4 vector = make_uint4(kNan, kNan, kNan, kNan);
      if (step < steps && at < count) {
        vector = at < carried
            ? *reinterpret_cast<const uint4*>(values + at)
            : *reinterpret_cast<const uint4*>(scores + (first + at - carried) / 2);
      }
      words[step][0] = vector.x, words[step][1] = vector.y;
      words[step][2] = vector.z, words[step][3] = vector.w;
      if (at < count && count < at + kVector) {
        #pragma unroll
        for (int i = 0; i < kVector; ++i)
          if (at + i >= count) words[step][i / 2] |= 0x7FFFu << i % 2 * 16;
      }
    }
  }
};

__device__ __forceinline__ int sum_warps(const int* partial, int upto) {
  const int lane = threadIdx.x % 32;
  return __reduce_add_sync(~0u, lane < upto ? partial[lane] : 0);
}

// How many of this warp's scores are at least a number.
__device__ __forceinline__ int count_warp(const unsigned (&words)[kSteps][kWords], int steps,
                                          __nv_bfloat162 least) {
  __nv_bfloat162 counts = __floats2bfloat162_rn(0, 0);
  #pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step < steps) {
      #pragma unroll
      for (int i = 0; i < kWords; ++i)
        counts = __hadd2(counts, __hge2(pair(words[step][i]), least));
    }
  }
  return __reduce_add_sync(~0u, int(__low2float(counts) + __high2float(counts)));
}

// The highest rank of all scores.
__device__ __forceinline__ int best_rank(const unsigned (&words)[kSteps][kWords], int steps,
                                         int* partial) {
  __nv_bfloat162 best = of_rank(kLowest);
  #pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step < steps) {
      #pragma unroll
      for (int i = 0; i < kWords; ++i) best = __hmax2(best, pair(words[step][i]));
    }
  }
  const __nv_bfloat16 one = __hmax(__low2bfloat16(best), __high2bfloat16(best));
  const int bits = __bfloat16_as_ushort(one), rank = bits > 0x8000 ? 0xFFFF - bits : bits | 0x8000;
  partial[threadIdx.x / 32] = __reduce_max_sync(~0u, rank);
  __syncthreads();
  return __reduce_max_sync(~0u, partial[threadIdx.x % kWarps]);
}

// Counts of scores at least as good as a rank: of this warp, and of all.
struct Count { int rank, own, all; };

// A rank strictly between two, where the k-th best is to be expected: counts grow exponentially.
__device__ __forceinline__ int guess(const Count& low, const Count& high, int k) {
  const float above = log2f(high.all + 0.5f);
  const float share = (log2f(k) - above) / (log2f(low.all) - above);
  const int width = high.rank - low.rank;
  return high.rank - min(max(int(width * share + 0.5f), 1), width - 1);
}

// Find neighbouring ranks between which the k-th best score is; the same rank where k are as good.
// Which ranks are tried decides how long it takes, not what is found.
__device__ __forceinline__ void search(const unsigned (&words)[kSteps][kWords], int steps, int k,
                                       int (*partial)[kWarps], Count& low, Count& high) {
  int span = 64;  // half an octave
  bool is_below = false;
  low = {kLowest, 0, 0}, high = {best_rank(words, steps, partial[0]) + 1, 0, 0};
  for (int turn = 1; !is_below || high.rank - low.rank > 1; ++turn) {
    int rank = max(high.rank - span, kLowest);
    span *= 4;
    if (is_below) rank = turn % 4 ? guess(low, high, k) : (low.rank + high.rank) / 2;
    const int own = count_warp(words, steps, of_rank(rank));
    if (threadIdx.x % 32 == 0) partial[turn % 2][threadIdx.x / 32] = own;
    __syncthreads();
    const Count now = {rank, own, sum_warps(partial[turn % 2], kWarps)};
    if (now.all >= k || rank == kLowest) {
      low = now;
      is_below = true;
      if (low.all <= k) high = low;
    } else {
      high = now;
    }
  }
}

// A bit for each of eight scores that is at least a number.
__device__ __forceinline__ unsigned flags(const unsigned (&words)[kWords], __nv_bfloat162 least) {
  unsigned both = 0;
  #pragma unroll
  for (int i = 0; i < kWords; ++i)
    both |= __hge2_mask(pair(words[i]), least) & (0x00020001u << 2 * i);
  return (both | both >> 16) & 0xFFu;
}

// Keep the scores above, and of equal ones the first, in ascending order of columns.
__device__ __forceinline__ void keep(const unsigned (&words)[kSteps][kWords], const Part& part,
                                     int k, const Count& low, const Count& high,
                                     int (*partial)[kWarps], int* columns, unsigned short* values) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, wanted = k - high.all;
  if (lane == 0) partial[0][warp] = high.own, partial[1][warp] = low.own - high.own;
  __syncthreads();
  int above = sum_warps(partial[0], warp), equal = sum_warps(partial[1], warp);
  const __nv_bfloat162 least = of_rank(low.rank), better = of_rank(high.rank);
  #pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    if (step >= part.steps) break;
    unsigned good = flags(words[step], least);
    if (!__any_sync(~0u, good)) continue;
    const unsigned best = flags(words[step], better);
    const int own = __popc(best) + (__popc(good ^ best) << 16);
    int upto = own;
    #pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const int other = __shfl_up_sync(~0u, upto, by);
      if (lane >= by) upto += other;
    }
    const int of_warp = __shfl_sync(~0u, upto, 31);
    int mine = above + ((upto - own) & 0xFFFF), ties = equal + ((upto - own) >> 16);
    for (; good; good &= good - 1) {
      const int i = __ffs(good) - 1;
      const bool is_best = best >> i & 1;
      if (is_best || ties < wanted) {
        const unsigned left = i & 2 ? words[step][1] : words[step][0];
        const unsigned right = i & 2 ? words[step][3] : words[step][2];
        const int to = mine + min(ties, wanted);
        columns[to] = part.column(part.place(step) + i);
        values[to] = static_cast<unsigned short>((i & 4 ? right : left) >> i % 2 * 16);
      }
      if (is_best) ++mine; else ++ties;
    }
    above += of_warp & 0xFFFF, equal += of_warp >> 16;
  }
}

// Write the columns of a row's best scores, ascending; -1 where there are no more. With kKeepsLast
// the last of its `limit` columns is always one of them.
template <int kBest, bool kKeepsLast>
__device__ __forceinline__ void select_row(const void* scores, int limit, int* chosen,
                                           int* columns, void* values, int* partial) {
  constexpr int kSearched = kBest - kKeepsLast;
  constexpr int kCarry = (kBest + kVector - 1) / kVector * kVector;
  const unsigned* row = static_cast<const unsigned*>(scores);
  unsigned short* kept = static_cast<unsigned short*>(values);
  int (*counts)[kWarps] = reinterpret_cast<int (*)[kWarps]>(partial);
  if (limit <= kBest) {
    for (int i = threadIdx.x; i < kBest; i += kThreads) chosen[i] = i < limit ? i : -1;
    return;
  }
  const int end = limit - kKeepsLast;
  int found = 0, turn = 0;
  for (int first = 0; first < end && kSearched > 0; turn ^= 1) {
    const int carried = first ? kCarry : 0, count = min(kCapacity, carried + end - first);
    Part part{columns + turn * kCarry, kept + turn * kCarry, carried, first, count,
              (count + kWarps * kOfWarp - 1) / (kWarps * kOfWarp)};
    unsigned words[kSteps][kWords];
    Count low, high;
    part.load(row, words);
    search(words, part.steps, kSearched, counts, low, high);
    __syncthreads();  // before counts and the other half are written again
    const int next = (turn ^ 1) * kCarry;
    found = min(low.all, kSearched);
    if (threadIdx.x < kCarry - kSearched) kept[next + kSearched + threadIdx.x] = 0x7FFF;
    keep(words, part, kSearched, low, high, counts, columns + next, kept + next);
    __syncthreads();
    first += count - carried;
  }
  columns += turn * kCarry;
  for (int i = threadIdx.x; i < kBest; i += kThreads)
    chosen[i] = i < found ? columns[i] : kKeepsLast && i == found ? limit - 1 : -1;
}

}  // namespace mdi
"""
