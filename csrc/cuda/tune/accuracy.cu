#include "cuda/kernels/activation_math.cuh"
#include "cuda/tune/accuracy.h"

#include <algorithm>

namespace fused::cuda::tune {
namespace {

using gemm::Matrix;
using kernels::widen, kernels::with_type;
using plans::SampledError;

constexpr int warp = 32;
constexpr int threads = 256;

// Where element (row, col) of the matrix meant lies.
template <typename T>
__device__ double value(const Matrix& m, int64_t row, int64_t col) {
  return widen(static_cast<const T*>(m.data)[m.transposed ? col * m.ld + row : row * m.ld + col]);
}

__device__ bool bit(const Matrix& mask, int64_t row, int64_t col) {
  return static_cast<const uint8_t*>(mask.data)[row * mask.ld + col / 8] >> col % 8 & 1;
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

// Infinities in a user's data say nothing about who computes with them; one where the exact result
// is finite does, and leaves the count short.
__device__ void add(SampledError* error, double got, double exact) {
  const double difference = fabs(got - exact);
  if (!isfinite(difference)) return;
  atomicAdd(&error->sum, difference);
  atomicAdd(&error->count, 1.0);
  raise(&error->worst, difference);
  raise(&error->largest, fabs(exact));
}

__device__ double sum_over_warp(double value) {
  for (int half = warp / 2; half > 0; half /= 2) value += __shfl_down_sync(~0u, value, half);
  return value;
}

__device__ double activated(Activation activation, double z) {
  switch (activation) {
    case Activation::none:
      return z;
    case Activation::relu:
      return kernels::activate<Activation::relu, false>(z);
    case Activation::gelu_tanh:
      return kernels::activate<Activation::gelu_tanh, false>(z);
    case Activation::gelu_erf:
      return kernels::activate<Activation::gelu_erf, false>(z);
    case Activation::silu:
      return kernels::activate<Activation::silu, false>(z);
  }
  return z;
}

__device__ double gradient(Activation activation, double grad, double at) {
  switch (activation) {
    case Activation::none:
      return grad;
    case Activation::relu:
      return kernels::activation_gradient<Activation::relu, false, double>(grad, at);
    case Activation::gelu_tanh:
      return kernels::activation_gradient<Activation::gelu_tanh, false, double>(grad, at);
    case Activation::gelu_erf:
      return kernels::activation_gradient<Activation::gelu_erf, false, double>(grad, at);
    case Activation::silu:
      return kernels::activation_gradient<Activation::silu, false, double>(grad, at);
  }
  return grad;
}

// A warp for each sample.
template <typename T>
__global__ void elements_kernel(AccuracySample s, int samples, SampledError* error) {
  const int sample = (blockIdx.x * blockDim.x + threadIdx.x) / warp, lane = threadIdx.x % warp;
  if (sample >= samples) return;
  const uint64_t where = scatter(sample);
  const auto row = static_cast<int64_t>((where >> 32) % s.result.rows);
  const auto col = static_cast<int64_t>((where & 0xffffffff) % s.result.cols);
  double z = 0;
  for (int64_t k = lane; k < s.left.cols; k += warp) {
    z += value<T>(s.left, row, k) * value<T>(s.right, k, col);
  }
  z = sum_over_warp(z);
  if (lane != 0) return;

  const double got = value<T>(s.result, row, col);
  if (s.forward) {
    if (s.bias != nullptr) z += widen(static_cast<const T*>(s.bias)[col]);
    if (s.aux.data != nullptr && !s.mask) add(error, value<T>(s.aux, row, col), z);
    // Near 0 the sign is a matter of rounding; what has come out positive has its bit set.
    if (s.mask && got > 0 && !bit(s.aux, row, col)) return;
    add(error, got, activated(s.activation, z));
  } else if (s.mask) {
    add(error, got, bit(s.aux, row, col) ? z : 0);
  } else {
    const double at = s.activation == Activation::none ? 0 : value<T>(s.aux, row, col);
    add(error, got, gradient(s.activation, z, at));
  }
}

template <typename T>
__global__ void sums_kernel(AccuracySample s, int samples, SampledError* error) {
  const int sample = (blockIdx.x * blockDim.x + threadIdx.x) / warp, lane = threadIdx.x % warp;
  if (sample >= samples) return;
  const auto col = static_cast<int64_t>(scatter(sample) % s.summed.cols);
  double sum = 0;
  for (int64_t row = lane; row < s.summed.rows; row += warp) sum += value<T>(s.summed, row, col);
  sum = sum_over_warp(sum);
  if (lane == 0) add(error, widen(static_cast<const T*>(s.sums)[col]), sum);
}

// Fewer samples of longer sums, so that looking does not take longer than working.
int samples_for(int64_t inner, int most) {
  constexpr int64_t reads = int64_t{1} << 25;
  return static_cast<int>(std::clamp<int64_t>(reads / std::max<int64_t>(inner, 1), 64, most));
}

int blocks_for(int samples) { return (samples * warp + threads - 1) / threads; }

}  // namespace

void sample_errors(const AccuracySample& sample, plans::SampledErrors* errors,
                   cudaStream_t stream) {
  with_type(sample.type, [&](auto element) {
    using T = decltype(element);
    const int elements = samples_for(sample.left.cols, 2048);
    elements_kernel<T>
        <<<blocks_for(elements), threads, 0, stream>>>(sample, elements, &errors->elements);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    if (sample.sums == nullptr) return;
    const int sums = samples_for(sample.summed.rows, 128);
    sums_kernel<T><<<blocks_for(sums), threads, 0, stream>>>(sample, sums, &errors->sums);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

}  // namespace fused::cuda::tune
