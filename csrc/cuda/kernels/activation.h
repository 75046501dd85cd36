#pragma once

// Our own CUDA kernels: what cuBLASLt's epilogues cannot do, or not fast enough. No tensors here.

#include "core/activation.h"
#include "gemm/problem.h"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fused::cuda::kernels {

// Whether the kernels were compiled for the current device.
bool have_code();

// y = act(z); y may be z.
void activation_forward(Activation activation, gemm::Type type, int64_t rows, int64_t cols,
                        const void* z, int64_t ld_z, void* y, int64_t ld_y, cudaStream_t stream);

// ReLU's bit mask of its output, in one pass over memory: 0 where output <= 0, by torch's rule. The
// mask is contiguous, [rows, mask_bytes(cols)] bytes (reference/linear.h has the layout).
void write_relu_mask(gemm::Type type, int64_t rows, int64_t cols, const void* output, int64_t ld,
                     void* mask, cudaStream_t stream);

// dz = act'(saved) · grad and grad_bias = the column sums of dz, in one pass over memory: grad and
// saved are read once, dz is written once. Sums run in fp32 (fp64 for fp64) in an order fixed by
// the sizes, so that the same input gives the same bits.
struct ActivationBackward {
  Activation activation = Activation::none;
  bool mask = false;  // saved is a ReLU bit mask
  gemm::Type type = gemm::Type::f32;
  int processors = 1;  // of the device: how many blocks to make
  int arch = 0;        // of the device, 90 for capability 9.0
  int64_t rows = 0, cols = 0;
  const void* grad = nullptr;   // [rows, cols]
  int64_t ld_grad = 0;          // elements
  const void* saved = nullptr;  // [rows, cols], a mask [rows, >= cols / 8]; not read for none
  int64_t ld_saved = 0;         // elements, of a mask bytes
  void* dz = nullptr;           // [rows, cols], contiguous; or nothing
  void* grad_bias = nullptr;    // [cols]; or nothing
};

// sums[col] = the sum of partials[row, col], in fp32.
void sum_rows(gemm::Type type, const float* partials, int64_t rows, int64_t cols, int64_t ld,
              void* sums, cudaStream_t stream);

// Bytes of scratch that activation_backward needs.
int64_t scratch_bytes(const ActivationBackward& args);

void activation_backward(const ActivationBackward& args, void* scratch, cudaStream_t stream);

}  // namespace fused::cuda::kernels
