// Shapes, dtypes and strides of every result, without data: what the compiler and export see.

#include "gemm/epilogue.h"
#include "dispatch/linear_kernels.h"

namespace fused {
namespace {

using c10::SymInt;

Tensor empty_like_rows(const Tensor& tensor, const SymInt& features) {
  auto sizes = tensor.sym_sizes().vec();
  sizes.back() = features;
  return at::empty_symint(sizes, tensor.options());
}

// Rows padded to 8 elements, hidden in the strides.
Tensor empty_preactivation(const Tensor& output) {
  const auto padded = empty_like_rows(output, gemm::padded_features(output.sym_size(-1)));
  return padded.narrow_symint(-1, 0, output.sym_size(-1));
}

Tensor empty_mask(const Tensor& output) {
  auto sizes = output.sym_sizes().vec();
  sizes.back() = gemm::mask_bits(sizes.back()) / 8;
  return at::empty_symint(sizes, output.options().dtype(at::kByte));
}

Tensor empty(const SymInt& size, const Tensor& like) {
  return at::empty_symint({size}, like.options());
}

struct Meta {
  static constexpr bool obeys_policy = false;

  static Tensor forward(const Tensor& input, const Tensor& weight, const OptionalTensor&,
                        Activation) {
    return empty_like_rows(input, weight.sym_size(0));
  }

  static std::tuple<Tensor, Tensor> forward_aux(const Tensor& input, const Tensor& weight,
                                                const OptionalTensor&, Activation activation) {
    auto output = empty_like_rows(input, weight.sym_size(0));
    if (activation != Activation::relu) {
      auto preactivation = empty_preactivation(output);
      return {std::move(output), std::move(preactivation)};
    }
    auto mask = empty_mask(output);
    return {std::move(output), std::move(mask)};
  }

  static Tensor relu_mask(const Tensor& output) { return empty_mask(output); }

  static std::tuple<Tensor, Tensor> activation_backward(const Tensor& grad_output, const Tensor&,
                                                        Activation, bool bias_grad) {
    const auto features = grad_output.sym_size(-1);
    return {empty_like_rows(grad_output, features),
            empty(bias_grad ? features : SymInt(0), grad_output)};
  }

  static std::tuple<Tensor, Tensor, Tensor> linear_backward(const Tensor& grad_output,
                                                            const Tensor& input,
                                                            const Tensor& weight,
                                                            const OptionalTensor&, Activation,
                                                            std::array<bool, 3> output_mask) {
    const auto none = [&] { return empty(0, grad_output); };
    return {output_mask[0] ? empty_like_rows(input, input.sym_size(-1)) : none(),
            output_mask[1] ? at::empty_symint(weight.sym_sizes(), weight.options()) : none(),
            output_mask[2] ? empty(weight.sym_size(0), grad_output) : none()};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> linear_backward_across(
      const Tensor& grad_output, const Tensor& input, const Tensor& weight,
      const OptionalTensor& saved, Activation activation, std::array<bool, 3> output_mask,
      const Tensor&, Activation, bool previous_bias_grad) {
    output_mask[0] = true;
    auto [dz, grad_weight, grad_bias] =
        linear_backward(grad_output, input, weight, saved, activation, output_mask);
    auto grad_previous_bias = empty(previous_bias_grad ? input.sym_size(-1) : SymInt(0), dz);
    return {dz, grad_weight, grad_bias, grad_previous_bias};
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fused, Meta, m) { register_kernels<Meta>(m); }

}  // namespace fused
