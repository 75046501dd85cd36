#pragma once

// The ways to a convolution with bias and ReLU on a GPU. image [batch, channels, height, width]; a
// result is in the layout of format_of(image, weight).

#include "core/conv.h"

namespace fused::cuda {

// cuDNN's fused convolution, where it may stand for torch's and nothing measured is quicker;
// explain's row says why not.
Tensor forward_in_best_way(const Tensor& image, const Tensor& weight, const OptionalTensor& bias,
                           const conv::Geometry& geometry);

// ATen's convolution, then bias and ReLU in one pass of our own.
Tensor own_forward(const Tensor& image, const Tensor& weight, const OptionalTensor& bias,
                   const conv::Geometry& geometry);

// ATen's convolution with bias, then its ReLU. Some of its convolutions add the bias on their way.
Tensor aten_forward(const Tensor& image, const Tensor& weight, const OptionalTensor& bias,
                    const conv::Geometry& geometry);

}  // namespace fused::cuda
