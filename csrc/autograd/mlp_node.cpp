// The node of fused::mlp. In its backward every hidden layer's activation derivative and bias
// gradient come out of the next layer's step, with no protocol needed: it is all in one place.

#include "autograd/mlp_node.h"

#include "autograd/double_backward.h"
#include "autograd/linear_node.h"
#include "core/aten_activation.h"
#include "fused_linear.h"
#include "reference/linear.h"

#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

namespace fused::autograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

// Where the tensors of a chain of n layers stand among the node's edges: input, weights, biases.
struct Edges {
  size_t layers;
  std::vector<bool> has_bias;

  static constexpr size_t input = 0;
  size_t weight(size_t layer) const { return 1 + layer; }
  size_t bias(size_t layer) const {
    return 1 + layers + std::count(has_bias.begin(), has_bias.begin() + layer, true);
  }
  size_t count() const { return bias(layers); }
};

Edges edges_of(AutogradContext& ctx) {
  Edges edges;
  for (bool bias : ctx.saved_data["has_bias"].toBoolList()) edges.has_bias.push_back(bias);
  edges.layers = edges.has_bias.size();
  return edges;
}

// What the node keeps: per layer its input and its weight, per hidden layer what act' is read from;
// undefined where torch would not keep it either. With low memory also an input that is GELU of
// what the layer below has kept.
struct Kept {
  variable_list inputs, weights, saved;

  explicit Kept(size_t layers) : inputs(layers), weights(layers), saved(layers) {}
  Kept(const variable_list& flat, size_t layers) : Kept(layers) {
    for (size_t i = 0; i < layers; ++i) {
      inputs[i] = flat[3 * i], weights[i] = flat[3 * i + 1], saved[i] = flat[3 * i + 2];
    }
  }
  variable_list flat() const {
    variable_list result;
    for (size_t i = 0; i < inputs.size(); ++i) {
      result.insert(result.end(), {inputs[i], weights[i], saved[i]});
    }
    return result;
  }
};

struct Mlp : Function<Mlp> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, at::TensorList weights,
                        at::TensorList biases, const std::vector<bool>& has_bias,
                        Activation hidden_activation, Memory memory) {
    const size_t layers = weights.size();
    Kept kept(layers);
    auto hidden = input;
    auto next_bias = biases.begin();
    bool below = input.requires_grad();  // whether a gradient goes into the layer's input
    for (size_t i = 0; i < layers; ++i) {
      const bool last = i + 1 == layers;
      const auto activation = last ? Activation::none : hidden_activation;
      const OptionalTensor bias = has_bias[i] ? OptionalTensor(*next_bias++) : std::nullopt;
      const bool recomputable = i > 0 && memory == Memory::low &&
                                saved_for(hidden_activation) == Saved::preactivation &&
                                kept.saved[i - 1].defined();
      if (weights[i].requires_grad() && !recomputable) kept.inputs[i] = hidden;
      if (below) kept.weights[i] = weights[i];
      below = below || weights[i].requires_grad() || (bias && bias->requires_grad());

      // The output of ReLU that the next layer keeps serves this one as well.
      const bool output_kept =
          saved_for(activation) == Saved::output && weights[i + 1].requires_grad();
      const at::AutoDispatchBelowADInplaceOrView guard;
      if (below) {
        std::tie(hidden, kept.saved[i]) = forward_for_training(
            hidden, weights[i], bias, activation, output_kept ? Memory::standard : memory);
      } else {
        hidden = forward_for_inference(hidden, weights[i], bias, activation);
      }
    }
    c10::List<bool> flags;
    for (bool flag : has_bias) flags.push_back(flag);
    ctx->saved_data["has_bias"] = flags;
    ctx->saved_data["activation"] = static_cast<int64_t>(hidden_activation);
    ctx->set_materialize_grads(false);
    ctx->save_for_backward(kept.flat());
    return hidden;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto edges = edges_of(*ctx);
    // One gradient for each tensor, and three holes for the arguments that are none.
    variable_list result(edges.count() + 3);
    if (!grads[0].defined()) return result;
    const auto activation = static_cast<Activation>(ctx->saved_data["activation"].toInt());
    const auto flat = ctx->get_saved_variables();
    const Kept kept(flat, edges.layers);
    const Wanted wanted(*ctx, edges);
    if (at::GradMode::is_enabled() || has_tangent(grads[0]) ||
        std::ranges::any_of(flat, [](const Tensor& t) { return has_tangent(t); })) {
      differentiable(edges, wanted, kept, grads[0], activation, result);
    } else {
      usual(edges, wanted, kept, grads[0], activation, result);
    }
    return result;
  }

 private:
  struct Wanted {
    bool input;
    std::vector<bool> weight, bias;
    size_t lowest = 0;  // the lowest layer with anything to do

    Wanted(AutogradContext& ctx, const Edges& edges) : input(ctx.needs_input_grad(Edges::input)) {
      for (size_t i = 0; i < edges.layers; ++i) {
        weight.push_back(ctx.needs_input_grad(edges.weight(i)));
        bias.push_back(edges.has_bias[i] && ctx.needs_input_grad(edges.bias(i)));
      }
      while (!input && lowest + 1 < edges.layers && !weight[lowest] && !bias[lowest]) ++lowest;
    }
    bool goes_below(size_t layer) const { return layer > lowest || input; }
  };

  static void usual(const Edges& edges, const Wanted& wanted, const Kept& kept, const Tensor& grad,
                    Activation activation, variable_list& result) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    auto dz = grad;
    for (size_t i = edges.layers; i-- > wanted.lowest;) {
      // A hidden layer's bias gradient has come with the step of the layer above.
      const std::array<bool, 3> mask{wanted.goes_below(i), wanted.weight[i],
                                     wanted.bias[i] && i + 1 == edges.layers};
      auto kept_input = kept.inputs[i];
      if (mask[1] && !kept_input.defined()) {
        kept_input = gelu(kept.saved[i - 1], activation, "ATen gelu, recomputed");
      }
      const auto [input, weight] = fill_in(kept_input, kept.weights[i], dz);
      const auto grad_output = dz;
      const steps::LinearBackward layer{grad_output,      input, weight, std::nullopt,
                                        Activation::none, mask};
      Tensor grad_weight, grad_bias, grad_bias_below;
      if (i > wanted.lowest) {
        std::tie(dz, grad_weight, grad_bias, grad_bias_below) = steps::linear_backward_across(
            layer, {kept.saved[i - 1], activation, wanted.bias[i - 1]});
        if (wanted.bias[i - 1]) result[edges.bias(i - 1)] = grad_bias_below;
      } else {
        std::tie(dz, grad_weight, grad_bias) = steps::linear_backward(layer);
      }
      if (mask[1]) result[edges.weight(i)] = grad_weight;
      if (mask[2]) result[edges.bias(i)] = grad_bias;
    }
    if (wanted.input) result[Edges::input] = dz;
  }

  // create_graph: the same steps in differentiable ATen, on tensors put back into the graph.
  static void differentiable(const Edges& edges, const Wanted& wanted, const Kept& kept,
                             const Tensor& grad, Activation activation, variable_list& result) {
    variable_list inputs = kept.inputs, weights = kept.weights, saved = kept.saved;
    // Also below the lowest layer whose gradients are wanted now: they depend on those layers.
    size_t first = 0;  // with a gradient at all
    while (first + 1 < edges.layers && !kept.saved[first].defined()) ++first;
    for (size_t i = first; i < edges.layers; ++i) {
      const bool last = i + 1 == edges.layers;
      const auto& shaped = last ? grad : saved[i];  // [*, out] of this layer
      const auto like = shaped.scalar_type() == at::kByte ? hidden_of_mask(kept, i, grad) : shaped;
      const auto [input, weight] = fill_in(inputs[i], weights[i], like);
      // The lowest layer's input is the node's own, if anything of it is known at all.
      if (!inputs[i].defined()) inputs[i] = i == 0 ? at_edge(input, Edges::input) : input;
      if (!weights[i].defined()) weights[i] = at_edge(weight, edges.weight(i));
      if (last) break;
      OptionalTensor bias;
      if (edges.has_bias[i]) {
        bias = at_edge(placeholder(like, {like.sym_size(-1)}), edges.bias(i));
      }
      const auto preactivation = reconnect(like, inputs[i], weights[i], bias);
      const auto hidden = activate(preactivation, activation);
      saved[i] = saved_for(activation) == Saved::output ? hidden : preactivation;
      inputs[i + 1] = hidden;
    }
    auto dz = grad;
    for (size_t i = edges.layers; i-- > wanted.lowest;) {
      const auto [grad_input, grad_weight, grad_bias] = reference::LinearFormula::linear_backward(
          {dz,
           inputs[i],
           weights[i],
           std::nullopt,
           Activation::none,
           {wanted.goes_below(i), wanted.weight[i], wanted.bias[i]}});
      if (wanted.weight[i]) result[edges.weight(i)] = grad_weight;
      if (wanted.bias[i]) result[edges.bias(i)] = grad_bias;
      if (i > wanted.lowest) {
        dz = reference::gradient_from_saved(grad_input, saved[i - 1], activation);
      } else if (wanted.input) {
        result[Edges::input] = grad_input;
      }
    }
  }

  // A hidden layer of ReLU of which only the bit mask was kept, as an output: its own values where
  // the next layer has kept them, else any with the same signs.
  static Tensor hidden_of_mask(const Kept& kept, size_t layer, const Tensor& grad) {
    const auto& output = kept.inputs[layer + 1];
    if (output.defined()) return output;
    const auto features = kept.weights[layer + 1].sym_size(1);
    return reference::unpack_mask(kept.saved[layer], features).to(grad.scalar_type());
  }
};

}  // namespace

Tensor mlp_with_gradient(const Tensor& input, at::TensorList weights,
                         const c10::List<OptionalTensor>& biases, Activation activation,
                         Memory memory) {
  std::vector<Tensor> present;
  std::vector<bool> has_bias;
  for (const OptionalTensor& bias : biases) {
    has_bias.push_back(has_value(bias));
    if (has_bias.back()) present.push_back(*bias);
  }
  return Mlp::apply(input, weights, at::TensorList(present), has_bias, activation, memory);
}

}  // namespace fused::autograd
