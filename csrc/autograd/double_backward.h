#pragma once

// What the nodes' backward needs where a tensor was not kept, and for the second derivative.

#include "core/check.h"

#include <vector>

namespace fused::autograd {

// A tensor of this shape, without meaningful values and of one element's memory, for an argument
// of which only the shape is read.
Tensor placeholder(const Tensor& like, const std::vector<c10::SymInt>& sizes);

// The two as arguments of a backward operator, with placeholders where they are undefined.
// grad is [*, out].
std::pair<Tensor, Tensor> fill_in(const Tensor& input, const Tensor& weight, const Tensor& grad);

// The same tensor as a variable at the end of the running node's own edge: gradients with respect
// to it go where the node's do.
Tensor at_edge(const Tensor& values, size_t edge);

// A pre-activation kept from the forward, put back into the graph as a function of input, weight
// and bias. (ReLU's output serves as its pre-activation: both are positive in the same places.) The
// values of input and weight are read only as far as the other one wants a gradient.
Tensor reconnect(const Tensor& preactivation, const Tensor& input, const Tensor& weight,
                 const OptionalTensor& bias);

}  // namespace fused::autograd
