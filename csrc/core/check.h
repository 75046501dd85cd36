#pragma once

// Argument checks, in one wording: op, what was expected, what was got. Everything is compared
// symbolically, so that the same checks serve real, meta and traced tensors.

#include "core/activation.h"
#include "core/aux_layout.h"

#include <ATen/ATen.h>
#include <ATen/core/List.h>

#include <optional>

namespace fused {

using OptionalTensor = std::optional<Tensor>;

inline bool has_value(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined();
}

// Whether forward-mode AD follows the tensor.
inline bool has_tangent(const Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(0).defined();
}

inline void check_dtype_and_device(const char* op, const char* what, const Tensor& tensor,
                                   const Tensor& input) {
  TORCH_CHECK_TYPE(tensor.scalar_type() == input.scalar_type(), op, ": ", what,
                   " must have the dtype of input, ", input.scalar_type(), ", got ",
                   tensor.scalar_type());
  TORCH_CHECK(tensor.layout() == at::kStrided, op, ": ", what,
              " must be a strided tensor, got layout ", tensor.layout());
  TORCH_CHECK(tensor.device() == input.device(), op, ": ", what,
              " must be on the device of input, ", input.device(), ", got ", tensor.device());
}

inline void check_floating(const char* op, const Tensor& input, const char* what = "input") {
  const auto dtype = input.scalar_type();
  TORCH_CHECK_TYPE(
      dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf || dtype == at::kDouble,
      op, ": ", what, " must have dtype Double, Float, Half or BFloat16, got ", dtype);
  TORCH_CHECK(input.layout() == at::kStrided, op, ": ", what,
              " must be a strided tensor, got layout ", input.layout());
}

inline void check_bias(const char* op, const Tensor& bias, const Tensor& weight) {
  check_dtype_and_device(op, "bias", bias, weight);
  TORCH_CHECK_VALUE(bias.dim() == 1 && bias.sym_size(0) == weight.sym_size(0), op,
                    ": bias must have shape [", weight.sym_size(0), "] to match weight ",
                    weight.sym_sizes(), ", got ", bias.sym_sizes());
}

// input [*, in], weight [out, in], bias [out] or nothing.
inline void check_linear(const char* op, const Tensor& input, const Tensor& weight,
                         const OptionalTensor& bias) {
  check_floating(op, input);
  check_dtype_and_device(op, "weight", weight, input);
  TORCH_CHECK_VALUE(input.dim() >= 1, op,
                    ": input must have shape [..., in_features], got a 0-dimensional tensor");
  const auto in_features = input.sym_size(-1);
  TORCH_CHECK_VALUE(weight.dim() == 2, op, ": weight must have shape [out_features, ", in_features,
                    "], got ", weight.sym_sizes());
  TORCH_CHECK_VALUE(weight.sym_size(1) == in_features, op,
                    ": weight must have shape [out_features, ", in_features,
                    "] to match input [..., ", in_features, "], got ", weight.sym_sizes());
  if (has_value(bias)) check_bias(op, *bias, weight);
}

// input [*, in], weights [hidden, in], [.., hidden] ..., one bias or None for each
inline void check_mlp(const Tensor& input, at::TensorList weights,
                      const c10::List<OptionalTensor>& biases) {
  TORCH_CHECK_VALUE(!weights.empty(), "mlp: weights must hold at least one tensor, got none");
  TORCH_CHECK_VALUE(biases.size() == weights.size(), "mlp: biases must hold a tensor or None for ",
                    "each of the ", weights.size(), " weights, got ", biases.size());
  check_linear("mlp", input, weights[0], biases.get(0));
  for (size_t i = 1; i < weights.size(); ++i) {
    const auto& weight = weights[i];
    check_dtype_and_device("mlp", "weight", weight, input);
    const auto& features = weights[i - 1].sym_size(0);
    TORCH_CHECK_VALUE(weight.dim() == 2 && weight.sym_size(1) == features, "mlp: weight ", i,
                      " must have shape [features, ", features, "] to follow weight ", i - 1, " ",
                      weights[i - 1].sym_sizes(), ", got ", weight.sym_sizes());
    const auto bias = biases.get(i);
    if (has_value(bias)) check_bias("mlp", *bias, weight);
  }
}

// tensor [*leading of like, features]
inline void check_rows(const char* op, const char* what, const Tensor& tensor, const Tensor& like,
                       const c10::SymInt& features) {
  bool same = tensor.dim() == like.dim() && tensor.sym_size(-1) == features;
  for (int64_t d = 0; same && d + 1 < like.dim(); ++d) {
    same = tensor.sym_size(d) == like.sym_size(d);
  }
  TORCH_CHECK_VALUE(same, op, ": ", what, " must have ", features,
                    " features and the leading shape", " of ", like.sym_sizes(), ", got ",
                    tensor.sym_sizes());
}

// What act' of `activation` is read from: ReLU's output or its bit mask, a pre-activation.
inline void check_saved(const char* op, const Tensor& grad_output, const Tensor& saved,
                        Activation activation) {
  const auto kind = saved_for(activation);
  if (kind == Saved::nothing) return;
  TORCH_CHECK(saved.device() == grad_output.device(), op,
              ": saved must be on the device of grad_output, ", grad_output.device(), ", got ",
              saved.device());
  const auto features = grad_output.sym_size(-1);
  if (kind == Saved::output && saved.scalar_type() == at::kByte) {
    check_rows(op, "the ReLU mask", saved, grad_output, mask_bytes(features));
  } else {
    check_dtype_and_device(op, "saved", saved, grad_output);
    check_rows(op, "saved", saved, grad_output, features);
  }
}

inline void check_linear_backward(const char* op, const steps::LinearBackward& layer) {
  check_linear(op, layer.input, layer.weight, {});
  check_dtype_and_device(op, "grad_output", layer.grad_output, layer.input);
  check_rows(op, "grad_output", layer.grad_output, layer.input, layer.weight.sym_size(0));
  if (layer.activation == Activation::none) return;
  TORCH_CHECK_VALUE(has_value(layer.saved), op, ": activation '", name(layer.activation),
                    "' needs saved, the output or the pre-activation, got None");
  check_saved(op, layer.grad_output, *layer.saved, layer.activation);
}

}  // namespace fused
