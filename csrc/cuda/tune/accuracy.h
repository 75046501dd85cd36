#pragma once

// The error of a pass's results against fp64, at some of their elements.

#include "core/activation.h"
#include "gemm/problem.h"
#include "plans/select.h"

#include <cuda_runtime_api.h>

namespace fused::cuda::tune {

struct AccuracySample {
  gemm::Type type = gemm::Type::f32;
  gemm::Matrix left, right, result;
  bool forward = true;                       // result = act(left · right + bias), else
  Activation activation = Activation::none;  // result = left · right · act'(aux)
  const void* bias = nullptr;                // [cols]; forward only
  // Backward: read. Forward: written, if at all: the pre-activation, or the mask.
  gemm::Matrix aux;
  bool mask = false;
  // Backward: column sums of a matrix, if they are there.
  gemm::Matrix summed;
  const void* sums = nullptr;
};

// Adds the errors of some thousand elements, and of some hundred sums, to *errors, which is on the
// device and zero at first. An element that is not finite where it should be is not counted.
void sample_errors(const AccuracySample& sample, plans::SampledErrors* errors, cudaStream_t stream);

}  // namespace fused::cuda::tune
