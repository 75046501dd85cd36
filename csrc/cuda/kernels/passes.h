#pragma once

// Our own kernels that pass over memory, where cuBLASLt's epilogues cannot, or not fast enough.

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

struct Gating {
  Activation activation = Activation::silu;
  gemm::Type type = gemm::Type::f32;
  int64_t rows = 0, cols = 0;
  const void *gate = nullptr, *up = nullptr;  // pre-activations
  int64_t ld_gate = 0, ld_up = 0;             // elements
  void* hidden = nullptr;                     // contiguous
};

void gating_forward(const Gating& args, cudaStream_t stream);

// The gradients of gate and up, their column sums, and hidden again, as above. What is not wanted
// is null.
struct GatingBackward : Gating {
  int processors = 1;          // of the device: how many blocks to make
  const void* grad = nullptr;  // of hidden
  int64_t ld_grad = 0;
  void *grad_gate = nullptr, *grad_up = nullptr;
  int64_t ld_result = 0;                          // of both
  void *gate_sums = nullptr, *up_sums = nullptr;  // [cols]
};

int64_t scratch_bytes(const GatingBackward& args);

void gating_backward(const GatingBackward& args, void* scratch, cudaStream_t stream);

// [batch, channels, plane], contiguous, or channels-last: [batch, plane, channels], whose backward
// is that of a linear layer's rows.
struct Image {
  gemm::Type type = gemm::Type::f32;
  int64_t batch = 0, channels = 0, plane = 0;
};

// y = relu(y + bias), in place; bias [channels]
void bias_relu(const Image& image, bool channels_last, const void* bias, void* y,
               cudaStream_t stream);

// dz = grad where output > 0 or NaN, else 0, and its sum for each channel, as above
struct PlanesBackward {
  Image image;
  int processors = 1;            // of the device: how many blocks to make
  int arch = 0;                  // of the device, 90 for capability 9.0
  const void* grad = nullptr;    // contiguous images all three
  const void* output = nullptr;  //
  void* dz = nullptr;            //
  void* grad_bias = nullptr;     // [channels]; or nothing
};

int64_t scratch_bytes(const PlanesBackward& args);

void relu_backward(const PlanesBackward& args, void* scratch, cudaStream_t stream);

}  // namespace fused::cuda::kernels
