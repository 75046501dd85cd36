// CUDA kernels of the operators: flatten to matrices, allocate, choose the epilogue, run. Where
// cuBLASLt cannot be used, ATen's formula does the work.

#include "activation_kernels.h"
#include "composite.h"
#include "cuda_gemm.h"
#include "kernels.h"
#include "policy.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>

namespace fused {
namespace {

using gemm::Epilogue;
using gemm::Stage;

// The leading dimensions of `like` with another last one.
std::vector<int64_t> sizes_with(const Tensor& like, int64_t features) {
  auto sizes = like.sizes().vec();
  sizes.back() = features;
  return sizes;
}

// GELU's epilogues, forward and backward, in fp32 and fp64 are a product and then a slow generic
// kernel, with an approximate tanh at that: there our own kernels are faster and as exact as eager.
bool epilogue_is_exact(Activation activation, const Tensor& input) {
  const bool narrow = input.scalar_type() == at::kHalf || input.scalar_type() == at::kBFloat16;
  if (is_gelu(activation) && !narrow) explain::step("(no GELU epilogue: approximate)");
  return !is_gelu(activation) || narrow;
}

void run_activation(Activation activation, const Tensor& z, const Tensor& y) {  // [rows, cols]
  if (z.numel() == 0) return;
  explain::step("own activation kernel");
  activation_forward(activation, *gemm_type(z.scalar_type()), z.size(0), z.size(1), z.data_ptr(),
                     z.stride(0), y.data_ptr(), y.stride(0), at::cuda::getCurrentCUDAStream());
}

struct Forward {
  Tensor input;   // [rows, in]
  Tensor weight;  // [out, in]
  Tensor bias;    // [out], contiguous, or undefined

  Forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias)
      : input(as_rows(input)),
        weight(weight),
        bias(has_value(bias) ? bias->contiguous() : Tensor()) {}

  // result = act(input weightᵀ + bias) in one call of the library, or false.
  bool product(Activation activation, const Tensor& result, const Tensor& aux = {}) const {
    const auto epilogue =
        gemm::find_epilogue(Stage::forward, activation, bias.defined(), aux.defined());
    return epilogue && multiply(input, weight.t(), result, *epilogue, bias, aux);
  }
};

struct Cuda {
  static constexpr bool obeys_policy = true;

  static Tensor forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        Activation activation) {
    const c10::cuda::CUDAGuard guard(input.device());
    const Forward args(input, weight, bias);
    auto output = at::empty(sizes_with(input, weight.size(0)), input.options());
    const auto rows = as_rows(output);
    if (output.numel() == 0) return output;
    if (epilogue_is_exact(activation, input) && args.product(activation, rows)) return output;
    if (activation != Activation::none && args.product(Activation::none, rows)) {
      run_activation(activation, rows, rows);
      return output;
    }
    return Reference::forward(input, weight, bias, activation);
  }

  static std::tuple<Tensor, Tensor> forward_aux(const Tensor& input, const Tensor& weight,
                                                const OptionalTensor& bias, Activation activation) {
    const c10::cuda::CUDAGuard guard(input.device());
    const Forward args(input, weight, bias);
    auto output = at::empty(sizes_with(input, weight.size(0)), input.options());
    auto aux = activation == Activation::relu ? empty_mask(output) : empty_preactivation(output);
    if (output.numel() == 0) return {output, aux};
    const auto rows = as_rows(output), aux_rows = as_rows(aux);
    if (epilogue_is_exact(activation, input) && args.product(activation, rows, aux_rows)) {
      return {output, aux};
    }
    if (is_gelu(activation) && args.product(Activation::none, aux_rows)) {
      run_activation(activation, aux_rows, rows);
      return {output, aux};
    }
    return Reference::forward_aux(input, weight, bias, activation);
  }

  static std::tuple<Tensor, Tensor> activation_backward(const Tensor& grad_output,
                                                        const Tensor& saved, Activation activation,
                                                        bool bias_grad) {
    const c10::cuda::CUDAGuard guard(grad_output.device());
    auto dz = at::empty(grad_output.sizes(), grad_output.options());
    auto grad_bias =
        one_pass(as_rows(grad_output), as_rows(saved), activation, as_rows(dz), bias_grad);
    return {dz, grad_bias};
  }

  static std::tuple<Tensor, Tensor, Tensor> linear_backward(
      const Tensor& grad_output, const Tensor& input, const Tensor& weight,
      const OptionalTensor& saved, Activation activation, std::array<bool, 3> output_mask) {
    const c10::cuda::CUDAGuard guard(grad_output.device());
    const auto own = own_gradients(grad_output, input, saved, activation, output_mask);
    return {output_mask[0] ? product(own.dz, weight).view(input.sizes()) : unwanted(grad_output),
            own.weight, own.bias};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> linear_backward_across(
      const Tensor& grad_output, const Tensor& input, const Tensor& weight,
      const OptionalTensor& saved, Activation activation, std::array<bool, 3> output_mask,
      const Tensor& previous_saved, Activation previous, bool previous_bias_grad) {
    const c10::cuda::CUDAGuard guard(grad_output.device());
    output_mask[0] = true;
    const auto own = own_gradients(grad_output, input, saved, activation, output_mask);
    auto [dz, grad_bias] =
        previous_gradient(own.dz, weight, as_rows(previous_saved), previous, previous_bias_grad);
    return {dz.view(input.sizes()), own.weight, own.bias, grad_bias};
  }

 private:
  // Padding is zero, so that saved tensors compare equal; it exists only for odd widths.
  static Tensor empty_mask(const Tensor& output) {
    const auto features = output.size(-1), bits = gemm::mask_bits(features);
    const auto sizes = sizes_with(output, bits / 8);
    const auto options = output.options().dtype(at::kByte);
    return features == bits ? at::empty(sizes, options) : at::zeros(sizes, options);
  }

  static Tensor empty_preactivation(const Tensor& output) {
    const auto features = output.size(-1), padded = gemm::padded_features(features);
    if (features == padded) return at::empty_like(output);
    const auto buffer = at::empty(sizes_with(output, padded), output.options());
    buffer.narrow(-1, features, padded - features).zero_();
    return buffer.narrow(-1, 0, features);
  }

  struct OwnGradients {
    Tensor dz;  // [rows, out]; undefined where neither the input's nor the weight's is wanted
    Tensor weight, bias;
  };

  // A layer's dz and what follows from it alone.
  static OwnGradients own_gradients(const Tensor& grad_output, const Tensor& input,
                                    const OptionalTensor& saved, Activation activation,
                                    std::array<bool, 3> wanted) {
    const auto [wants_input, wants_weight, wants_bias] = wanted;
    OwnGradients own{as_rows(grad_output), {}, unwanted(grad_output)};
    if (activation != Activation::none) {
      const auto grad = own.dz;
      own.dz = wants_input || wants_weight ? at::empty(grad.sizes(), grad.options()) : Tensor();
      own.bias = one_pass(grad, as_rows(*saved), activation, own.dz, wants_bias);
    } else {
      own.dz = own.dz.contiguous();  // the gradient of a sum has strides of 0; it is read twice
      if (wants_bias && wants_weight && bgradb_pays(own.dz)) {
        std::tie(own.weight, own.bias) = weight_and_bias_gradient(own.dz, as_rows(input));
      } else if (wants_bias) {
        own.bias = column_sum(own.dz);
      }
    }
    if (!wants_weight) {
      own.weight = unwanted(grad_output);
    } else if (!own.weight.defined()) {
      own.weight = product(own.dz.t(), as_rows(input));
    }
    return own;
  }

  // (dz weight) · act'(saved), the gradient of the layer before, and its column sums. cuBLASLt has
  // this as one epilogue, D*_BGRAD; on Hopper the pieces are 2 to 3.5 times quicker, and the best
  // of them for 16-bit GELU is DGELU (without BGRAD, which is what is slow) and a column sum.
  static std::tuple<Tensor, Tensor> previous_gradient(const Tensor& dz, const Tensor& weight,
                                                      const Tensor& saved, Activation previous,
                                                      bool wants_bias) {
    const bool literal = policy() == Policy::cublaslt;
    if (dz.size(0) > 0 && weight.size(1) > 0 &&
        ((literal && epilogue_is_exact(previous, dz)) || dgelu_pays(previous, dz))) {
      auto result = at::empty({dz.size(0), weight.size(1)}, dz.options());
      const auto aux = as_aux(saved, previous);
      const auto bias =
          literal && wants_bias ? at::empty({weight.size(1)}, dz.options()) : Tensor();
      const auto epilogue =
          gemm::find_epilogue(Stage::input_gradient, previous, bias.defined(), true);
      if (epilogue && multiply(dz, weight, result, *epilogue, bias, aux)) {
        return {result, !wants_bias ? unwanted(dz) : bias.defined() ? bias : column_sum(result)};
      }
    }
    auto result = product(dz, weight);
    auto grad_bias = one_pass(result, saved, previous, /*dz=*/result, wants_bias);
    return {result, grad_bias};
  }

  // Measured for many tokens; with few the epilogue's kernels are no quicker than ours.
  static constexpr int64_t many_tokens = 4096;

  static bool dgelu_pays(Activation previous, const Tensor& dz) {
    const bool narrow = dz.scalar_type() == at::kHalf || dz.scalar_type() == at::kBFloat16;
    return previous == Activation::gelu_tanh && narrow && dz.size(0) >= many_tokens &&
           at::cuda::getDeviceProperties(dz.get_device())->major == 9;
  }

  // What was saved, in the layout that the library reads: a ReLU layer may have kept its output.
  static Tensor as_aux(const Tensor& saved, Activation activation) {
    if (activation == Activation::relu) {
      return saved.scalar_type() == at::kByte ? saved.contiguous()
                                              : pack_mask(saved.le(0).logical_not());
    }
    const bool padded = saved.stride(1) == 1 && saved.stride(0) % 8 == 0;
    return padded && saved.size(0) > 1 ? saved : pad_rows(saved);
  }

  static Tensor column_sum(const Tensor& matrix) {
    return one_pass(matrix, matrix, Activation::none, /*dz=*/{}, true);
  }

  // Writes act'(saved) · grad to dz, which may be undefined, or grad itself, and gives its column
  // sums, [0] if they are not wanted.
  static Tensor one_pass(const Tensor& grad, const Tensor& saved, Activation activation,
                         const Tensor& dz, bool wants_bias) {
    const auto with_unit_stride = [](const Tensor& t) {
      return t.stride(1) == 1 || t.size(1) == 1 ? t : t.contiguous();
    };
    const auto g = with_unit_stride(grad), s = with_unit_stride(saved);
    auto grad_bias = at::empty({wants_bias ? grad.size(1) : 0}, grad.options());
    if (grad.numel() == 0) return grad_bias.zero_();
    if (!dz.defined() && !wants_bias) return grad_bias;

    ActivationBackward args;
    args.activation = activation;
    args.mask = saved.scalar_type() == at::kByte;
    args.type = *gemm_type(grad.scalar_type());
    args.processors = at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
    args.rows = grad.size(0), args.cols = grad.size(1);
    args.grad = g.const_data_ptr(), args.ld_grad = g.stride(0);
    args.saved = s.const_data_ptr(), args.ld_saved = s.stride(0);
    if (dz.defined()) args.dz = dz.data_ptr();
    if (wants_bias) args.grad_bias = grad_bias.data_ptr();
    explain::step(activation == Activation::none ? "own column sum" : "own one-pass kernel");
    const Workspace scratch(scratch_bytes(args));
    fused::activation_backward(args, scratch.data(), at::cuda::getCurrentCUDAStream());
    return grad_bias;
  }

  // On Hopper BGRADB is part of the product only in fp16; elsewhere it is a slow kernel of its own
  // and our column sum, at the speed of memory, is quicker.
  static bool bgradb_pays(const Tensor& dz) {
    return policy() == Policy::cublaslt ||
           (dz.scalar_type() == at::kHalf && dz.size(0) >= many_tokens);
  }

  static std::tuple<Tensor, Tensor> weight_and_bias_gradient(const Tensor& dz,
                                                             const Tensor& input) {
    auto grad_weight = at::empty({dz.size(1), input.size(1)}, dz.options());
    auto grad_bias = at::empty({dz.size(1)}, dz.options());
    if (multiply(dz.t(), input, grad_weight, Epilogue::bgradb, grad_bias)) {
      return {grad_weight, grad_bias};
    }
    return {Tensor(), column_sum(dz)};
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fused, CUDA, m) { register_kernels<Cuda>(m); }

}  // namespace fused
