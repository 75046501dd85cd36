#include "cuda/tune/conv_accuracy.h"

#include "cuda/kernels/activation_math.cuh"
#include "cuda/tune/accuracy.cuh"

namespace fused::cuda::tune {
namespace {

using kernels::widen, kernels::with_type;
using plans::TrialErrors;

template <typename T>
__device__ double value(const void* data, int64_t at) {
  return widen(static_cast<const T*>(data)[at]);
}

__device__ Element sampled(const ConvData& d, int sample, int samples) {
  return element_of(d.shape.result, drawn(sample, samples, elements_of(d.shape.result)));
}

// A warp for each sample.
template <typename T>
__global__ void exact_conv_kernel(ConvData d, int samples, Exact* exact) {
  const int sample = (blockIdx.x * blockDim.x + threadIdx.x) / warp, lane = threadIdx.x % warp;
  if (sample >= samples) return;
  const auto element = sampled(d, sample, samples);
  const int64_t terms = terms_of(d.shape);
  double sum = 0, magnitude = 0;
  for (int64_t k = lane; k < terms; k += warp) {
    const auto term = term_of(d.shape, element, k);
    if (term.in_padding) continue;
    const double product = value<T>(d.image, term.image) * value<T>(d.weight, term.weight);
    sum += product;
    magnitude += fabs(product);
  }
  sum = sum_over_warp(sum);
  magnitude = sum_over_warp(magnitude);
  if (lane != 0) return;
  const double bias = d.bias == nullptr ? 0 : value<T>(d.bias, element.index[1]);
  exact[sample] = {sum + bias, magnitude + fabs(bias)};
}

template <typename T>
__global__ void conv_errors_kernel(ConvData d, int samples, const Exact* exact, double unit,
                                   TrialErrors* errors) {
  const int sample = blockIdx.x * blockDim.x + threadIdx.x;
  if (sample >= samples) return;
  const auto element = sampled(d, sample, samples);
  const double z = exact[sample].value, magnitude = exact[sample].scale;
  const double got = value<T>(d.result, offset_of(d.shape.result, element));
  add(errors, &TrialErrors::elements, got - fmax(z, 0.0), unit * magnitude);
}

}  // namespace

int samples_of(const ConvData& data) {
  return static_cast<int>(std::min<int64_t>(elements_of(data.shape.result), most_samples));
}

void exact_values(const ConvData& data, Exact* exact, cudaStream_t stream) {
  const int samples = samples_of(data);
  with_type(data.type, [&](auto element) {
    using T = decltype(element);
    exact_conv_kernel<T>
        <<<blocks_for(int64_t{samples} * warp), threads, 0, stream>>>(data, samples, exact);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

void add_errors(const ConvData& data, const Exact* exact, TrialErrors* errors,
                cudaStream_t stream) {
  const int samples = samples_of(data);
  with_type(data.type, [&](auto element) {
    using T = decltype(element);
    conv_errors_kernel<T><<<blocks_for(samples), threads, 0, stream>>>(
        data, samples, exact, Roundoff(data.type).of_type, errors);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

}  // namespace fused::cuda::tune
