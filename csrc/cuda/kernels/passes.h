#pragma once

// Our own CUDA kernels that pass over memory: what cuBLASLt's epilogues cannot do, or not fast
// enough. No tensors here.

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

// ---- gated layers, act(gate) ⊙ up ---------------------------------------------------------------

// hidden = act(gate) ⊙ up; everything [rows, cols]
struct Gating {
  Activation activation = Activation::silu;
  gemm::Type type = gemm::Type::f32;
  int64_t rows = 0, cols = 0;
  const void *gate = nullptr, *up = nullptr;  // pre-activations
  int64_t ld_gate = 0, ld_up = 0;             // elements
  void* hidden = nullptr;                     // contiguous
};

void gating_forward(const Gating& args, cudaStream_t stream);

// The gradients of gate and up, their column sums, and hidden again, in one pass over memory: each
// of grad, gate and up is read once. What is not wanted is null. Sums run in fp32 (fp64 for fp64)
// in an order fixed by the sizes, so that the same input gives the same bits.
struct GatingBackward : Gating {
  int processors = 1;          // of the device: how many blocks to make
  const void* grad = nullptr;  // of hidden
  int64_t ld_grad = 0;
  void *grad_gate = nullptr, *grad_up = nullptr;
  int64_t ld_result = 0;                          // of both
  void *gate_sums = nullptr, *up_sums = nullptr;  // [cols]
};

// Bytes of scratch that gating_backward needs.
int64_t scratch_bytes(const GatingBackward& args);

void gating_backward(const GatingBackward& args, void* scratch, cudaStream_t stream);

// ---- around a convolution -----------------------------------------------------------------------

// An image is [batch, channels, plane], contiguous, or channels-last: [batch, plane, channels].
// (The backward of channels-last images is that of a linear layer's rows.)

struct Image {
  gemm::Type type = gemm::Type::f32;
  int64_t batch = 0, channels = 0, plane = 0;
};

// y = relu(y + bias), in place, in one pass; bias [channels].
void bias_relu(const Image& image, bool channels_last, const void* bias, void* y,
               cudaStream_t stream);

// dz = grad where output > 0 or NaN, else 0; and, if wanted, its sum for each channel, in one pass.
// Sums run in fp32 (fp64 for fp64) in an order fixed by the sizes.
struct PlanesBackward {
  Image image;
  int processors = 1;            // of the device: how many blocks to make
  int arch = 0;                  // of the device, 90 for capability 9.0
  const void* grad = nullptr;    // contiguous images all three
  const void* output = nullptr;  //
  void* dz = nullptr;            //
  void* grad_bias = nullptr;     // [channels]; or nothing
};

// Bytes of scratch that relu_backward needs.
int64_t scratch_bytes(const PlanesBackward& args);

void relu_backward(const PlanesBackward& args, void* scratch, cudaStream_t stream);

}  // namespace fused::cuda::kernels
