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

bool onednn_bf16() {
  static const bool supported = [] {
    const auto op =
        c10::Dispatcher::singleton().findSchema({"mkldnn::_is_mkldnn_bf16_supported", ""});
    return op && op->typed<bool()>().call();
  }();
  return supported;
}

// A call of oneDNN costs some 10 us whatever its size, as much as PyTorch's own BLAS needs for this
// many multiplications with the activation behind it; for 16 bits PyTorch itself calls oneDNN.
int64_t least_work(at::ScalarType type, Activation activation) {
  if (type == at::kBFloat16) return int64_t{1} << 15;
  return int64_t{1} << (activation == Activation::relu ? 22 : 20);
}

bool onednn_takes(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                  Activation activation) {
  if (activation == Activation::none || !at::globalContext().userEnabledMkldnn()) return false;
  const auto type = input.scalar_type();
  if (type != at::kFloat && !(type == at::kBFloat16 && onednn_bf16())) return false;
  if (has_value(bias) && !bias->is_contiguous()) return false;
  return input.numel() * weight.size(0) >= least_work(type, activation);
}

struct Cpu {
  static Tensor forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        Activation activation) {
    static const auto pointwise = onednn_linear();
    if (pointwise && onednn_takes(input, weight, bias, activation)) {
      explain::step("oneDNN linear with post-op");
      const bool relu = activation == Activation::relu;
      return pointwise->call(
          input, weight, bias, relu ? "relu" : "gelu", c10::List<std::optional<at::Scalar>>(),
          relu ? std::nullopt : std::optional<std::string_view>(approximate_of(activation)));
    }
    explain::step("reference");
    auto preactivation = at::linear(input, weight, bias).contiguous();
    if (activation == Activation::relu) return preactivation.relu_();
    return Composite::activate(preactivation, activation);
  }

  static std::tuple<Tensor, Tensor> forward_aux(const Tensor& input, const Tensor& weight,
                                                const OptionalTensor& bias, Activation activation) {
    explain::step("reference");
    auto [output, aux] = Composite::forward_aux(input, weight, bias, activation);
    return {output.contiguous(), activation == Activation::relu ? aux : pad_rows(aux)};
  }

  static std::tuple<Tensor, Tensor> activation_backward(const Tensor& grad_output,
                                                        const Tensor& saved, Activation activation,
                                                        bool bias_grad) {
    explain::step("reference");
    auto [gradient, grad_bias] =
        Composite::activation_backward(grad_output, saved, activation, bias_grad);
    return {gradient.contiguous(), grad_bias};
  }

  static std::tuple<Tensor, Tensor, Tensor> linear_backward(
      const Tensor& grad_output, const Tensor& input, const Tensor& weight,
      const OptionalTensor& saved, Activation activation, std::array<bool, 3> output_mask) {
    explain::step("reference");
    auto [grad_input, grad_weight, grad_bias] =
        Composite::linear_backward(grad_output, input, weight, saved, activation, output_mask);
    return {grad_input.contiguous(), grad_weight.contiguous(), grad_bias};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> linear_backward_across(
      const Tensor& grad_output, const Tensor& input, const Tensor& weight,
      const OptionalTensor& saved, Activation activation, std::array<bool, 3> output_mask,
      const Tensor& previous_saved, Activation previous, bool previous_bias_grad) {
    explain::step("reference");
    auto [dz, grad_weight, grad_bias, grad_previous_bias] = Composite::linear_backward_across(
        grad_output, input, weight, saved, activation, output_mask, previous_saved, previous,
        previous_bias_grad);
    return {dz.contiguous(), grad_weight.contiguous(), grad_bias, grad_previous_bias};
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fused, CPU, m) { register_kernels<Cpu>(m); }

}  // namespace fused
