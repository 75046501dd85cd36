#pragma once

// The error of a stage's result against fp64, at some of its elements.

#include "activation.h"
#include "gemm/problem.h"

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

struct AccuracyError {
  double sum = 0;      // of |result - exact|
  double worst = 0;    //
  double largest = 0;  // |exact|
  double count = 0;    // elements that were finite
};

// Adds the errors of some thousand elements to *error, which is on the device and zero at first.
void sample_error(const AccuracySample& sample, AccuracyError* error, cudaStream_t stream);

// Whether an error is no worse than another's, up to a tenth and one unit in the last place.
bool is_as_exact(const AccuracyError& error, const AccuracyError& reference, gemm::Type type);

}  // namespace fused
