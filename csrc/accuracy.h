#pragma once

// The error of a stage's result against fp64, at some of its elements.

#include "activation.h"
#include "gemm/problem.h"
#include "gemm/race.h"

#include <cuda_runtime_api.h>

namespace fused {

struct AccuracySample {
  gemm::Type type;
  gemm::Matrix left, right, result;
  bool forward;                // result = act(left · right + bias), else
  Activation activation;       // result = left · right · act'(saved)
  const void* bias = nullptr;  // [cols], forward only
  gemm::Matrix saved;          // [rows, cols], a mask [rows, bytes]
  bool mask = false;
};

// Adds the errors of some thousand elements to *error, which is on the device and zero at first.
void sample_error(const AccuracySample& sample, gemm::SampledError* error, cudaStream_t stream);

}  // namespace fused
