#pragma once

// Kernels of activations: the forward, its bit mask, and the backward with column sums in one pass.

#include "core/activation.h"
#include "gemm/problem.h"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fused::cuda::kernels {

bool have_code();

// Computes y = act(z); y may be z.
void activation_forward(Activation activation, gemm::Type type, int64_t rows, int64_t cols,
                        const void* z, int64_t ld_z, void* y, int64_t ld_y, cudaStream_t stream);

// Writes ReLU's bits to a contiguous mask, [rows, mask_bytes(cols)] bytes (reference/linear.h). By
// torch's rule a bit is 0 where output <= 0.
void write_relu_mask(gemm::Type type, int64_t rows, int64_t cols, const void* output, int64_t ld,
                     void* mask, cudaStream_t stream);

// The memory for column sums, in the rows' type or in fp32. Sums are written or added.
struct Sums {
  void* data = nullptr;  // [cols]; or nothing
  bool to_f32 = false, adds = false;
};

// Computes dz = act'(saved) · grad and its column sums in one sweep over memory. Sums run in fp32
// (fp64 for fp64) in an order fixed by the sizes, so the same input gives the same bits.
struct ActivationBackward {
  Activation activation = Activation::none;
  bool mask = false;  // saved is a ReLU bit mask
  gemm::Type type = gemm::Type::f32;
  int processors = 1;  // the device's multiprocessors
  int arch = 0;        // the device's, 90 for capability 9.0
  int64_t rows = 0, cols = 0;
  const void* grad = nullptr;   // [rows, cols]
  int64_t ld_grad = 0;          // elements
  const void* saved = nullptr;  // [rows, cols], a mask [rows, >= cols / 8]; not read for none
  int64_t ld_saved = 0;         // elements, of a mask bytes
  void* dz = nullptr;           // [rows, cols], contiguous; or nothing
  Sums sums;
};

// Computes sums[col], the sum over the rows of partials[row, col], in fp32.
void sum_rows(gemm::Type type, const float* partials, int64_t rows, int64_t cols, int64_t ld,
              void* sums, cudaStream_t stream);

int64_t scratch_bytes(const ActivationBackward& args);

void activation_backward(const ActivationBackward& args, void* scratch, cudaStream_t stream);

}  // namespace fused::cuda::kernels
