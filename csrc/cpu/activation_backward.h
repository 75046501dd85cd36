#pragma once

// act'(saved) · grad and its column sums in one pass over memory: block by block, so that what has
// just been written is summed while it is in a cache.

#include "core/activation.h"
#include "core/check.h"

namespace fused::cpu {

// Not worth it for few elements, nor in 16 bits: what ATen adds up in another type it converts in a
// pass of its own.
bool takes_one_pass(const Tensor& grad, const Tensor& saved, Activation activation);

// Writes dz; all are [rows, features], but a bit mask. -> sums over parts of the rows, [parts,
// features]; undefined where not wanted. The parts depend on sizes alone.
Tensor one_pass(const Tensor& dz, const Tensor& grad, const Tensor& saved, Activation activation,
                bool sums_wanted);

}  // namespace fused::cpu
