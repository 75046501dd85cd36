#pragma once

// Argument checks in one wording, symbolic so that they serve real, meta and traced tensors.

#include "core/activation.h"
#include "fused_linear.h"

#include <ATen/ATen.h>
#include <ATen/core/List.h>

#include <optional>
#include <sstream>
#include <string>
#include <string_view>

namespace fused {

using OptionalTensor = std::optional<Tensor>;
using Pair = std::tuple<Tensor, Tensor>;
using Triple = std::tuple<Tensor, Tensor, Tensor>;
using Quadruple = std::tuple<Tensor, Tensor, Tensor, Tensor>;
using Quintuple = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor>;

inline bool has_value(const OptionalTensor& tensor) {
  return tensor.has_value() && tensor->defined();
}

// Tells whether forward-mode AD follows the tensor.
inline bool has_tangent(const Tensor& tensor) {
  return tensor.defined() && tensor._fw_grad(0).defined();
}

inline bool is_supported(at::ScalarType dtype) {
  return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf ||
         dtype == at::kDouble;
}

// Why no kernel of ours takes the tensor, or nullptr.
inline const char* objection(const Tensor& tensor) {
  if (tensor.is_nested()) return "(no kernel: nested tensor)";
  if (tensor.layout() != at::kStrided) return "(no kernel: layout)";
  return is_supported(tensor.scalar_type()) ? nullptr : "(no kernel: dtype)";
}

// Says the same of a layer of `features` inputs. This is the whole check of a layer's arguments:
// torch's own functions go on with what it objects to, or raise. Torch does not notice everywhere
// that a tensor on the meta device has no data.
inline const char* objection(const Tensor& input, const c10::SymInt& features, const Tensor& weight,
                             const OptionalTensor& bias) {
  constexpr auto dtypes = "(no kernel: dtypes differ)", devices = "(no kernel: devices differ)";
  if (const char* why = objection(weight)) return why;
  if (weight.scalar_type() != input.scalar_type()) return dtypes;
  if (weight.dim() != 2 || weight.sym_size(1) != features) return "(no kernel: shape of weight)";
  if (weight.device() != input.device()) return devices;
  if (!has_value(bias)) return nullptr;
  if (const char* why = objection(*bias)) return why;
  if (bias->scalar_type() != input.scalar_type()) return dtypes;
  const bool fits = bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0);
  if (!fits) return "(no kernel: shape of bias)";
  return bias->device() == input.device() ? nullptr : devices;
}

inline const char* objection(const Tensor& input, const Tensor& weight,
                             const OptionalTensor& bias) {
  if (const char* why = objection(input)) return why;
  if (input.dim() < 1) return "(no kernel: shape of input)";
  return objection(input, input.sym_size(-1), weight, bias);
}

inline const char* objection(const Tensor& input, at::TensorList weights,
                             const c10::List<OptionalTensor>& biases) {
  if (const char* why = objection(input, weights[0], biases.get(0))) return why;
  for (size_t i = 1; i < weights.size(); ++i) {
    const char* why = objection(input, weights[i - 1].sym_size(0), weights[i], biases.get(i));
    if (why != nullptr) return why;
  }
  return nullptr;
}

// How much a layer keeps for its backward if there is a choice.
enum class Memory {
  standard,  // whatever makes the step fastest, never more than torch keeps
  low,       // only what the backward cannot recompute, bit for bit
  compiled,  // of a gated layer: its result too; the backward's pass is ATen's, for a compiler
};

inline Memory parse_memory(const char* op, std::string_view text, bool is_gated = false) {
  if (text == "default") return Memory::standard;
  if (text == "low") return Memory::low;
  if (text == "compiled" && is_gated) return Memory::compiled;
  TORCH_CHECK_VALUE(false, op, ": memory must be 'default' or 'low', got '", text, "'");
}

[[noreturn]] inline void throw_unknown_activation(const char* op, std::string_view text,
                                                  bool hidden) {
  std::ostringstream expected;
  for (const auto activation : activations) {
    if (hidden && activation == Activation::none) continue;
    const bool first = expected.tellp() == 0, last = activation == *std::rbegin(activations);
    expected << (first ? "'" : last ? " or '" : ", '") << name(activation) << '\'';
  }
  const auto* two = text == "gelu" ? ": GELU is 'gelu_tanh' or, as nn.GELU() is, 'gelu_erf'" : "";
  TORCH_CHECK_VALUE(false, op, ": activation must be ", expected.str(), ", got '", text, "'", two);
}

// A hidden activation stands between two layers and cannot be none.
inline Activation parse_activation(const char* op, std::string_view text, bool hidden = false) {
  for (const auto activation : activations) {
    if (hidden && activation == Activation::none) continue;
    if (text == name(activation)) return activation;
  }
  throw_unknown_activation(op, text, hidden);
}

inline Activation parse_hidden_activation(const char* op, std::string_view text) {
  return parse_activation(op, text, /*hidden=*/true);
}

// The activation with this number, the argument of a private operator.
inline Activation activation_of(const char* op, int64_t given, const char* what = "activation",
                                bool hidden = false) {
  const auto least = number(activations[hidden ? 1 : 0]), most = number(*std::rbegin(activations));
  TORCH_CHECK_VALUE(least <= given && given <= most, op, ": ", what, " must be a number from ",
                    least, " to ", most, ", got ", given);
  return activations[given];
}

inline Activation hidden_activation_of(const char* op, int64_t given,
                                       const char* what = "activation") {
  return activation_of(op, given, what, /*hidden=*/true);
}

// torch.nn.functional.gelu's argument.
inline Activation parse_approximate(const char* op, std::string_view approximate) {
  if (approximate == "tanh") return Activation::gelu_tanh;
  if (approximate == "none") return Activation::gelu_erf;
  TORCH_CHECK_VALUE(false, op, ": approximate must be 'tanh' or 'none', got '", approximate, "'");
}

inline std::string describe(const OptionalTensor& tensor) {
  if (!has_value(tensor)) return "None";
  std::ostringstream text;
  text << tensor->scalar_type() << ' ';
  text << (tensor->is_nested() ? "(nested)" : c10::str(tensor->sym_sizes()));
  if (tensor->layout() != at::kStrided) text << ' ' << tensor->layout();
  text << " on " << tensor->device();
  return text.str();
}

inline std::string describe_linear(const char* op, const Tensor& input, const Tensor& weight,
                                   const OptionalTensor& bias) {
  return std::string(op) +
         ": expected input [*, in], weight [out, in] and bias [out] or None, of one dtype and "
         "device, got input " +
         describe(input) + ", weight " + describe(weight) + ", bias " + describe(bias);
}

// Runs what is torch's own. Its error keeps class and words, and says besides what `text` gives.
template <typename Run, typename Text>
auto in_context(const Run& run, const Text& text) {
  try {
    return run();
  } catch (c10::Error& error) {
    error.add_context(text());
    throw;
  }
}

inline void check_device(const char* op, const char* what, const Tensor& tensor,
                         const Tensor& input) {
  TORCH_CHECK_TYPE(tensor.defined() && input.defined(), op, ": expected input and ", what,
                   " to be tensors, got None");
  TORCH_CHECK(tensor.device() == input.device(), op, ": ", what,
              " must be on the device of input, ", input.device(), ", got ", tensor.device());
}

// The device of a bias of no dimensions is torch's to judge.
inline void check_devices(const char* op, const Tensor& input, const Tensor& weight,
                          const OptionalTensor& bias) {
  check_device(op, "weight", weight, input);
  if (has_value(bias) && bias->dim() > 0) check_device(op, "bias", *bias, input);
}

inline void check_dtype_and_device(const char* op, const char* what, const Tensor& tensor,
                                   const Tensor& input) {
  TORCH_CHECK(tensor.scalar_type() == input.scalar_type(), op, ": ", what,
              " must have the dtype of input, ", input.scalar_type(), ", got ",
              tensor.scalar_type());
  TORCH_CHECK(tensor.layout() == at::kStrided, op, ": ", what,
              " must be a strided tensor, got layout ", tensor.layout());
  check_device(op, what, tensor, input);
}

inline void check_floating(const char* op, const Tensor& input, const char* what = "input") {
  TORCH_CHECK_NOT_IMPLEMENTED(is_supported(input.scalar_type()), op, ": ", what,
                              " must have dtype Double, Float, Half or BFloat16, got ",
                              input.scalar_type());
  TORCH_CHECK(input.layout() == at::kStrided, op, ": ", what,
              " must be a strided tensor, got layout ", input.layout());
}

inline void check_bias(const char* op, const Tensor& bias, const Tensor& weight) {
  check_dtype_and_device(op, "bias", bias, weight);
  TORCH_CHECK(bias.dim() == 1 && bias.sym_size(0) == weight.sym_size(0), op,
              ": bias must have shape [", weight.sym_size(0), "] to match weight ",
              weight.sym_sizes(), ", got ", bias.sym_sizes());
}

// Checks the arguments of a step. Torch has no function for it that could raise.
inline void check_linear(const char* op, const Tensor& input, const Tensor& weight,
                         const OptionalTensor& bias) {
  TORCH_CHECK(objection(input, weight, bias) == nullptr, describe_linear(op, input, weight, bias));
}

inline void check_ensemble(const char* op, const Tensor& input, const Tensor& weight,
                           const OptionalTensor& bias) {
  const auto of_each = [&](const Tensor& tensor, int64_t dim, const c10::SymInt& last) {
    return objection(tensor) == nullptr && tensor.dim() == dim &&
           tensor.sym_size(0) == input.sym_size(0) && tensor.sym_size(-1) == last &&
           tensor.scalar_type() == input.scalar_type() && tensor.device() == input.device();
  };
  TORCH_CHECK(objection(input) == nullptr && input.dim() == 3 &&
                  of_each(weight, 3, input.sym_size(2)) &&
                  (!has_value(bias) || of_each(*bias, 2, weight.sym_size(1))),
              op, ": expected input [members, tokens, in], weight [members, out, in] and bias ",
              "[members, out] or None, of one dtype and device, got input ", describe(input),
              ", weight ", describe(weight), ", bias ", describe(bias));
}

inline void check_mlp(const char* op, at::TensorList weights,
                      const c10::List<OptionalTensor>& biases) {
  TORCH_CHECK_VALUE(!weights.empty(), op, ": weights must hold at least one tensor, got none");
  TORCH_CHECK_VALUE(biases.size() == weights.size(), op, ": biases must hold a tensor or None for ",
                    "each of the ", weights.size(), " weights, got ", biases.size());
}

// tensor [*leading of like, features]
inline void check_rows(const char* op, const char* what, const Tensor& tensor, const Tensor& like,
                       const c10::SymInt& features) {
  bool same = tensor.dim() == like.dim() && tensor.sym_size(-1) == features;
  for (int64_t d = 0; same && d + 1 < like.dim(); ++d) {
    same = tensor.sym_size(d) == like.sym_size(d);
  }
  TORCH_CHECK(same, op, ": ", what, " must have ", features, " features and the leading shape of ",
              like.sym_sizes(), ", got ", tensor.sym_sizes());
}

// Checks the tensor that act' is read from: ReLU's output or bit mask, else a pre-activation.
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

inline void check_gradient_and_saved(const char* op, const steps::LinearBackward& layer) {
  check_dtype_and_device(op, "grad_output", layer.grad_output, layer.input);
  check_rows(op, "grad_output", layer.grad_output, layer.input, layer.weight.sym_size(-2));
  if (layer.activation == Activation::none) return;
  TORCH_CHECK_VALUE(has_value(layer.saved), op, ": activation '", name(layer.activation),
                    "' needs saved, the output or the pre-activation, got None");
  check_saved(op, layer.grad_output, *layer.saved, layer.activation);
}

inline void check_linear_backward(const char* op, const steps::LinearBackward& layer) {
  check_linear(op, layer.input, layer.weight, {});
  check_gradient_and_saved(op, layer);
}

inline void check_ensemble_backward(const char* op, const steps::LinearBackward& layer) {
  check_ensemble(op, layer.input, layer.weight, {});
  check_gradient_and_saved(op, layer);
}

inline void check_weight_gradient(const char* op, const Tensor& grad_output,
                                  const OptionalTensor& input, const Tensor& into) {
  const auto& rows = has_value(input) ? *input : grad_output;
  check_floating(op, rows);
  check_dtype_and_device(op, "grad_output", grad_output, rows);
  check_device(op, "into", into, rows);
  TORCH_CHECK(rows.dim() >= 1 && grad_output.dim() >= 1, op,
              ": input and grad_output must have shape [..., features]");
  check_rows(op, "grad_output", grad_output, rows, grad_output.sym_size(-1));
  c10::SymDimVector sizes{grad_output.sym_size(-1)};
  if (has_value(input)) sizes.push_back(input->sym_size(-1));
  TORCH_CHECK(into.sym_sizes().equals(sizes) && into.layout() == at::kStrided &&
                  (into.is_contiguous() || into.t().is_contiguous()) &&
                  (into.scalar_type() == rows.scalar_type() ||
                   (into.scalar_type() == at::kFloat && rows.element_size() == 2)),
              op, ": into must be ", c10::SymIntArrayRef(sizes), " without gaps, of the dtype of ",
              "grad_output, ", rows.scalar_type(), ", or Float for 16 bits, got ", describe(into));
}

}  // namespace fused
