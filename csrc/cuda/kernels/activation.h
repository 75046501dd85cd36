#pragma once

// Kernels of activations: the forward, its bit mask, and the backward with column sums in one pass.

#include "core/activation.h"
#include "gemm/problem.h"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fused::cuda::kernels {

bool have_code();

// y = act(z); y may be z.
void activation_forward(Activation activation, gemm::Type type, int64_t rows, int64_t cols,
                        const void* z, int64_t ld_z, void* y, int64_t ld_y, cudaStream_t stream);

// Writes ReLU's bits of its output, by torch's rule 0 where output <= 0, to a contiguous mask,
// [rows, mask_bytes(cols)] bytes (reference/linear.h).
void write_relu_mask(gemm::Type type, int64_t rows, int64_t cols, const void* output, int64_t ld,
                     void* mask, cudaStream_t stream);

// Where the sums of columns go: of the rows' type or in fp32, written or added to what is there.
struct Sums {
  void* data = nullptr;  // [cols]; or nothing
  bool to_f32 = false, adds = false;
};

// dz = act'(saved) · grad and its column sums, read and written once. Sums run in fp32 (fp64 for
// fp64) in an order fixed by the sizes: the same input gives the same bits.
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
  Sums sums;
};

// sums[col] = the sum of partials[row, col], in fp32
void sum_rows(gemm::Type type, const float* partials, int64_t rows, int64_t cols, int64_t ld,
              void* sums, cudaStream_t stream);

int64_t scratch_bytes(const ActivationBackward& args);

void activation_backward(const ActivationBackward& args, void* scratch, cudaStream_t stream);

}  // namespace fused::cuda::kernels
