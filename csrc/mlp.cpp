// The node of fused::mlp. In its backward every hidden layer's activation derivative and bias
// gradient come out of the next layer's step, with no protocol needed: it is all in one place.

#include "mlp.h"

#include "composite.h"
#include "fused_linear.h"
#include "linear_node.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

namespace fused {
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

struct Mlp : Function<Mlp> {
  static Tensor forward(AutogradContext* ctx, const Tensor& input, at::TensorList weights,
                        at::TensorList biases, const std::vector<bool>& has_bias,
                        int64_t activation_value) {
    const auto activation = static_cast<Activation>(activation_value);
    variable_list kept{input};
    kept.insert(kept.end(), weights.begin(), weights.end());
    kept.insert(kept.end(), biases.begin(), biases.end());
    auto hidden = input;
    {
      const at::AutoDispatchBelowADInplaceOrView guard;
      auto bias = biases.begin();
      for (size_t i = 0; i < weights.size(); ++i) {
        const OptionalTensor own = has_bias[i] ? OptionalTensor(*bias++) : std::nullopt;
        const bool last = i + 1 == weights.size();
        Tensor saved;
        std::tie(hidden, saved) =
            forward_for_training(hidden, weights[i], own, last ? Activation::none : activation);
        if (!last) kept.insert(kept.end(), {hidden, saved});
      }
    }
    c10::List<bool> flags;
    for (bool flag : has_bias) flags.push_back(flag);
    ctx->saved_data["has_bias"] = flags;
    ctx->saved_data["activation"] = activation_value;
    ctx->set_materialize_grads(false);
    ctx->save_for_backward(std::move(kept));
    return hidden;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto edges = edges_of(*ctx);
    // One gradient for each tensor, and two holes for the arguments that are none.
    variable_list result(edges.count() + 2);
    if (!grads[0].defined()) return result;
    const auto activation = static_cast<Activation>(ctx->saved_data["activation"].toInt());
    const auto kept = ctx->get_saved_variables();
    if (at::GradMode::is_enabled()) {
      differentiable(ctx, edges, kept, grads[0], activation, result);
    } else {
      usual(ctx, edges, kept, grads[0], activation, result);
    }
    return result;
  }

 private:
  static void usual(AutogradContext* ctx, const Edges& edges, const variable_list& kept,
                    const Tensor& grad, Activation activation, variable_list& result) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto wants_weight = [&](size_t i) { return ctx->needs_input_grad(edges.weight(i)); };
    const auto wants_bias = [&](size_t i) {
      return edges.has_bias[i] && ctx->needs_input_grad(edges.bias(i));
    };
    const auto hidden = [&](size_t i) { return kept[edges.count() + 2 * i]; };
    const auto saved = [&](size_t i) { return kept[edges.count() + 2 * i + 1]; };

    // The lowest layer with anything to do: below it nobody wants a gradient.
    const bool wants_input = ctx->needs_input_grad(Edges::input);
    size_t lowest = 0;
    while (!wants_input && lowest + 1 < edges.layers && !wants_weight(lowest) &&
           !wants_bias(lowest)) {
      ++lowest;
    }

    Tensor dz = grad, grad_weight, grad_bias;
    bool bias_known = false;
    for (size_t i = edges.layers; i-- > lowest;) {
      const bool wanted_bias = wants_bias(i);
      const bool across = i > lowest;
      const std::array<bool, 3> mask{across || wants_input, wants_weight(i),
                                     wanted_bias && !bias_known};
      const auto& layer_input = i == 0 ? kept[0] : hidden(i - 1);
      const auto& weight = kept[edges.weight(i)];
      Tensor next_bias;
      if (across) {
        std::tie(dz, grad_weight, grad_bias, next_bias) =
            steps::linear_backward_across(dz, layer_input, weight, std::nullopt, "none", mask,
                                          saved(i - 1), name(activation), wants_bias(i - 1));
      } else {
        std::tie(dz, grad_weight, grad_bias) =
            steps::linear_backward(dz, layer_input, weight, std::nullopt, "none", mask);
      }
      if (mask[1]) result[edges.weight(i)] = grad_weight;
      if (mask[2]) result[edges.bias(i)] = grad_bias;
      bias_known = across;
      if (across && wants_bias(i - 1)) result[edges.bias(i - 1)] = next_bias;
    }
    if (wants_input) result[Edges::input] = dz;
  }

  // create_graph: the chain once more as torch's own operators, and torch's own gradients of it.
  static void differentiable(AutogradContext* ctx, const Edges& edges, const variable_list& kept,
                             const Tensor& grad, Activation activation, variable_list& result) {
    c10::List<OptionalTensor> biases;
    for (size_t i = 0; i < edges.layers; ++i) {
      biases.push_back(edges.has_bias[i] ? OptionalTensor(kept[edges.bias(i)]) : std::nullopt);
    }
    const at::TensorList weights(&kept[edges.weight(0)], edges.layers);
    const auto output = Composite::mlp(kept[0], weights, biases, activation);
    variable_list wanted;
    std::vector<size_t> places;
    for (size_t i = 0; i < edges.count(); ++i) {
      if (!ctx->needs_input_grad(i)) continue;
      wanted.push_back(kept[i]);
      places.push_back(i);
    }
    const auto gradients = torch::autograd::grad({output}, wanted, {grad}, /*retain_graph=*/true,
                                                 /*create_graph=*/true, /*allow_unused=*/true);
    for (size_t i = 0; i < places.size(); ++i) result[places[i]] = gradients[i];
  }
};

}  // namespace

Tensor mlp_with_gradient(const Tensor& input, at::TensorList weights,
                         const c10::List<OptionalTensor>& biases, Activation activation) {
  std::vector<Tensor> present;
  std::vector<bool> has_bias;
  for (const OptionalTensor& bias : biases) {
    has_bias.push_back(has_value(bias));
    if (has_bias.back()) present.push_back(*bias);
  }
  return Mlp::apply(input, weights, at::TensorList(present), has_bias,
                    static_cast<int64_t>(activation));
}

}  // namespace fused
