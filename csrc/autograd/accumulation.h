#pragma once

// Lets the product of a weight's gradient add to the existing gradient (beta = 1), and the sum of a
// bias's gradient likewise: to `.grad`, or to Megatron's `main_grad`. Users enable it for each
// weight. If anything could observe a difference (hooks, create_graph), PyTorch accumulates.

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
  torch::autograd::Node* accumulator;  // the weight's AccumulateGrad
  Tensor weight, into;
  bool adds = true;      // false: overwrites, for a first gradient in a dtype of its own
  bool is_main = false;  // `into` is Megatron's main_grad

  // Adds gradᵀ · input; without an input the sum of grad's rows, a bias's gradient. Returns the
  // tensor that the node passes along the edge: zeros without memory if hooks listen after the sum.
  // A graph, which reads these storages, returns a tensor of its dtype.
  Tensor add(const Tensor& grad, const Tensor& input, std::optional<at::ScalarType> of_graph = {},
             std::span<const int64_t> storages = {}) const;
};

// Returns no target if PyTorch must accumulate: the user did not ask for it, something else sees
// the gradient, or the node still reads the memory that would be written.
std::optional<Target> target_of(torch::autograd::Node* node, size_t edge,
                                at::ArrayRef<Tensor> reads = {});

}  // namespace fused::autograd::accumulation
