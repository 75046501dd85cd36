#pragma once

// Gradients of weights that the product itself adds to the existing gradient (beta = 1), and of
// biases that their sum adds: to `.grad`, or to Megatron's `main_grad`. Enabled per weight. If
// anything could observe a difference (hooks, create_graph), PyTorch accumulates.

#include "autograd/node.h"

#include <optional>
#include <span>
#include <string_view>

namespace fused::autograd::accumulation {

// Begins or ends accumulation into 'grad' or 'main_grad'; the last one begun and not ended counts.
void set(const Tensor& weight, std::string_view into, bool begins);
std::string get(const Tensor& weight);

// The place that a weight's gradient goes to in this run of the engine.
struct Target {
  torch::autograd::Node* accumulator;  // of the weight, AccumulateGrad
  Tensor weight, into;
  bool adds = true;      // else it is written: the first gradient, in a dtype of its own
  bool is_main = false;  // into is Megatron's

  // Adds gradᵀ · input, or a bias's gradient, the sum of grad's rows, where input is undefined. ->
  // what the node passes along the edge: zeros without memory where hooks listen behind the sum, or
  // a graph, which reads these storages, gives a tensor of its dtype.
  Tensor add(const Tensor& grad, const Tensor& input, std::optional<at::ScalarType> of_graph = {},
             std::span<const int64_t> storages = {}) const;
};

// Gives no target if PyTorch accumulates: it was not asked for, something else sees the gradient,
// or the node still reads the memory that would be written.
std::optional<Target> target_of(torch::autograd::Node* node, size_t edge,
                                at::ArrayRef<Tensor> reads = {});

}  // namespace fused::autograd::accumulation
