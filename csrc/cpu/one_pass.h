#pragma once

// The activation's backward and the bias's gradient in one pass over memory, by blocks.

#include "core/check.h"

namespace fused::cpu {

bool takes_one_pass(const Tensor& grad, const Tensor& saved, Activation activation);

// Writes dz; gives sums over parts of the rows, which depend on sizes alone, [parts, features], or
// an undefined tensor.
Tensor one_pass(const Tensor& dz, const Tensor& grad, const Tensor& saved, Activation activation,
                bool sums_wanted);

// Adds such parts; [0] where there are none.
Tensor sum_of_parts(const Tensor& parts, const Tensor& like);

}  // namespace fused::cpu
