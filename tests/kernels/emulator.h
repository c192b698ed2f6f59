// What a generated CUDA kernel needs in order to run as plain C++: threads, barriers, warps.
//
// A block's threads are fibers of one OS thread. Each runs until it comes to a barrier (a shuffle
// is one for its warp), then the next one runs. Barriers are stricter than a GPU's: all 32 lanes of
// a warp must take part in a shuffle, and a block whose threads wait for one another fails instead
// of hanging. Number formats and their conversions are NVIDIA's own, from the CUDA headers.
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <setjmp.h>
#include <ucontext.h>
#include <vector_functions.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>

#undef __global__
#undef __launch_bounds__
#define __global__
#define __launch_bounds__(...)
#define CUDART_INF_F INFINITY  // the definitions of CUDA need its compiler
#define CUDART_INF double(INFINITY)

using uint = unsigned int;
using uchar = unsigned char;
using bfloat16_t = __nv_bfloat16;
using fp8_e4_t = __nv_fp8_e4m3;
struct fp8_e4_4_t {
  fp8_e4_t x, y, z, w;
};

uint3 threadIdx, blockIdx;

namespace emulation {

constexpr int kWarp = 32, kMostThreads = 1024, kStack = 1 << 16, kSharedBytes = 227 * 1024;
enum State { kRunnable, kAtWarp, kAtBlock, kEnded };

struct Fiber {
  jmp_buf resume;
  State state;
  bool is_new;
  int turn;  // which of `offered` the next exchange uses
  uint64_t offered[2];
};

Fiber fibers[kMostThreads];
int num_threads;
jmp_buf scheduler;
std::function<void()> kernel;
alignas(1024) uchar shared[kSharedBytes];
char stacks[kMostThreads][kStack];

void await(State barrier) {
  Fiber& own = fibers[threadIdx.x];
  own.state = barrier;
  // ucontext starts a fiber; later switches are jumps, which need no system call for signal masks.
  if (!_setjmp(own.resume)) _longjmp(scheduler, 1);
}

void begin() {
  kernel();
  await(kEnded);
}

void go_on(int thread) {
  Fiber& fiber = fibers[thread];
  threadIdx.x = thread;
  if (_setjmp(scheduler)) return;
  if (!fiber.is_new) _longjmp(fiber.resume, 1);
  fiber.is_new = false;
  ucontext_t start;
  getcontext(&start);
  start.uc_stack = {stacks[thread], 0, kStack};
  makecontext(&start, begin, 0);
  setcontext(&start);
}

// Release fibers [first, last) if all of them wait at `barrier`, or have ended where that counts.
bool release(int first, int last, State barrier) {
  int waiting = 0;
  for (int t = first; t < last; ++t) {
    const bool counts_as_there = barrier == kAtBlock && fibers[t].state == kEnded;
    if (fibers[t].state != barrier && !counts_as_there) return false;
    waiting += fibers[t].state == barrier;
  }
  for (int t = first; t < last; ++t)
    if (fibers[t].state == barrier) fibers[t].state = kRunnable;
  return waiting > 0;
}

// Run a block; false if its threads wait for one another forever.
bool run_block() {
  memset(shared, 0xFF, sizeof shared);  // NaN, and no small index: nobody may read it unwritten
  for (int t = 0; t < num_threads; ++t) fibers[t] = {{}, kRunnable, true, 0, {}};
  for (bool moved = true; moved;) {
    moved = false;
    for (int t = 0; t < num_threads; ++t)
      if (fibers[t].state == kRunnable) go_on(t), moved = true;
    for (int t = 0; t < num_threads; t += kWarp) moved |= release(t, t + kWarp, kAtWarp);
    moved |= release(0, num_threads, kAtBlock);
  }
  for (int t = 0; t < num_threads; ++t)
    if (fibers[t].state != kEnded) return false;
  return true;
}

bool run_grid(uint grid_x, uint grid_y, int threads, std::function<void()> body) {
  num_threads = threads;
  kernel = std::move(body);
  for (blockIdx.y = 0; blockIdx.y < grid_y; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < grid_x; ++blockIdx.x)
      if (!run_block()) return false;
  return true;
}

// Offer a value to the warp. Two buffers do: nobody gets two exchanges ahead of a lane of its warp.
template <class T>
int offer(T value) {
  Fiber& own = fibers[threadIdx.x];
  const int turn = own.turn;
  own.turn ^= 1;
  memcpy(&own.offered[turn], &value, sizeof value);
  await(kAtWarp);
  return turn;
}

template <class T>
T taken(int turn, int lane) {
  T value;
  memcpy(&value, &fibers[threadIdx.x / kWarp * kWarp + lane].offered[turn], sizeof value);
  return value;
}

template <class T>
T exchange(T value, int lane) {
  return taken<T>(offer(value), lane);
}

inline int own_lane() { return threadIdx.x % kWarp; }

}  // namespace emulation

inline void __syncthreads() { emulation::await(emulation::kAtBlock); }

template <class T>
T __shfl_xor_sync(uint, T value, int mask, int = 32) {
  return emulation::exchange(value, emulation::own_lane() ^ mask);
}

template <class T>
T __shfl_up_sync(uint, T value, int by, int = 32) {
  const int lane = emulation::own_lane();
  return emulation::exchange(value, lane < by ? lane : lane - by);
}

template <class T>
T __shfl_sync(uint, T value, int lane, int = 32) {
  return emulation::exchange(value, lane);
}

inline uint __ballot_sync(uint, int vote) {
  const int turn = emulation::offer(vote != 0);
  uint votes = 0;
  for (int lane = 0; lane < 32; ++lane) votes |= uint(emulation::taken<bool>(turn, lane)) << lane;
  return votes;
}

inline bool __any_sync(uint mask, int vote) { return __ballot_sync(mask, vote) != 0; }

inline int __reduce_add_sync(uint, int value) {
  const int turn = emulation::offer(value);
  int sum = 0;
  for (int lane = 0; lane < 32; ++lane) sum += emulation::taken<int>(turn, lane);
  return sum;
}

inline int __reduce_max_sync(uint, int value) {
  const int turn = emulation::offer(value);
  for (int lane = 0; lane < 32; ++lane) value = std::max(value, emulation::taken<int>(turn, lane));
  return value;
}

inline int __popc(uint x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float __fadd_rn(float a, float b) { return a + b; }  // never contracted: see emulator.py
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return float(1.0 / std::sqrt(double(x))); }

// Of a number and a NaN, CUDA's min and max return the number.
template <class T>
T max(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return std::fmax(a, b);
  return a < b ? b : a;
}

template <class T>
T min(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) return std::fmin(a, b);
  return b < a ? b : a;
}

// TileLang's own helpers.
inline uint __pack_nv_bfloat162(bfloat16_t low, bfloat16_t high) {
  uint16_t halves[2];
  memcpy(halves, &low, 2), memcpy(halves + 1, &high, 2);
  return halves[0] | uint(halves[1]) << 16;
}

inline float2 __tl_cvt_fp8x2_to_float2(__nv_fp8x2_storage_t x, __nv_fp8_interpretation_t format) {
  return __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(x, format)));
}

template <class T>
T AtomicAdd(T* to, T value) {
  return std::exchange(*to, T(*to + value));
}

namespace tl {
template <class V, class U>
V broadcast(U unit) {
  V vector;
  for (size_t i = 0; i < sizeof(V) / sizeof(U); ++i) reinterpret_cast<U*>(&vector)[i] = unit;
  return vector;
}

// Butterflies, as on the GPU: the order of a sum is part of its result.
template <class T>
T warp_reduce_sum(T value) {
  for (int mask = 16; mask; mask /= 2) value += __shfl_xor_sync(~0u, value, mask);
  return value;
}

template <class T>
T warp_reduce_max(T value) {
  for (int mask = 16; mask; mask /= 2) value = max(value, __shfl_xor_sync(~0u, value, mask));
  return value;
}
}  // namespace tl
