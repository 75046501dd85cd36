#pragma once

// Kernels around a convolution: bias and ReLU, and their backward in one pass.

#include "gemm/problem.h"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fused::conv::cuda {

// [batch, channels, plane], contiguous, or channels-last: [batch, plane, channels], whose backward
// is that of a linear layer's rows.
struct Image {
  gemm::Type type = gemm::Type::f32;
  int64_t batch = 0, channels = 0, plane = 0;
};

// y = relu(y + bias), in place; bias [channels]
void bias_relu(const Image& image, bool channels_last, const void* bias, void* y,
               cudaStream_t stream);

// dz = grad where output > 0 or NaN, else 0, and its sum for each channel, read and written once.
// Sums run as in activation_backward.
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

}  // namespace fused::conv::cuda
