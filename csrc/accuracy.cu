#include "accuracy.h"
#include "activation_math.cuh"

#include <algorithm>

namespace fused {
namespace {

constexpr int samples = 2048;
constexpr int warp = 32;

// Where element (row, col) of the matrix meant lies.
__device__ int64_t offset(const gemm::Matrix& m, int64_t row, int64_t col) {
  return m.transposed ? col * m.ld + row : row * m.ld + col;
}

template <typename T>
__device__ double value(const gemm::Matrix& m, int64_t row, int64_t col) {
  return widen(static_cast<const T*>(m.data)[offset(m, row, col)]);
}

__device__ uint64_t scatter(uint64_t i) {  // splitmix64
  i += 0x9e3779b97f4a7c15ull;
  i = (i ^ i >> 30) * 0xbf58476d1ce4e5b9ull;
  i = (i ^ i >> 27) * 0x94d049bb133111ebull;
  return i ^ i >> 31;
}

// Of numbers that are not negative, the order is that of their bits.
__device__ void raise(double* to, double at_least) {
  atomicMax(reinterpret_cast<unsigned long long*>(to), __double_as_longlong(at_least));
}

// A warp for each sample.
template <typename T>
__global__ void error_kernel(AccuracySample s, gemm::SampledError* error) {
  const int sample = (blockIdx.x * blockDim.x + threadIdx.x) / warp, lane = threadIdx.x % warp;
  if (sample >= samples) return;
  const uint64_t where = scatter(sample);
  const int64_t row = static_cast<int64_t>((where >> 32) % s.result.rows);
  const int64_t col = static_cast<int64_t>((where & 0xffffffff) % s.result.cols);
  double exact = 0;
  for (int64_t k = lane; k < s.left.cols; k += warp) {
    exact += value<T>(s.left, row, k) * value<T>(s.right, k, col);
  }
  for (int half = warp / 2; half > 0; half /= 2) exact += __shfl_down_sync(~0u, exact, half);
  if (lane != 0) return;

  if (s.forward) {
    if (s.bias != nullptr) exact += widen(static_cast<const T*>(s.bias)[col]);
    switch (s.activation) {
      case Activation::none:
        break;
      case Activation::relu:
        exact = activate<Activation::relu, false>(exact);
        break;
      case Activation::gelu_tanh:
        exact = activate<Activation::gelu_tanh, false>(exact);
        break;
      case Activation::gelu_erf:
        exact = activate<Activation::gelu_erf, false>(exact);
        break;
    }
  } else if (s.mask) {
    const auto byte = static_cast<const uint8_t*>(s.saved.data)[row * s.saved.ld + col / 8];
    exact = byte >> col % 8 & 1 ? exact : 0;
  } else if (s.activation != Activation::none) {
    const double at = value<T>(s.saved, row, col);
    if (s.activation == Activation::relu) {
      exact = activation_gradient<Activation::relu, false, double>(exact, at);
    } else if (s.activation == Activation::gelu_tanh) {
      exact = activation_gradient<Activation::gelu_tanh, false, double>(exact, at);
    } else {
      exact = activation_gradient<Activation::gelu_erf, false, double>(exact, at);
    }
  }
  const double difference = fabs(value<T>(s.result, row, col) - exact);
  // A user's data may hold infinities; they say nothing about the algorithm.
  if (!isfinite(difference)) return;
  atomicAdd(&error->sum, difference);
  atomicAdd(&error->count, 1.0);
  raise(&error->worst, difference);
  raise(&error->largest, fabs(exact));
}

}  // namespace

void sample_error(const AccuracySample& sample, gemm::SampledError* error, cudaStream_t stream) {
  constexpr int threads = 256;
  constexpr int blocks = samples * warp / threads;
  with_type(sample.type, [&](auto element) {
    error_kernel<decltype(element)><<<blocks, threads, 0, stream>>>(sample, error);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

}  // namespace fused
