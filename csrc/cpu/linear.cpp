// The linear operators on the CPU: oneDNN if it is faster and as exact, else the formula.

#include "reference/linear.h"
#include "core/aten_activation.h"
#include "core/shapes.h"
#include "cpu/one_pass.h"
#include "cpu/onednn.h"
#include "cpu/packed_weights.h"
#include "cpu/relu_mask.h"
#include "dispatch/linear_kernels.h"

namespace fused::cpu {
namespace {

using reference::as_rows, reference::dense;
using S = Shapes<ConcreteAllocator>;

bool takes_product(const Tensor& input, const Tensor& weight) {
  return input.numel() > 0 &&
         onednn::takes_product(input.scalar_type(), input.numel() / weight.size(1), weight.size(1),
                               weight.size(0));
}

int64_t rows_of(const Tensor& input) { return input.numel() / input.size(-1); }

// Multiplies rows with the weight in parts, and uses packed parts of the weight if there are any.
void multiply_with_weight(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          onednn::Finish finish) {
  const auto packed =
      packed::find(weight, [&] { return onednn::pack(onednn::parts_of(weight), rows_of(input)); });
  explain::append(packed ? "oneDNN product in parts, packed" : "oneDNN product in parts");
  onednn::product(as_rows(dense(input)), packed ? *packed : onednn::parts_of(weight), bias, finish);
}

void multiply_into(Tensor result, const Tensor& left, const Tensor& right, bool adds = false) {
  if (!onednn::takes_product(left.scalar_type(), left.size(0), left.size(1), right.size(0))) {
    explain::append(adds ? "ATen addmm" : "ATen mm");
    adds ? at::addmm_out(result, result, left, right.t()) : at::mm_out(result, left, right.t());
    return;
  }
  explain::append("oneDNN product in parts");
  onednn::product(left, onednn::parts_of(right), {}, [&](const Tensor& some, int64_t first) {
    const auto rows = result.narrow(0, first, some.size(0));
    adds ? rows.add_(some) : rows.copy_(some);
  });
}

// Writes gradᵀ · input into `result`, by rows or by columns, or adds it.
void multiply_gradient_into(const Tensor& result, const Tensor& grad, const Tensor& input,
                            bool by_columns, bool adds = false) {
  if (by_columns) {
    multiply_into(result.t(), input.t(), grad.t(), adds);
  } else {
    multiply_into(result, grad.t(), input.t(), adds);
  }
}

struct Linear : reference::Linear {
  using Reference = reference::Linear;

  static Tensor forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        Activation activation) {
    if (onednn::takes_packed_linear(input, weight)) {
      const auto pack = [&] { return onednn::pack({weight}, rows_of(input)); };
      if (const auto packed = packed::find(weight, pack)) {
        explain::append("oneDNN linear, packed");
        return onednn::packed_linear(input, packed->front(), bias, activation);
      }
    }
    if (onednn::takes_linear_gelu(input, weight, bias, activation)) {
      explain::append("oneDNN linear with post-op");
      return onednn::linear_gelu(input, weight, bias, activation);
    }
    if (!takes_product(input, weight)) return Reference::forward(input, weight, bias, activation);
    const auto output = S::output(input, weight);
    const auto rows = as_rows(output);
    multiply_with_weight(input, weight, bias, [&](const Tensor& some, int64_t first) {
      activate_out(rows.narrow(0, first, some.size(0)), some, activation);
    });
    if (activation != Activation::none) explain::append("ATen activation");
    return output;
  }

  static Pair forward_aux(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          Activation activation) {
    if (saved_for(activation) != Saved::preactivation || !takes_product(input, weight)) {
      return Reference::forward_aux(input, weight, bias, activation);
    }
    const auto output = S::output(input, weight);
    const auto preactivation = with_zero_padding(S::preactivation(output));
    const auto output_rows = as_rows(output), preactivation_rows = as_rows(preactivation);
    multiply_with_weight(input, weight, bias, [&](const Tensor& some, int64_t first) {
      preactivation_rows.narrow(0, first, some.size(0)).copy_(some);
      activate_out(output_rows.narrow(0, first, some.size(0)), some, activation);
    });
    explain::append("ATen activation");
    return {output, preactivation};
  }

  static Tensor relu_mask(const Tensor& output) {
    explain::append("own mask kernel");
    const auto mask = S::mask(output);
    write_relu_mask(mask, output.contiguous());
    return mask;
  }

  static Pair activation_backward(const Tensor& grad_output, const Tensor& saved,
                                  Activation activation, bool bias_grad) {
    if (!has_own_gradient(grad_output, saved, activation)) {
      return Reference::activation_backward(grad_output, saved, activation, bias_grad);
    }
    const auto dz = S::grad_input(grad_output, true);
    const auto rows = as_rows(dz), grad = as_rows(grad_output.contiguous()),
               kept = as_rows(saved.contiguous());
    if (takes_one_pass(grad_output, saved, activation)) {
      explain::append("activation gradient and bias sum in one pass");
      return {dz, sum_of_parts(one_pass(rows, grad, kept, activation, bias_grad), dz)};
    }
    explain::append("activation gradient from bits");
    apply_relu_mask(rows, grad, kept);
    if (!bias_grad) return {dz, S::unwanted(dz)};
    explain::append("ATen sum");
    return {dz, rows.sum(0)};
  }

  static Triple linear_backward(const steps::LinearBackward& layer) {
    if (!pays(layer)) return Reference::linear_backward(layer);
    auto dz = dense(layer.grad_output);
    auto grad_bias = S::unwanted(dz);
    if (layer.activation != Activation::none) {
      std::tie(dz, grad_bias) =
          activation_backward(layer.grad_output, *layer.saved, layer.activation, layer.wanted[2]);
    } else if (layer.wanted[2]) {
      explain::append("ATen sum");
      grad_bias = as_rows(dz).sum(0);
    }
    const auto grad_input = S::grad_input(layer.input, layer.wanted[0]);
    const auto grad_weight = S::grad_weight(layer.weight, layer.wanted[1]);
    if (layer.wanted[0]) multiply_into(as_rows(grad_input), as_rows(dz), layer.weight.t());
    if (layer.wanted[1]) {
      multiply_gradient_into(grad_weight, as_rows(dz), as_rows(layer.input),
                             grad_lies_by_columns(layer.weight));
    }
    return {grad_input, grad_weight, grad_bias};
  }

  static void weight_gradient(const Tensor& grad_output, const OptionalTensor& input,
                              const Tensor& into, bool adds) {
    if (!has_value(input) || into.scalar_type() != input->scalar_type() || input->numel() == 0) {
      Reference::weight_gradient(grad_output, input, into, adds);
      return;
    }
    multiply_gradient_into(into, as_rows(dense(grad_output)), as_rows(*input),
                           grad_lies_by_columns(into), adds);
  }

  static Quadruple linear_backward_across(const steps::LinearBackward& layer,
                                          const steps::PreviousLayer& previous) {
    auto on = layer;
    on.wanted[0] = true;
    if (!pays(on) && !has_own_gradient(layer.input, previous.saved, previous.activation)) {
      return Reference::linear_backward_across(layer, previous);
    }
    return reference::across<Linear>(layer, previous);
  }

 private:
  // Returns whether the activation's gradient is not left to the reference.
  static bool has_own_gradient(const Tensor& grad, const Tensor& saved, Activation activation) {
    const bool bits = saved_for(activation) == Saved::output && saved.scalar_type() == at::kByte;
    return bits || takes_one_pass(grad, saved, activation);
  }

  // Returns whether any step is not left to the reference.
  static bool pays(const steps::LinearBackward& layer) {
    if (layer.input.numel() == 0 || layer.grad_output.numel() == 0) return false;
    if (layer.wanted[0] && lies_by_columns(layer.input)) return false;
    const auto type = layer.input.scalar_type();
    const int64_t features = layer.weight.size(0), inputs = layer.weight.size(1),
                  rows = layer.input.numel() / inputs;
    return (layer.activation != Activation::none &&
            has_own_gradient(layer.grad_output, *layer.saved, layer.activation)) ||
           (layer.wanted[0] && onednn::takes_product(type, rows, features, inputs)) ||
           (layer.wanted[1] && onednn::takes_product(type, features, rows, inputs));
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fused, CPU, m) { dispatch::register_linear<Linear>(m); }

}  // namespace fused::cpu
