#pragma once

// ReLU's bit mask in one pass over memory each way; ATen's formulas take six. reference/linear.h
// has its layout.

#include "core/check.h"

namespace fused::cpu {

// Writes 0 where output <= 0, torch's rule; both contiguous.
void write_relu_mask(const Tensor& mask, const Tensor& output);

// dz = grad where the mask's bit is set, else 0; all contiguous.
void apply_relu_mask(const Tensor& dz, const Tensor& grad, const Tensor& mask);

}  // namespace fused::cpu
