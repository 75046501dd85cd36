#include "reference/linear.h"

#include "core/explain.h"
#include "dispatch/linear_kernels.h"

namespace fused {

Tensor Composite::activate(const Tensor& preactivation, Activation activation) {
  switch (activation) {
    case Activation::none:
      return preactivation;
    case Activation::relu:
      return at::relu(preactivation);
    case Activation::gelu_tanh:
    case Activation::gelu_erf:
      return at::gelu(preactivation, approximate_of(activation));
  }
  return preactivation;
}

Tensor Composite::forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          Activation activation) {
  return activate(at::linear(input, weight, bias), activation);
}

std::tuple<Tensor, Tensor> Composite::forward_aux(const Tensor& input, const Tensor& weight,
                                                  const OptionalTensor& bias,
                                                  Activation activation) {
  const auto preactivation = at::linear(input, weight, bias);
  const auto output = activate(preactivation, activation);
  if (activation == Activation::relu) return {output, pack_mask(preactivation.detach().ge(0))};
  return {output, preactivation};
}

Tensor Composite::relu_mask(const Tensor& output) { return pack_mask(output.le(0).logical_not()); }

Tensor Composite::activation_gradient(const Tensor& grad_output, const Tensor& saved,
                                      Activation activation) {
  switch (activation) {
    case Activation::none:
      return grad_output;
    case Activation::relu:
      if (saved.scalar_type() == at::kByte) {
        const auto positive = unpack_mask(saved, grad_output.sym_size(-1));
        return grad_output.masked_fill(positive.logical_not(), 0);
      }
      return at::threshold_backward(grad_output, saved, 0);
    case Activation::gelu_tanh:
    case Activation::gelu_erf:
      return at::gelu_backward(grad_output, saved, approximate_of(activation));
  }
  return grad_output;
}

std::tuple<Tensor, Tensor> Composite::activation_backward(const Tensor& grad_output,
                                                          const Tensor& saved,
                                                          Activation activation, bool bias_grad) {
  auto gradient = activation == Activation::none
                      ? grad_output.clone()
                      : activation_gradient(grad_output, saved, activation);
  auto grad_bias = bias_grad ? as_rows(gradient).sum(0) : unwanted(grad_output);
  return {std::move(gradient), std::move(grad_bias)};
}

std::tuple<Tensor, Tensor, Tensor> Composite::linear_backward(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight,
    const OptionalTensor& saved, Activation activation, std::array<bool, 3> output_mask) {
  const auto gradient = activation == Activation::none
                            ? grad_output
                            : activation_gradient(grad_output, *saved, activation);
  const auto rows = as_rows(gradient);
  return {output_mask[0] ? at::matmul(gradient, weight) : unwanted(grad_output),
          output_mask[1] ? at::mm(rows.t(), as_rows(input)) : unwanted(grad_output),
          output_mask[2] ? rows.sum(0) : unwanted(grad_output)};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> Composite::linear_backward_across(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight,
    const OptionalTensor& saved, Activation activation, std::array<bool, 3> output_mask,
    const Tensor& previous_saved, Activation previous, bool previous_bias_grad) {
  output_mask[0] = true;
  const auto [grad_input, grad_weight, grad_bias] =
      linear_backward(grad_output, input, weight, saved, activation, output_mask);
  const auto [dz, grad_previous_bias] =
      activation_backward(grad_input, previous_saved, previous, previous_bias_grad);
  return {dz, grad_weight, grad_bias, grad_previous_bias};
}

Tensor Composite::mlp(const Tensor& input, at::TensorList weights,
                      const c10::List<OptionalTensor>& biases, Activation activation) {
  auto hidden = input;
  for (size_t i = 0; i < weights.size(); ++i) {
    const bool last = i + 1 == weights.size();
    hidden = forward(hidden, weights[i], biases.get(i), last ? Activation::none : activation);
  }
  return hidden;
}

namespace {

// 1, 2, 4 ... 128 on the device of `like`
Tensor bit_values(const Tensor& like) {
  return at::pow(2, at::arange(8, like.options().dtype(at::kByte)));
}

}  // namespace

Tensor pack_mask(const Tensor& positive) {
  const auto features = positive.sym_size(-1);
  const auto padded = gemm::mask_bits(features);
  const auto bits = at::constant_pad_nd_symint(positive.to(at::kByte), {0, padded - features}, 0);
  auto bytes = bits.sym_sizes().vec();
  bytes.back() = padded / 8;
  bytes.push_back(8);
  return (bits.reshape_symint(bytes) * bit_values(positive)).sum(-1, false, at::kByte);
}

Tensor unpack_mask(const Tensor& mask, const c10::SymInt& features) {
  const auto bits = mask.unsqueeze(-1).bitwise_and(bit_values(mask)).ne(0).flatten(-2);
  return bits.narrow_symint(-1, 0, features);
}

Tensor pad_rows(const Tensor& tensor) {
  auto sizes = tensor.sizes().vec();
  const auto features = sizes.back();
  sizes.back() = gemm::padded_features(features);
  if (sizes.back() == features) return tensor.contiguous();
  auto padded = at::zeros(sizes, tensor.options()).narrow(-1, 0, features);
  padded.copy_(tensor);
  return padded;
}

// ---- Reference --------------------------------------------------------------------------------

Tensor Reference::forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          Activation activation) {
  explain::step("reference");
  auto preactivation = at::linear(input, weight, bias).contiguous();
  if (activation == Activation::relu) return preactivation.relu_();
  if (is_gelu(activation)) return at::gelu_(preactivation, approximate_of(activation));
  return preactivation;
}

std::tuple<Tensor, Tensor> Reference::forward_aux(const Tensor& input, const Tensor& weight,
                                                  const OptionalTensor& bias,
                                                  Activation activation) {
  explain::step("reference");
  auto [output, aux] = Composite::forward_aux(input, weight, bias, activation);
  return {output.contiguous(), activation == Activation::relu ? aux : pad_rows(aux)};
}

Tensor Reference::relu_mask(const Tensor& output) {
  explain::step("reference");
  return Composite::relu_mask(output).contiguous();
}

std::tuple<Tensor, Tensor> Reference::activation_backward(const Tensor& grad_output,
                                                          const Tensor& saved,
                                                          Activation activation, bool bias_grad) {
  explain::step("reference");
  auto [gradient, grad_bias] =
      Composite::activation_backward(dense(grad_output), dense(saved), activation, bias_grad);
  return {gradient.contiguous(), grad_bias};
}

std::tuple<Tensor, Tensor, Tensor> Reference::linear_backward(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight,
    const OptionalTensor& saved, Activation activation, std::array<bool, 3> output_mask) {
  explain::step("reference");
  auto [grad_input, grad_weight, grad_bias] = Composite::linear_backward(
      dense(grad_output), input, weight, dense(saved), activation, output_mask);
  return {grad_input.contiguous(), grad_weight.contiguous(), grad_bias};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> Reference::linear_backward_across(
    const Tensor& grad_output, const Tensor& input, const Tensor& weight,
    const OptionalTensor& saved, Activation activation, std::array<bool, 3> output_mask,
    const Tensor& previous_saved, Activation previous, bool previous_bias_grad) {
  explain::step("reference");
  auto [dz, grad_weight, grad_bias, grad_previous_bias] = Composite::linear_backward_across(
      dense(grad_output), input, weight, dense(saved), activation, output_mask,
      dense(previous_saved), previous, previous_bias_grad);
  return {dz.contiguous(), grad_weight.contiguous(), grad_bias, grad_previous_bias};
}

// Under vmap (torch.func, is_grads_batched) torch's own rules batch the formula.
TORCH_LIBRARY_IMPL(fused, FuncTorchBatched, m) { register_kernels<Composite>(m); }

}  // namespace fused
