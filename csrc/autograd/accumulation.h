#pragma once

// Gradients of weights that the product itself adds to what is there (beta = 1): to `.grad`, or to
// Megatron's `main_grad`. Asked for by weight; everything that torch's way could be seen by keeps
// torch's way.

#include "autograd/node.h"

#include <optional>
#include <string_view>

namespace fused::autograd::accumulation {

// Into 'grad' or 'main_grad', as the last wish says that has not been taken back.
void set(const Tensor& weight, std::string_view into, bool begins);
std::string get(const Tensor& weight);

// Where a weight's gradient goes in this run of the engine.
class Target {
 public:
  // Adds gradᵀ · input. -> what the node passes along the weight's edge: zeros without memory where
  // hooks listen behind the sum, or it must be a tensor.
  Tensor add(const Tensor& grad, const Tensor& input, bool must_be_defined = false) const;

 private:
  friend std::optional<Target> target_of(torch::autograd::Node*, size_t);

  Target(torch::autograd::Node& accumulator, const Tensor& weight)
      : accumulator_(&accumulator), weight_(weight) {}

  torch::autograd::Node* accumulator_;  // of the weight, AccumulateGrad
  Tensor weight_, into_;
  bool adds_ = true;      // else it is written: the first gradient, in a dtype of its own
  bool is_main_ = false;  // into is Megatron's
};

// Nothing where torch's way is taken: not asked for, or something else sees the gradient.
std::optional<Target> target_of(torch::autograd::Node* node, size_t edge);

}  // namespace fused::autograd::accumulation
