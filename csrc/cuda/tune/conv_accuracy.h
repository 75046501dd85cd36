#pragma once

// accuracy.h for a convolution with bias and ReLU.

#include "cuda/tune/accuracy.h"
#include "cuda/tune/conv_terms.h"

namespace fused::cuda::tune {

struct ConvData {
  gemm::Type type = gemm::Type::f32;
  ConvShape shape;
  const void* image = nullptr;
  const void* weight = nullptr;
  const void* bias = nullptr;  // [out]; or nothing
  const void* result = nullptr;
};
int samples_of(const ConvData& data);

// Needs no result.
void exact_values(const ConvData& data, Exact* exact, cudaStream_t stream);
// Adds the errors of the sampled elements to *errors on the device.
void add_errors(const ConvData& data, const Exact* exact, plans::TrialErrors* errors,
                cudaStream_t stream);

}  // namespace fused::cuda::tune
