#pragma once

// What the kernels of trials share: the choice of samples, and errors that many threads add up.

#include "cuda/tune/accuracy.h"

#include <algorithm>

namespace fused::cuda::tune {
namespace {  // each file's kernels are its own

constexpr int warp = 32;
constexpr int threads = 256;
constexpr int most_blocks = 4096;

inline unsigned blocks_for(int64_t work) {
  return static_cast<unsigned>(std::clamp<int64_t>((work + threads - 1) / threads, 1, most_blocks));
}

__device__ inline uint64_t scatter(uint64_t i) {  // splitmix64
  i += 0x9e3779b97f4a7c15ull;
  i = (i ^ i >> 30) * 0xbf58476d1ce4e5b9ull;
  i = (i ^ i >> 27) * 0x94d049bb133111ebull;
  return i ^ i >> 31;
}

// One of each of `samples` equal parts, so that none comes twice.
__device__ inline int64_t drawn(int64_t sample, int64_t samples, int64_t total) {
  const int64_t begin = sample * total / samples, end = (sample + 1) * total / samples;
  return begin + static_cast<int64_t>(scatter(sample) % static_cast<uint64_t>(end - begin));
}

// Of numbers that are not negative, the order is that of their bits.
__device__ inline void raise(double* to, double at_least) {
  atomicMax(reinterpret_cast<unsigned long long*>(to), __double_as_longlong(at_least));
}

__device__ inline void add(plans::TrialErrors* errors, plans::PooledError plans::TrialErrors::* of,
                           double difference, double scale) {
  const double error = difference == 0 ? 0 : fabs(difference) / scale;  // of an empty sum, too
  if (!isfinite(error)) {
    atomicAdd(&errors->missed, 1.0);
    return;
  }
  auto& pool = errors->*of;
  atomicAdd(&pool.squares, error * error);
  atomicAdd(&pool.count, 1.0);
  raise(&pool.worst, error);
}

__device__ inline double sum_over_warp(double value) {
  for (int half = warp / 2; half > 0; half /= 2) value += __shfl_down_sync(~0u, value, half);
  return value;
}

}  // namespace
}  // namespace fused::cuda::tune
