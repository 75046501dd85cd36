#include "autograd/double_backward.h"

#include "reference/linear.h"

#include <torch/csrc/autograd/custom_function.h>

namespace fused::autograd {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

struct Reconnect : Function<Reconnect> {
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
    const auto [grad_input, grad_weight, grad_bias] = reference::LinearFormula::linear_backward(
        {grads[0], saved[0], saved[1], std::nullopt, Activation::none, wanted});
    return {Tensor(), wanted[0] ? grad_input : Tensor(), wanted[1] ? grad_weight : Tensor(),
            wanted[2] ? grad_bias : Tensor()};
  }
};

}  // namespace

Tensor placeholder(const Tensor& like, const std::vector<c10::SymInt>& sizes) {
  const std::vector<c10::SymInt> strides(sizes.size(), 0);  // one element, however many are meant
  return at::empty_strided_symint(sizes, strides, like.options());
}

std::pair<Tensor, Tensor> fill_in(const Tensor& input, const Tensor& weight, const Tensor& grad) {
  std::pair result(input, weight);
  if (!input.defined()) {
    auto sizes = grad.sym_sizes().vec();
    sizes.back() = weight.defined() ? weight.sym_size(1) : c10::SymInt(0);
    result.first = placeholder(grad, sizes);
  }
  if (!weight.defined()) {
    result.second = placeholder(grad, {grad.sym_size(-1), result.first.sym_size(-1)});
  }
  return result;
}

Tensor at_edge(const Tensor& values, size_t edge) {
  auto tensor = values.detach();
  if (const auto node = torch::autograd::get_current_node()) {
    torch::autograd::impl::set_gradient_edge(tensor, node->next_edge(edge));
  }
  return tensor;
}

Tensor reconnect(const Tensor& preactivation, const Tensor& input, const Tensor& weight,
                 const OptionalTensor& bias) {
  return Reconnect::apply(preactivation, input, weight, bias);
}

}  // namespace fused::autograd
