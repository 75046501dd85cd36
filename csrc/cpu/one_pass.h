#pragma once

// Computes the activation's backward and the bias's gradient in one sweep over memory, by blocks.

#include "core/check.h"

namespace fused::cpu {

bool takes_one_pass(const Tensor& grad, const Tensor& saved, Activation activation);

// Writes dz. Returns sums over parts of the rows, [parts, features], or an undefined tensor. The
// parts depend on the sizes alone.
Tensor one_pass(const Tensor& dz, const Tensor& grad, const Tensor& saved, Activation activation,
                bool sums_wanted);

// Adds up these parts; returns [0] if there are none.
Tensor sum_of_parts(const Tensor& parts, const Tensor& like);

}  // namespace fused::cpu
