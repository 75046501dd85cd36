#pragma once

#include "core/gated.h"
#include "core/memory.h"

namespace fused::autograd {

// A gated layer, and the one after it where there is one, with autograd: one node.
Tensor gated_with_gradient(const gated::Layer& layer, const gated::Down& down,
                           Activation activation, Memory memory);

}  // namespace fused::autograd
