// The node of one layer. One class serves all activations, because the activation is a value.

#include "autograd/accumulation.h"
#include "autograd/double_backward.h"
#include "autograd/nodes.h"
#include "core/aten_activation.h"
#include "core/explain.h"
#include "core/policy.h"
#include "core/shapes.h"
#include "dispatch/operators.h"
#include "fused_linear.h"
#include "reference/linear.h"

#include <string>
#include <utility>

namespace fused::autograd {
namespace {

// Positions of edges and of saved tensors.
enum Edges { input_edge, weight_edge, bias_edge };
enum Indices { input_index, weight_index, saved_index, all_indices };

// The facts of a node that compiled autograd may treat as constant.
struct Form {
  Activation activation;
  bool of_ensemble;
  bool by_columns;  // the gradient of the weight
};

struct State : Work {
  Form form;

  const Tensor& saved() const { return kept[saved_index]; }
  // Returns input and weight as arguments of a backward operator. If one's gradient is not wanted,
  // only the shape of the other is read.
  std::pair<Tensor, Tensor> operands(const Tensor& grad) const {
    return fill_in(kept[input_index], kept[weight_index], grad, form.by_columns);
  }
};

// ---- the backward ------------------------------------------------------------------------------

// For create_graph, computes gradients that are themselves differentiable.
Triple differentiable(const State& state, const Tensor& grad) {
  const auto activation = state.form.activation;
  const auto [input, weight] = state.operands(grad);
  auto saved = state.saved();
  // ReLU's second derivative is zeros. It goes through the output, and so reaches the output's
  // hooks.
  if (saved.defined() && saved.scalar_type() == at::kByte) {
    const auto output = state.node ? torch::autograd::Edge(state.node, 0) : torch::autograd::Edge();
    saved = at_edge(signs_of_mask(saved, grad, grad.sym_size(-1)), output);
  } else if (saved_for(activation) == Saved::preactivation) {
    saved = reconnect(saved, input, weight, state.edges);
  }
  return reference::LinearFormula::linear_backward(
      {grad, input, weight, saved, activation, mask_of(state.wanted)});
}

// One step computes dz, its sum over rows, and the two products of dz. If the weight's gradient is
// added to an existing one, dz is computed first and the products one by one.
Triple usual(const State& state, const Tensor& grad) {
  using accumulation::target_of;
  const auto weight_sum = target_of(state.node.get(), weight_edge);
  const auto bias_sum =
      state.form.of_ensemble ? std::nullopt : target_of(state.node.get(), bias_edge);
  const KernelsOnly guard;
  auto dz = grad;
  auto activation = state.form.activation;
  auto mask = mask_of(state.wanted);
  Tensor grad_input, grad_weight, grad_bias;
  if (weight_sum) {
    mask[weight_edge] = false;
    if (activation != Activation::none) {
      const bool wants_bias = std::exchange(mask[bias_edge], false);
      Tensor sum;
      std::tie(dz, sum) = steps::activation_backward(grad, state.saved(), activation, wants_bias);
      if (wants_bias) grad_bias = sum;
      activation = Activation::none;
    }
  }
  const bool adds_rows = bias_sum && mask[bias_edge] && activation == Activation::none;
  if (adds_rows) mask[bias_edge] = false;
  if (mask[input_edge] || mask[weight_edge] || mask[bias_edge]) {
    const auto [input, weight] = state.operands(dz);
    const OptionalTensor saved(state.saved());
    auto made = steps::linear_backward({dz, input, weight, saved, activation, mask});
    std::tie(grad_input, grad_weight) = std::tie(std::get<0>(made), std::get<1>(made));
    if (mask[bias_edge]) grad_bias = std::get<2>(made);
  }
  if (weight_sum) grad_weight = weight_sum->add(dz, state.kept[input_index]);
  if (bias_sum) grad_bias = bias_sum->add(adds_rows ? dz : grad_bias, {});
  return {grad_input, grad_weight, grad_bias};
}

variable_list run(const State& state, const Tensor& grad) {
  auto [input, weight, bias] =
      must_be_differentiable(grad, state.kept) ? differentiable(state, grad) : usual(state, grad);
  return by_edge(state.wanted, std::move(input), std::move(weight), std::move(bias));
}

// ---- the node ----------------------------------------------------------------------------------

class LinearNode final : public Node {
 public:
  LinearNode(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
             Activation activation)
      : Node({edge_of(input), edge_of(weight), edge_of(bias)}),
        form_{activation, weight.dim() == 3, grad_lies_by_columns(weight)} {}

  // Saves what the backward needs, no more than torch keeps for the layer and its activation.
  void keep(const Tensor& input, const Tensor& weight, const Tensor& output, const Tensor& saved) {
    if (weight.requires_grad()) kept_[input_index] = saved_input(input);
    if (input.requires_grad()) {
      kept_[weight_index] = saved_weight(weight);
    } else if (form_.of_ensemble) {  // the weight's shape tells an ensemble's
      kept_[weight_index] = SavedVariable(placeholder(weight, weight.sym_sizes().vec()), false);
    }
    kept_[saved_index] = SavedVariable(saved, /*is_output=*/saved.is_same(output));
    remember_bits(saved_index, saved);
  }

  std::string name() const override {
    return std::string("FusedLinear_") + fused::name(form_.activation) + "_Backward";
  }

 protected:
  variable_list gradients(const Tensor& grad) override { return run({work(), form_}, grad); }
  std::span<SavedVariable> kept() override { return kept_; }
  std::vector<int64_t> traits() const override {
    return {number(form_.activation), form_.by_columns};
  }
  Backward backward() const override {
    return [form = form_](Work work, const Tensor& grad) {
      return run({std::move(work), form}, grad);
    };
  }

 private:
  const Form form_;
  std::array<SavedVariable, all_indices> kept_;
};

// ---- the forward -------------------------------------------------------------------------------

// Low-memory ReLU keeps a bit mask, unless the rows are so short that the mask would be longer.
Pair relu_and_bits(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  const auto features = weight.sym_size(0);
  const bool pays = mask_bytes(features) < features * weight.element_size();
  if (pays && !is_traced(input)) return steps::linear_relu_bits(input, weight, bias);
  // Two operators, so that a graph's partitioner may save either result.
  const auto output = linear_relu(input, weight, bias);
  return {output, pays ? steps::relu_mask(output) : output};
}

}  // namespace

Pair forward_for_training(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          Activation activation, Memory memory) {
  if (weight.dim() == 3) {
    auto [output, saved] = dispatch::EnsembleLinear::call(input, weight, bias, number(activation));
    return {output, saved_for(activation) == Saved::output ? output : saved};
  }
  if (activation == Activation::none) return {fused::linear(input, weight, bias), Tensor()};
  const auto policy = policy_for_graph(input);
  const bool by_library = policy == Policy::cublaslt;
  if (activation == Activation::relu && !by_library) {
    if (memory == Memory::low) return relu_and_bits(input, weight, bias);
    // The output gives the same gradient as the mask, by torch's rule at zero, and the next layer
    // saves it in any case.
    const auto output = linear_relu(input, weight, bias);
    return {output, output};
  }
  // Batch-invariant calls have the bits of inference for any width, also with memory="low".
  if (activation != Activation::relu && policy != Policy::batch_invariant) {
    // An epilogue applies the activation before the sum is rounded, and a backward could not repeat
    // that.
    if (memory == Memory::low) {
      const auto preactivation = fused::linear(input, weight, bias);
      return {activated(preactivation, activation, Time::first), preactivation};
    }
    // Rows padded for the epilogue would take more memory than torch's.
    if (weight.sym_size(0) % 8 != 0 && !by_library) {
      const auto preactivation = fused::linear(input, weight, bias);
      return {activate(preactivation, activation), preactivation};
    }
  }
  return steps::linear_aux(input, weight, bias, activation);
}

Tensor activated(const Tensor& preactivation, Activation activation, Time time) {
  const auto op = is_gelu(activation) ? "gelu" : fused::name(activation);
  const explain::Row row(op, preactivation, {});
  if (explain::enabled()) {
    const auto how = std::string("ATen ") + op + (time == Time::again ? ", recomputed" : "");
    explain::append(how.c_str());
  }
  if (activation == Activation::relu2) {  // without a second tensor
    auto output = at::relu(preactivation);
    return output.mul_(output);
  }
  return activate(preactivation, activation);
}

Tensor forward_for_inference(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             Activation activation) {
  if (const char* approximate = approximate_of(activation)) {
    return linear_gelu(input, weight, bias, approximate);
  }
  Tensor output;
  dispatch::for_each_row<dispatch::LinearOperators>([&](auto row) {
    using Row = decltype(row);
    if constexpr (requires { Row::activation; }) {
      if (Row::activation == activation) output = Row::call(input, weight, bias, "default");
    }
  });
  return output.defined() ? output : fused::linear(input, weight, bias);
}

Tensor linear_with_gradient(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            Activation activation, Memory memory) {
  const auto node = make_node<LinearNode>(input, weight, bias, activation);
  // The next layer saves a smooth activation's output in any case. Only ReLU's bits save memory.
  const auto kept = activation == Activation::relu ? memory : Memory::standard;
  Tensor output, saved;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    std::tie(output, saved) = forward_for_training(input, weight, bias, activation, kept);
  }
  set_history(output, node);
  node->keep(input, weight, output, saved);
  announce(node);
  return output;
}

}  // namespace fused::autograd
