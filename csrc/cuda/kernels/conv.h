#pragma once

// Our own CUDA kernels around a convolution. No tensors here. An image is [batch, channels, plane],
// contiguous, or channels-last: [batch, plane, channels]. (The backward of channels-last images is
// that of a linear layer's rows, in activation.h.)

#include "gemm/problem.h"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fused::cuda::kernels {

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
