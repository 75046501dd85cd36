#pragma once

// What the nodes' backward needs where a tensor was not kept, and for the second derivative.

#include "autograd/node.h"
#include "core/activation.h"

#include <vector>

namespace fused::autograd {

// Whether gradients must be differentiable themselves: create_graph, or forward over reverse.
bool must_be_differentiable(const Tensor& grad, const variable_list& variables);

// A tensor of this shape, without meaningful values and of one element's memory, for an argument
// of which only the shape is read.
Tensor placeholder(const Tensor& like, const std::vector<c10::SymInt>& sizes);

// The two as arguments of a backward operator, with placeholders where they are undefined.
// grad is [*, out]. `by_columns`: what grad_lies_by_columns says of a weight that was not kept.
std::pair<Tensor, Tensor> fill_in(const Tensor& input, const Tensor& weight, const Tensor& grad,
                                  bool by_columns);

// A pre-activation kept from the forward, put back into the graph as a function of input, weight
// and bias, by their edges. (ReLU's output serves as its pre-activation: both are positive in the
// same places.) The values of input and weight are read only as far as the other one wants a
// gradient.
Tensor reconnect(const Tensor& preactivation, const Tensor& input, const Tensor& weight,
                 edge_list edges);

// ReLU's bit mask as values of the same signs, [*, features of grad].
Tensor signs_of_mask(const Tensor& mask, const Tensor& grad, const c10::SymInt& features);

}  // namespace fused::autograd
