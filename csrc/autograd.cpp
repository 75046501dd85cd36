// The Autograd kernels: thin, symbolic, dispatcher calls only. One node serves every activation.

#include "composite.h"
#include "fused_linear.h"
#include "kernels.h"
#include "policy.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/custom_function.h>

namespace fused {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

bool has_tangent(const Tensor& tensor) { return tensor.defined() && tensor._fw_grad(0).defined(); }

bool has_tangent(const OptionalTensor& tensor) { return tensor && has_tangent(*tensor); }

bool requires_grad(const Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); }
bool requires_grad(const OptionalTensor& tensor) { return tensor && requires_grad(*tensor); }

bool inside_torch_func() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

// Transforms that a C++ node cannot serve (torch.func, forward AD), and the user's wish, take the
// formula, which torch differentiates as it does its own operators.
template <typename... Tensors>
bool wants_formula(const Tensors&... tensors) {
  return policy() == Policy::eager || inside_torch_func() || (has_tangent(tensors) || ...);
}

template <typename... Tensors>
bool wants_gradient(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && (requires_grad(tensors) || ...);
}

Tensor without_gradient(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        Activation activation) {
  at::AutoDispatchBelowADInplaceOrView guard;
  if (activation == Activation::none) return fused::linear(input, weight, bias);
  if (activation == Activation::relu) return linear_relu(input, weight, bias);
  return linear_gelu(input, weight, bias, approximate_of(activation));
}

// A saved pre-activation put back into the graph, as a function of input, weight and bias, for the
// second derivative. Their values are needed only as far as the first backward needs them too, so
// a stand-in without data may take the place of one that was not saved.
struct ReconnectPreactivation : Function<ReconnectPreactivation> {
  static Tensor forward(AutogradContext* ctx, const Tensor& preactivation, const Tensor& input,
                        const Tensor& weight, const OptionalTensor& bias) {
    ctx->save_for_backward({input, weight});
    ctx->set_materialize_grads(false);
    ctx->saved_data["bias"] = has_value(bias);
    return preactivation.detach();
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const bool bias = ctx->saved_data["bias"].toBool();
    if (!grads[0].defined()) return variable_list(4);
    const auto saved = ctx->get_saved_variables();
    const std::array<bool, 3> wanted{ctx->needs_input_grad(1), ctx->needs_input_grad(2),
                                     bias && ctx->needs_input_grad(3)};
    auto [grad_input, grad_weight, grad_bias] = Composite::linear_backward(
        grads[0], saved[0], saved[1], std::nullopt, Activation::none, wanted);
    return {Tensor(), wanted[0] ? grad_input : Tensor(), wanted[1] ? grad_weight : Tensor(),
            wanted[2] ? grad_bias : Tensor()};
  }
};

struct LinearActivation : Function<LinearActivation> {
  // Edges of the node, in the order of the tensor arguments.
  enum Edge { input_edge, weight_edge, bias_edge };

  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias, int64_t activation_value) {
    const auto activation = static_cast<Activation>(activation_value);
    Tensor output, saved;
    {
      at::AutoDispatchBelowADInplaceOrView guard;
      if (is_gelu(activation)) {
        std::tie(output, saved) =
            steps::linear_gelu_aux(input, weight, bias, approximate_of(activation));
      } else if (activation == Activation::relu && policy() == Policy::cublaslt) {
        std::tie(output, saved) = steps::linear_relu_aux(input, weight, bias);
      } else if (activation == Activation::relu) {
        // The output tells the gradient as well as the mask does, by torch's rule at zero, and the
        // next layer keeps it anyway.
        output = saved = linear_relu(input, weight, bias);
      } else {
        output = fused::linear(input, weight, bias);
      }
    }
    ctx->saved_data["activation"] = activation_value;
    ctx->saved_data["bias"] = has_value(bias);
    ctx->set_materialize_grads(false);
    // No more is kept than torch keeps for the layer and its activation.
    ctx->save_for_backward({weight.requires_grad() ? input : Tensor(),
                            input.requires_grad() ? weight : Tensor(), saved});
    return output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    if (!grads[0].defined()) return variable_list(4);
    const auto activation = static_cast<Activation>(ctx->saved_data["activation"].toInt());
    const bool bias = ctx->saved_data["bias"].toBool();
    const auto variables = ctx->get_saved_variables();
    const std::array<bool, 3> wanted{ctx->needs_input_grad(input_edge),
                                     ctx->needs_input_grad(weight_edge),
                                     bias && ctx->needs_input_grad(bias_edge)};
    const auto gradients = at::GradMode::is_enabled()
                               ? differentiable(variables, grads[0], activation, bias, wanted)
                               : plain(variables, grads[0], activation, wanted);
    const auto& [grad_input, grad_weight, grad_bias] = gradients;
    return {wanted[0] ? grad_input : Tensor(), wanted[1] ? grad_weight : Tensor(),
            wanted[2] ? grad_bias : Tensor(), Tensor()};
  }

 private:
  using Gradients = std::tuple<Tensor, Tensor, Tensor>;

  // The operator takes tensors, not holes: what was not saved is not read, only its shape is.
  static Tensor stand_in(const Tensor& like, std::vector<c10::SymInt> sizes) {
    return at::empty_symint({1}, like.options()).expand_symint(sizes);
  }

  static std::pair<Tensor, Tensor> fill_in(const variable_list& variables, const Tensor& grad) {
    auto [input, weight] = std::pair(variables[0], variables[1]);
    if (!input.defined()) {
      auto sizes = grad.sym_sizes().vec();
      sizes.back() = weight.defined() ? weight.sym_size(1) : c10::SymInt(0);
      input = stand_in(grad, std::move(sizes));
    }
    if (!weight.defined()) weight = stand_in(grad, {grad.sym_size(-1), input.sym_size(-1)});
    return {std::move(input), std::move(weight)};
  }

  static Gradients plain(const variable_list& variables, const Tensor& grad, Activation activation,
                         std::array<bool, 3> wanted) {
    const auto [input, weight] = fill_in(variables, grad);
    at::AutoDispatchBelowADInplaceOrView guard;
    return steps::linear_backward(grad, input, weight, variables[2], name(activation), wanted);
  }

  // create_graph: the gradients must themselves be differentiable.
  static Gradients differentiable(const variable_list& variables, const Tensor& grad,
                                  Activation activation, bool bias, std::array<bool, 3> wanted) {
    auto [input, weight] = fill_in(variables, grad);
    auto saved = variables[2];
    if (is_gelu(activation)) {
      saved = reconnect(
          saved, variables[0].defined() ? input : detached_from(input, input_edge),
          variables[1].defined() ? weight : detached_from(weight, weight_edge),
          bias ? OptionalTensor(detached_from(stand_in(grad, {grad.sym_size(-1)}), bias_edge))
               : std::nullopt);
    }
    return Composite::linear_backward(grad, input, weight, saved, activation, wanted);
  }

  static Tensor reconnect(const Tensor& saved, const Tensor& input, const Tensor& weight,
                          const OptionalTensor& bias) {
    return ReconnectPreactivation::apply(saved, input, weight, bias);
  }

  // A tensor without meaningful values at the end of one of this node's own edges.
  static Tensor detached_from(const Tensor& values, Edge edge) {
    auto tensor = values.detach();
    if (const auto node = torch::autograd::get_current_node()) {
      torch::autograd::impl::set_gradient_edge(tensor, node->next_edge(edge));
    }
    return tensor;
  }
};

Tensor forward(const char* op, const Tensor& input, const Tensor& weight,
               const OptionalTensor& bias, Activation activation) {
  const bool formula = wants_formula(input, weight, bias);
  if (!formula && !wants_gradient(input, weight, bias)) {
    return without_gradient(input, weight, bias, activation);
  }
  // Here and not only in the kernels below, whose names the user has not called.
  check_linear(op, input, weight, bias);
  if (formula) return Composite::forward(input, weight, bias, activation);
  return LinearActivation::apply(input, weight, bias, static_cast<int64_t>(activation));
}

Tensor linear_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  return forward("linear", input, weight, bias, Activation::none);
}

Tensor linear_relu_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  return forward("linear_relu", input, weight, bias, Activation::relu);
}

Tensor linear_gelu_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            std::string_view approximate) {
  return forward("linear_gelu", input, weight, bias, parse_approximate("linear_gelu", approximate));
}

// The single steps, called directly: differentiable through the formula.
using Formula = Kernels<Composite>;

std::tuple<Tensor, Tensor> relu_aux_autograd(const Tensor& input, const Tensor& weight,
                                             const OptionalTensor& bias) {
  if (wants_gradient(input, weight, bias) || wants_formula(input, weight, bias)) {
    return Formula::relu_aux(input, weight, bias);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return steps::linear_relu_aux(input, weight, bias);
}

std::tuple<Tensor, Tensor> gelu_aux_autograd(const Tensor& input, const Tensor& weight,
                                             const OptionalTensor& bias,
                                             std::string_view approximate) {
  if (wants_gradient(input, weight, bias) || wants_formula(input, weight, bias)) {
    return Formula::gelu_aux(input, weight, bias, approximate);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return steps::linear_gelu_aux(input, weight, bias, approximate);
}

std::tuple<Tensor, Tensor> activation_backward_autograd(const Tensor& grad_output,
                                                        const Tensor& saved,
                                                        std::string_view activation,
                                                        bool bias_grad) {
  if (wants_gradient(grad_output, saved) || wants_formula(grad_output, saved)) {
    return Formula::activation_backward(grad_output, saved, activation, bias_grad);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return steps::activation_backward(grad_output, saved, activation, bias_grad);
}

std::tuple<Tensor, Tensor, Tensor> linear_backward_autograd(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight,
    const OptionalTensor& saved, std::string_view activation, std::array<bool, 3> output_mask) {
  if (wants_gradient(grad_output, input, weight, saved) ||
      wants_formula(grad_output, input, weight, saved)) {
    return Formula::linear_backward(grad_output, input, weight, saved, activation, output_mask);
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  return steps::linear_backward(grad_output, input, weight, saved, activation, output_mask);
}

}  // namespace

TORCH_LIBRARY_IMPL(fused, Autograd, m) {
  m.impl("linear", linear_autograd);
  m.impl("linear_relu", linear_relu_autograd);
  m.impl("linear_gelu", linear_gelu_autograd);
  m.impl("_linear_relu_aux", relu_aux_autograd);
  m.impl("_linear_gelu_aux", gelu_aux_autograd);
  m.impl("_activation_backward", activation_backward_autograd);
  m.impl("_linear_backward", linear_backward_autograd);
}

}  // namespace fused
