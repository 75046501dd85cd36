#pragma once

// Helpers for the nodes' backward: stand-ins for tensors that were not saved, and second
// derivatives.

#include "autograd/node.h"
#include "reference/linear.h"

#include <algorithm>
#include <array>
#include <vector>

namespace fused::autograd {

// Returns whether gradients must be differentiable: create_graph, or forward over reverse.
inline bool must_be_differentiable(const Tensor& grad, const variable_list& variables) {
  return at::GradMode::is_enabled() || has_tangent(grad) ||
         std::ranges::any_of(variables, [](const Tensor& t) { return has_tangent(t); });
}

inline Tensor empty_strided(const Tensor& like, const std::vector<c10::SymInt>& sizes,
                            const std::vector<c10::SymInt>& strides) {
  // Tensors of a Python class, such as distributed ones, make a placeholder of their class.
  const bool is_python = like.key_set().has(c10::DispatchKey::Python);
  return is_python ? like.new_empty_strided_symint(sizes, strides)
                   : at::empty_strided_symint(sizes, strides, like.options());
}

// Returns a tensor of this shape with one element's memory and no meaningful values, for an
// argument whose shape alone is read.
inline Tensor placeholder(const Tensor& like, const std::vector<c10::SymInt>& sizes) {
  return empty_strided(like, sizes, std::vector<c10::SymInt>(sizes.size(), 0));
}

// Input and weight as arguments of a backward operator. Placeholders stand for undefined ones. grad
// is
// [*, out]. `by_columns` is the result of grad_lies_by_columns for a weight that was not saved.
inline std::pair<Tensor, Tensor> fill_in(const Tensor& input, const Tensor& weight,
                                         const Tensor& grad, bool by_columns) {
  std::pair result(input, weight);
  if (!input.defined()) {
    auto sizes = grad.sym_sizes().vec();
    sizes.back() = weight.defined() ? weight.sym_size(-1) : c10::SymInt(0);
    result.first = placeholder(grad, sizes);
  }
  if (!weight.defined()) {
    const std::vector sizes{grad.sym_size(-1), result.first.sym_size(-1)};
    result.second = by_columns ? empty_strided(grad, sizes, {1, 0}) : placeholder(grad, sizes);
  }
  return result;
}

class ReconnectNode final : public Node {
 public:
  using Node::Node;

  void keep(const Tensor& input, const Tensor& weight) {
    kept_ = {SavedVariable(input, false), saved_weight(weight)};
  }
  std::string name() const override { return "FusedPreactivationBackward"; }

 protected:
  variable_list gradients(const Tensor& grad) override { return run(work(), grad); }
  std::span<SavedVariable> kept() override { return kept_; }
  std::vector<int64_t> traits() const override { return {}; }
  Backward backward() const override { return run; }

 private:
  static variable_list run(const Work& work, const Tensor& grad) {
    const auto [grad_input, grad_weight, grad_bias] = reference::LinearFormula::linear_backward(
        {grad, work.kept[0], work.kept[1], std::nullopt, Activation::none, mask_of(work.wanted)});
    return by_edge(work.wanted, grad_input, grad_weight, grad_bias);
  }

  std::array<SavedVariable, 2> kept_;  // input, weight
};

// Puts a saved pre-activation back into the graph as a function of input, weight and bias, by their
// edges. ReLU's output serves as its pre-activation, because both are positive in the same places.
// The values of the input are read only if the weight wants a gradient, and the other way round.
inline Tensor reconnect(const Tensor& preactivation, const Tensor& input, const Tensor& weight,
                        edge_list edges) {
  const auto result = preactivation.detach();
  const bool linked = std::ranges::any_of(edges, [](const auto& edge) { return edge.is_valid(); });
  if (!linked || !at::GradMode::is_enabled()) return result;
  const auto node = make_node<ReconnectNode>(std::move(edges));
  node->keep(input, weight);
  set_history(result, node);
  announce(node);
  return result;
}

// Returns values with the signs of ReLU's bit mask, [*, features of grad].
inline Tensor signs_of_mask(const Tensor& mask, const Tensor& grad, const c10::SymInt& features) {
  return reference::unpack_mask(mask, features).to(grad.scalar_type());
}

}  // namespace fused::autograd
