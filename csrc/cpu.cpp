// CPU kernels. Inference goes to oneDNN's linear with the activation as a post-op; everything
// else is the formula, through the same autograd nodes as on a GPU.

#include "composite.h"
#include "kernels.h"

#include <ATen/Context.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

namespace fused {
namespace {

using PointwiseSignature = Tensor(const Tensor&, const Tensor&, const OptionalTensor&,
                                  std::string_view, c10::List<std::optional<at::Scalar>>,
                                  std::optional<std::string_view>);

// Present only where PyTorch was built with oneDNN.
std::optional<c10::TypedOperatorHandle<PointwiseSignature>> onednn_linear() {
  const auto op = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
  if (!op) return std::nullopt;
  return op->typed<PointwiseSignature>();
}

bool onednn_takes(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  if (!at::globalContext().userEnabledMkldnn()) return false;
  if (input.scalar_type() != at::kFloat && input.scalar_type() != at::kBFloat16) return false;
  // Below a few rows PyTorch's own BLAS is quicker than packing the weight for oneDNN.
  return input.numel() > 0 && weight.numel() > 0 && (!has_value(bias) || bias->is_contiguous());
}

struct Cpu {
  static Tensor forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        Activation activation) {
    static const auto pointwise = onednn_linear();
    if (activation != Activation::none && pointwise && onednn_takes(input, weight, bias)) {
      const bool relu = activation == Activation::relu;
      return pointwise->call(
          input, weight, bias, relu ? "relu" : "gelu", c10::List<std::optional<at::Scalar>>(),
          relu ? std::nullopt : std::optional<std::string_view>(approximate_of(activation)));
    }
    auto preactivation = at::linear(input, weight, bias).contiguous();
    if (activation == Activation::relu) return preactivation.relu_();
    return Composite::activate(preactivation, activation);
  }

  static std::tuple<Tensor, Tensor> forward_aux(const Tensor& input, const Tensor& weight,
                                                const OptionalTensor& bias, Activation activation) {
    auto [output, aux] = Composite::forward_aux(input, weight, bias, activation);
    return {output.contiguous(), activation == Activation::relu ? aux : pad_rows(aux)};
  }

  static std::tuple<Tensor, Tensor> activation_backward(const Tensor& grad_output,
                                                        const Tensor& saved, Activation activation,
                                                        bool bias_grad) {
    auto [gradient, grad_bias] =
        Composite::activation_backward(grad_output, saved, activation, bias_grad);
    return {gradient.contiguous(), grad_bias};
  }

  static std::tuple<Tensor, Tensor, Tensor> linear_backward(
      const Tensor& grad_output, const Tensor& input, const Tensor& weight,
      const OptionalTensor& saved, Activation activation, std::array<bool, 3> output_mask) {
    auto [grad_input, grad_weight, grad_bias] =
        Composite::linear_backward(grad_output, input, weight, saved, activation, output_mask);
    return {grad_input.contiguous(), grad_weight.contiguous(), grad_bias};
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fused, CPU, m) { register_kernels<Cpu>(m); }

}  // namespace fused
