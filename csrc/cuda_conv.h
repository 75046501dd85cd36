#pragma once

// cuDNN's convolution with bias and ReLU in one call, where it may stand for torch's.

#include "conv.h"

namespace fused::conv {

// Nothing where it may not be used, and explain's row says why. image [batch, channels, height,
// width]; the result is in the layout of format_of(image, weight).
std::optional<Tensor> cudnn_forward(const Tensor& image, const Tensor& weight,
                                    const OptionalTensor& bias, const Geometry& geometry);

// The other way: ATen's convolution, then bias and ReLU in one pass of our own.
Tensor own_forward(const Tensor& image, const Tensor& weight, const OptionalTensor& bias,
                   const Geometry& geometry);

}  // namespace fused::conv
