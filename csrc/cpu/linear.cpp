// CPU kernels. oneDNN does what it does quicker than PyTorch's own way and as exactly; everything
// else is the formula, through the same autograd nodes as on a GPU.

#include "reference/linear.h"
#include "cpu/activation_backward.h"
#include "cpu/onednn.h"
#include "cpu/packed_weights.h"
#include "cpu/relu_mask.h"
#include "dispatch/linear_kernels.h"

namespace fused {
namespace {

void activate_into(Tensor output, const Tensor& preactivation, Activation activation) {
  switch (activation) {
    case Activation::none:
      output.copy_(preactivation);
      return;
    case Activation::relu:
      at::clamp_min_out(output, preactivation, 0);  // relu itself, NaN and all
      return;
    case Activation::gelu_tanh:
    case Activation::gelu_erf:
      at::gelu_out(output, preactivation, approximate_of(activation));
      return;
  }
}

Tensor empty_rows(const Tensor& like, int64_t features) {
  auto sizes = like.sizes().vec();
  sizes.back() = features;
  return at::empty(sizes, like.options());
}

bool takes_product(const Tensor& input, const Tensor& weight) {
  return input.numel() > 0 &&
         onednn::takes_product(input.scalar_type(), input.numel() / weight.size(1), weight.size(1),
                               weight.size(0));
}

int64_t rows_of(const Tensor& input) { return input.numel() / input.size(-1); }

// The product of the rows with the weight, in parts, the weight's packed where they are kept.
void multiply_with_weight(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          onednn::Finish finish) {
  const auto packed =
      packed::find(weight, [&] { return onednn::pack(onednn::parts_of(weight), rows_of(input)); });
  explain::step(packed ? "oneDNN product in parts, packed" : "oneDNN product in parts");
  onednn::product(as_rows(dense(input)), packed ? *packed : onednn::parts_of(weight), bias, finish);
}

// left · rightᵀ, into `result`
void multiply_into(Tensor result, const Tensor& left, const Tensor& right) {
  if (!onednn::takes_product(left.scalar_type(), left.size(0), left.size(1), right.size(0))) {
    explain::step("ATen mm");
    at::mm_out(result, left, right.t());
    return;
  }
  explain::step("oneDNN product in parts");
  onednn::product(left, onednn::parts_of(right), {}, [&](const Tensor& some, int64_t first) {
    result.narrow(0, first, some.size(0)).copy_(some);
  });
}

Tensor sum_of_parts(const Tensor& parts, const Tensor& like) {
  return parts.defined() ? parts.sum(0).to(like.scalar_type()) : unwanted(like);
}

struct Cpu : Reference {
  static Tensor forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        Activation activation) {
    if (onednn::takes_packed_linear(input, weight)) {
      const auto pack = [&] { return onednn::pack({weight}, rows_of(input)); };
      if (const auto packed = packed::find(weight, pack)) {
        explain::step("oneDNN linear, packed");
        return onednn::packed_linear(input, packed->front(), bias, activation);
      }
    }
    if (onednn::takes_linear_gelu(input, weight, bias, activation)) {
      explain::step("oneDNN linear with post-op");
      return onednn::linear_gelu(input, weight, bias, activation);
    }
    if (!takes_product(input, weight)) return Reference::forward(input, weight, bias, activation);
    const auto output = empty_rows(input, weight.size(0));
    const auto rows = as_rows(output);
    multiply_with_weight(input, weight, bias, [&](const Tensor& some, int64_t first) {
      activate_into(rows.narrow(0, first, some.size(0)), some, activation);
    });
    if (activation != Activation::none) explain::step("ATen activation");
    return output;
  }

  static std::tuple<Tensor, Tensor> forward_aux(const Tensor& input, const Tensor& weight,
                                                const OptionalTensor& bias, Activation activation) {
    if (activation == Activation::relu || !takes_product(input, weight)) {
      return Reference::forward_aux(input, weight, bias, activation);
    }
    const auto output = empty_rows(input, weight.size(0));
    const auto preactivation = pad_rows(at::empty_like(output));
    const auto output_rows = as_rows(output), preactivation_rows = as_rows(preactivation);
    multiply_with_weight(input, weight, bias, [&](const Tensor& some, int64_t first) {
      preactivation_rows.narrow(0, first, some.size(0)).copy_(some);
      activate_into(output_rows.narrow(0, first, some.size(0)), some, activation);
    });
    explain::step("ATen activation");
    return {output, preactivation};
  }

  static Tensor relu_mask(const Tensor& output) {
    explain::step("own mask kernel");
    auto sizes = output.sizes().vec();
    sizes.back() = gemm::mask_bits(sizes.back()) / 8;
    const auto mask = at::empty(sizes, output.options().dtype(at::kByte));
    write_relu_mask(mask, output.contiguous());
    return mask;
  }

  static std::tuple<Tensor, Tensor> activation_backward(const Tensor& grad_output,
                                                        const Tensor& saved, Activation activation,
                                                        bool bias_grad) {
    if (!has_own_gradient(grad_output, saved, activation)) {
      return Reference::activation_backward(grad_output, saved, activation, bias_grad);
    }
    const auto dz = empty_rows(grad_output, grad_output.size(-1));
    const auto rows = as_rows(dz), grad = as_rows(grad_output.contiguous()),
               kept = as_rows(saved.contiguous());
    if (takes_one_pass(grad_output, saved, activation)) {
      explain::step("activation gradient and bias sum in one pass");
      return {dz, sum_of_parts(one_pass(rows, grad, kept, activation, bias_grad), dz)};
    }
    explain::step("activation gradient from bits");
    apply_relu_mask(rows, grad, kept);
    if (!bias_grad) return {dz, unwanted(dz)};
    explain::step("ATen sum");
    return {dz, rows.sum(0)};
  }

  static std::tuple<Tensor, Tensor, Tensor> linear_backward(
      const Tensor& grad_output, const Tensor& input, const Tensor& weight,
      const OptionalTensor& saved, Activation activation, std::array<bool, 3> output_mask) {
    if (!pays(grad_output, input, weight, saved, activation, output_mask)) {
      return Reference::linear_backward(grad_output, input, weight, saved, activation, output_mask);
    }
    auto dz = dense(grad_output);
    auto grad_bias = unwanted(grad_output);
    if (activation != Activation::none) {
      std::tie(dz, grad_bias) =
          activation_backward(grad_output, *saved, activation, output_mask[2]);
    } else if (output_mask[2]) {
      explain::step("ATen sum");
      grad_bias = as_rows(dz).sum(0);
    }
    auto grad_input = unwanted(dz), grad_weight = unwanted(dz);
    if (output_mask[0]) {
      grad_input = empty_rows(input, input.size(-1));
      multiply_into(as_rows(grad_input), as_rows(dz), weight.t());
    }
    if (output_mask[1]) {
      grad_weight = at::empty(weight.sizes(), weight.options());
      multiply_into(grad_weight, as_rows(dz).t(), as_rows(input).t());
    }
    return {grad_input, grad_weight, grad_bias};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> linear_backward_across(
      const Tensor& grad_output, const Tensor& input, const Tensor& weight,
      const OptionalTensor& saved, Activation activation, std::array<bool, 3> output_mask,
      const Tensor& previous_saved, Activation previous, bool previous_bias_grad) {
    output_mask[0] = true;
    if (!pays(grad_output, input, weight, saved, activation, output_mask) &&
        !has_own_gradient(input, previous_saved, previous)) {
      return Reference::linear_backward_across(grad_output, input, weight, saved, activation,
                                               output_mask, previous_saved, previous,
                                               previous_bias_grad);
    }
    const auto [grad_input, grad_weight, grad_bias] =
        linear_backward(grad_output, input, weight, saved, activation, output_mask);
    const auto [dz, grad_previous_bias] =
        activation_backward(grad_input, previous_saved, previous, previous_bias_grad);
    return {dz, grad_weight, grad_bias, grad_previous_bias};
  }

 private:
  // Whether the activation's gradient is computed in another way than by the reference.
  static bool has_own_gradient(const Tensor& grad, const Tensor& saved, Activation activation) {
    const bool bits = activation == Activation::relu && saved.scalar_type() == at::kByte;
    return bits || takes_one_pass(grad, saved, activation);
  }

  // Whether any step of it is done in another way than the reference does it.
  static bool pays(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                   const OptionalTensor& saved, Activation activation,
                   std::array<bool, 3> output_mask) {
    if (input.numel() == 0 || grad_output.numel() == 0) return false;
    const auto type = input.scalar_type();
    const int64_t features = weight.size(0), inputs = weight.size(1), rows = input.numel() / inputs;
    return (activation != Activation::none && has_own_gradient(grad_output, *saved, activation)) ||
           (output_mask[0] && onednn::takes_product(type, rows, features, inputs)) ||
           (output_mask[1] && onednn::takes_product(type, features, rows, inputs));
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fused, CPU, m) { register_kernels<Cpu>(m); }

}  // namespace fused
