#pragma once

// `LinearFormula` is the definition in ATen, differentiable, wherever a fused kernel cannot go
// (double backward, torch.func, forward AD); `Linear` gives the same as kernels do.

#include "core/aten_activation.h"
#include "core/check.h"
#include "core/explain.h"
#include "core/policy.h"
#include "core/shapes.h"

namespace fused::reference {

// ATen's products take another kernel for another number of rows.
inline void refuse_formula(const char* op, const Tensor& like, const char* why = nullptr) {
  if (like.sym_numel() == 0) return;
  refuse_batch_dependence(op, like, "tensors that a kernel of this package multiplies",
                          why ? why : "a call that is left to ATen, such as a second derivative");
}

inline Tensor unwanted(const Tensor& like) { return at::empty({0}, like.options()); }

// [*, features] -> [rows, features]. By reshape, as batched gradients have no rule for flatten.
inline Tensor as_rows(const Tensor& tensor) {
  if (tensor.dim() == 2) return tensor;
  c10::SymInt rows = 1;
  for (int64_t d = 0; d + 1 < tensor.dim(); ++d) rows *= tensor.sym_size(d);
  return tensor.reshape_symint({rows, tensor.sym_size(-1)});
}

// The tensor, or where a graph is recorded a copy: torch splits such a graph into forward and
// backward, may keep any view for the backward, and refuses a forward in the body of `scan` whose
// results share memory with its inputs or with each other.
inline Tensor may_be_kept(const Tensor& tensor) {
  return is_traced(tensor) ? tensor.clone(at::MemoryFormat::Contiguous) : tensor;
}
inline Tensor kept_rows(const Tensor& tensor) {
  return tensor.dim() == 2 ? tensor : as_rows(may_be_kept(tensor));
}

// torch's own backward takes these products for a weight and an input of these layouts.
inline Tensor weight_gradient(const Tensor& grad, const Tensor& input, const Tensor& weight) {
  return grad_lies_by_columns(weight) ? at::mm(input.t(), grad).t() : at::mm(grad.t(), input);
}
inline Tensor input_gradient(const Tensor& grad, const Tensor& weight, const Tensor& input) {
  refuse_formula("linear's backward", grad);
  if (grad.dim() == 1) return at::mm(grad.unsqueeze(0), weight).squeeze(0);
  if (!lies_by_columns(input)) return at::matmul(grad, weight);
  return at::mm(weight.t(), as_rows(grad).t()).t().view_symint(input.sym_sizes());
}

// oneDNN, which ATen calls for some of its operators, refuses strides that overlap.
inline Tensor dense(const Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense() ? tensor : tensor.contiguous();
}
inline OptionalTensor dense(const OptionalTensor& tensor) {
  return has_value(tensor) ? OptionalTensor(dense(*tensor)) : std::nullopt;
}

inline Tensor pack_mask(const Tensor& positive) {  // [*, n] bool
  const auto features = positive.sym_size(-1);
  const auto padded = mask_bits(features);
  const auto bits = at::constant_pad_nd_symint(positive.to(at::kByte), {0, padded - features}, 0);
  auto bytes = bits.sym_sizes().vec();
  bytes.back() = padded / 8;
  bytes.push_back(8);
  const auto values = at::pow(2, at::arange(8, bits.options()));
  return (bits.reshape_symint(bytes) * values).sum(-1, false, at::kByte);
}

// Unpacks cuBLASLt's RELU_AUX: eight elements to a byte, lowest first, rows padded to 128 bits.
inline Tensor unpack_mask(const Tensor& mask, const c10::SymInt& features) {
  std::vector<Tensor> bits;  // each by a number, as a plain tensor fits no distributed one
  for (const int bit : {1, 2, 4, 8, 16, 32, 64, 128}) bits.push_back(mask.bitwise_and(bit));
  return at::stack(bits, mask.dim()).ne(0).flatten(-2).narrow_symint(-1, 0, features);
}

// Pads the rows with zeros to 8 elements, as cuBLASLt's GELU_AUX does.
inline Tensor pad_rows(const Tensor& tensor) {
  auto sizes = tensor.sizes().vec();
  const auto features = sizes.back();
  sizes.back() = padded_features(features);
  if (sizes.back() == features) return tensor.contiguous();
  auto padded = at::zeros(sizes, tensor.options()).narrow(-1, 0, features);
  padded.copy_(tensor);
  return padded;
}

// act'(saved) · grad_output, where saved may also be ReLU's bit mask (uint8).
inline Tensor gradient_from_saved(const Tensor& grad_output, const Tensor& saved,
                                  Activation activation) {
  if (saved_for(activation) == Saved::output && saved.scalar_type() == at::kByte) {
    const auto positive = unpack_mask(saved, grad_output.sym_size(-1));
    return grad_output.masked_fill(positive.logical_not(), 0);
  }
  return activation_gradient(grad_output, saved, activation);
}

// A layer's backward, and on into the previous one, as a backend's two steps.
template <class Backend>
Quadruple across(steps::LinearBackward layer, const steps::PreviousLayer& previous) {
  layer.wanted[0] = true;
  const auto [grad_input, grad_weight, grad_bias] = Backend::linear_backward(layer);
  const auto [dz, grad_previous_bias] = Backend::activation_backward(
      grad_input, previous.saved, previous.activation, previous.bias_grad);
  return {dz, grad_weight, grad_bias, grad_previous_bias};
}

// On the meta device torch promotes a sum that it makes in place elsewhere.
inline Tensor aten_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  refuse_formula("linear", input);
  const auto result = at::linear(input, weight, bias);
  return result.is_meta() ? result.to(input.scalar_type()) : result;
}

struct LinearFormula {
  static Tensor forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        Activation activation) {
    return activate(aten_linear(input, weight, bias), activation);
  }

  // -> output and, for ReLU, the bit mask; for GELU the pre-activation
  static Pair forward_aux(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          Activation activation) {
    refuse_formula("linear", input);
    const auto preactivation = at::linear(input, weight, bias);
    const auto output = activate(preactivation, activation);
    if (saved_for(activation) == Saved::output) {
      return {output, pack_mask(preactivation.detach().lt(0).logical_not())};  // NaN passes
    }
    return {output, preactivation};
  }

  // By torch's rule: 0 where output <= 0, so that at 0 no gradient passes, and at NaN it does.
  static Tensor relu_mask(const Tensor& output) { return pack_mask(output.le(0).logical_not()); }

  static Pair activation_backward(const Tensor& grad_output, const Tensor& saved,
                                  Activation activation, bool bias_grad) {
    auto gradient = activation == Activation::none
                        ? grad_output.clone(at::MemoryFormat::Contiguous)
                        : gradient_from_saved(grad_output, saved, activation);
    auto grad_bias = bias_grad ? as_rows(gradient).sum(0) : unwanted(grad_output);
    return {std::move(gradient), std::move(grad_bias)};
  }

  static Triple linear_backward(const steps::LinearBackward& layer) {
    const auto gradient =
        layer.activation == Activation::none
            ? layer.grad_output
            : gradient_from_saved(layer.grad_output, *layer.saved, layer.activation);
    const auto none = [&] { return unwanted(layer.grad_output); };
    if (layer.weight.dim() == 3) {
      refuse_formula("ensemble_linear's backward", layer.grad_output);
      explain::append(explain::not_fused);
      return {layer.wanted[0] ? at::bmm(gradient, layer.weight) : none(),
              layer.wanted[1] ? at::bmm(gradient.mT(), layer.input) : none(),
              layer.wanted[2] ? gradient.sum(1) : none()};
    }
    const auto rows = as_rows(gradient);
    return {layer.wanted[0] ? input_gradient(gradient, layer.weight, layer.input) : none(),
            layer.wanted[1] ? reference::weight_gradient(rows, kept_rows(layer.input), layer.weight)
                            : none(),
            layer.wanted[2] ? rows.sum(0) : none()};
  }

  static void weight_gradient(const Tensor& grad_output, const OptionalTensor& input,
                              const Tensor& into, bool adds) {
    const auto grad = as_rows(grad_output);
    if (has_value(input) && adds && into.scalar_type() == grad.scalar_type()) {
      into.addmm_(grad.t(), as_rows(*input));
      return;
    }
    const auto gradient = has_value(input) ? reference::weight_gradient(grad, as_rows(*input), into)
                                           : grad.sum(0, /*keepdim=*/false, into.scalar_type());
    adds ? into.add_(gradient) : into.copy_(gradient);
  }

  static Quadruple linear_backward_across(const steps::LinearBackward& layer,
                                          const steps::PreviousLayer& previous) {
    return across<LinearFormula>(layer, previous);
  }

  // -> output [members, tokens, out] and, where act' is read from it, the pre-activation
  static Pair ensemble(const Tensor& input,         // [members, tokens, in]
                       const Tensor& weight,        // [members, out, in]
                       const OptionalTensor& bias,  // [members, out]
                       Activation activation) {
    refuse_formula("ensemble_linear", input);
    explain::append(explain::not_fused);
    const auto z = has_value(bias) ? at::baddbmm(bias->unsqueeze(1), input, weight.mT())
                                   : at::bmm(input, weight.mT());
    const bool keeps = saved_for(activation) == Saved::preactivation;
    return {activate(z, activation), keeps ? z : unwanted(z)};
  }
};

// Gives results in the layout of core/shapes.h, nothing aliased, under the policy "eager", on the
// CPU, and where a kernel gives up.
struct Linear {
  static constexpr bool obeys_policy = true;

  static Tensor forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        Activation activation) {
    explain::append(explain::not_fused);
    const auto result = aten_linear(input, weight, bias).contiguous();
    activate_out(result, result, activation);
    return result;
  }

  static Pair forward_aux(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          Activation activation) {
    explain::append(explain::not_fused);
    auto [output, aux] = LinearFormula::forward_aux(input, weight, bias, activation);
    return {output.contiguous(), saved_for(activation) == Saved::output ? aux : pad_rows(aux)};
  }

  static Tensor relu_mask(const Tensor& output) {
    explain::append(explain::not_fused);
    return LinearFormula::relu_mask(output).contiguous();
  }

  static Pair activation_backward(const Tensor& grad_output, const Tensor& saved,
                                  Activation activation, bool bias_grad) {
    explain::append(explain::not_fused);
    auto [gradient, grad_bias] =
        LinearFormula::activation_backward(dense(grad_output), dense(saved), activation, bias_grad);
    return {gradient.contiguous(), grad_bias};
  }

  static Triple linear_backward(const steps::LinearBackward& layer) {
    explain::append(explain::not_fused);
    auto [grad_input, grad_weight, grad_bias] =
        LinearFormula::linear_backward({dense(layer.grad_output), layer.input, layer.weight,
                                        dense(layer.saved), layer.activation, layer.wanted});
    const bool by_columns = layer.wanted[0] && lies_by_columns(layer.input);
    return {by_columns ? grad_input : grad_input.contiguous(), grad_weight, grad_bias};
  }

  static void weight_gradient(const Tensor& grad_output, const OptionalTensor& input,
                              const Tensor& into, bool adds) {
    explain::append(explain::not_fused);
    LinearFormula::weight_gradient(grad_output, input, into, adds);
  }

  static Quadruple linear_backward_across(const steps::LinearBackward& layer,
                                          const steps::PreviousLayer& previous) {
    explain::append(explain::not_fused);
    auto [dz, grad_weight, grad_bias, grad_previous_bias] = LinearFormula::linear_backward_across(
        {dense(layer.grad_output), layer.input, layer.weight, dense(layer.saved), layer.activation,
         layer.wanted},
        {dense(previous.saved), previous.activation, previous.bias_grad});
    return {dz.contiguous(), grad_weight, grad_bias, grad_previous_bias};
  }
};

// Checks sizes and dtypes that torch refuses, but may not notice on the meta device or in Python.
inline void check_sizes_and_dtypes(const char* op, const Tensor& input, const Tensor& weight,
                                   const OptionalTensor& bias) {
  for (const auto& tensor : {input, weight}) {
    if (tensor.is_nested() || tensor.layout() != at::kStrided) return;
  }
  const auto dim = weight.dim();
  TORCH_CHECK(input.dim() >= 1 && (dim == 1 || dim == 2) &&
                  weight.sym_size(-1) == input.sym_size(-1) &&
                  weight.scalar_type() == input.scalar_type(),
              describe_linear(op, input, weight, bias));
}

inline Tensor in_torchs_words(const char* op, const Tensor& input, const Tensor& weight,
                              const OptionalTensor& bias, Activation activation) {
  check_sizes_and_dtypes(op, input, weight, bias);
  refuse_formula(op, input);
  return in_context([&] { return LinearFormula::forward(input, weight, bias, activation); },
                    [&] { return describe_linear(op, input, weight, bias); });
}

// Does what no kernel of ours takes, or torch has to differentiate (no objection), by torch's own
// functions, whose errors say the arguments besides.
inline Tensor as_torch_does(const char* op, const char* objection, const Tensor& input,
                            const Tensor& weight, const OptionalTensor& bias,
                            Activation activation) {
  check_devices(op, input, weight, bias);
  const explain::Row row(op, input, weight);
  explain::append(objection);
  explain::append(explain::not_fused);
  refuse_formula(op, input, objection);
  return in_torchs_words(op, input, weight, bias, activation);
}

inline Tensor mlp_as_torch_does(const char* objection, const Tensor& input, at::TensorList weights,
                                const c10::List<OptionalTensor>& biases, Activation activation) {
  const auto name_of = [](size_t layer) { return "mlp, layer " + std::to_string(layer); };
  for (size_t i = 0; i < weights.size(); ++i) {
    check_devices(name_of(i).c_str(), input, weights[i], biases.get(i));
  }
  const explain::Row row("mlp", input, weights[0]);
  explain::append(objection);
  explain::append(explain::not_fused);
  refuse_formula("mlp", input, objection);
  auto hidden = input;
  for (size_t i = 0; i < weights.size(); ++i) {
    const bool last = i + 1 == weights.size();
    hidden = in_torchs_words(name_of(i).c_str(), hidden, weights[i], biases.get(i),
                             last ? Activation::none : activation);
  }
  return hidden;
}

}  // namespace fused::reference
