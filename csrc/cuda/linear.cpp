// The linear operators on a GPU. Each allocates its results, describes the passes and runs them.
// ATen's formula does what tune/ finds no plan for.

#include "reference/linear.h"
#include "core/policy.h"
#include "core/shapes.h"
#include "cuda/invariant.h"
#include "cuda/kernels/activation.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/execute.h"
#include "cuda/small/small.h"
#include "cuda/tune/decide.h"
#include "dispatch/linear_kernels.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>

namespace fused::cuda {
namespace {

using S = Shapes<Allocator>;

bool run(PassCall call, const Tensor& like, kernels::SmallGradients* deferred = nullptr) {
  complete(call, gemm_type(like.scalar_type()), like.get_device());
  if (is_batch_invariant()) {
    if (call.problem.pass != Pass::wgrad) {
      invariant::run(call);
      return true;
    }
    call.problem.deterministic = true;  // sums over rows are reproducible, not batch-invariant
    explain::append("(reproducible, not batch-invariant)");
  }
  return tune::run(call, deferred);
}

void run_surely(const PassCall& call, const Tensor& like,
                kernels::SmallGradients* deferred = nullptr) {
  TORCH_INTERNAL_ASSERT(run(call, like, deferred), "no way to run a gradient's pass");
}

struct Linear {
  using Reference = reference::Linear;

  static constexpr bool obeys_policy = true;
  static const char* batch_dependence(const Tensor& like) { return invariant::objection(like); }
  static bool is_usable(const Tensor& like) { return multiplies_as_torch(like); }
  static constexpr auto mlp_in_one = &small::mlp_in_one;
  static constexpr auto ensemble = &small::ensemble;
  static constexpr auto ensemble_backward = &small::ensemble_backward;

  static Tensor forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        Activation activation) {
    const c10::cuda::CUDAGuard guard(input.device());
    auto output = S::output(input, weight);
    if (output.numel() == 0) return output;
    if (run_forward(input, weight, bias, activation, output)) return output;
    return Reference::forward(input, weight, bias, activation);
  }

  static Pair forward_aux(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          Activation activation) {
    const c10::cuda::CUDAGuard guard(input.device());
    const bool mask = saved_for(activation) == Saved::output;
    auto output = S::output(input, weight);
    auto aux = with_zero_padding(S::aux(output, activation), output.size(-1), mask);
    if (output.numel() == 0) return {output, aux};
    if (run_forward(input, weight, bias, activation, output, rows_of(aux).matrix,
                    mask ? Keeps::mask : Keeps::values)) {
      return {output, aux};
    }
    return Reference::forward_aux(input, weight, bias, activation);
  }

  static Tensor relu_mask(const Tensor& output) {
    explain::append("own mask kernel");
    return mask_of(output);
  }

  static Pair forward_bits(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
    const c10::cuda::CUDAGuard guard(input.device());
    auto output = S::output(input, weight), mask = S::mask(output);
    if (output.numel() == 0) return {output, mask};
    if (run_forward(input, weight, bias, Activation::relu, output, rows_of(mask).matrix,
                    Keeps::bits)) {
      return {output, mask};
    }
    output = Reference::forward(input, weight, bias, Activation::relu);
    mask = relu_mask(output);
    return {output, mask};
  }

  static Pair activation_backward(const Tensor& grad_output, const Tensor& saved,
                                  Activation activation, bool bias_grad) {
    const c10::cuda::CUDAGuard guard(grad_output.device());
    auto dz = S::grad_input(grad_output, true);
    auto grad_bias = S::vector(grad_output, grad_output.size(-1), bias_grad);
    const bool reads = activation != Activation::none;  // else saved may be anything
    const auto kept = reads ? plain_rows(saved) : Operand();
    activation_gradient(plain_rows(grad_output).matrix, kept.matrix, reads && is_mask(saved),
                        activation, grad_output, dz.data_ptr(), grad_bias);
    return {dz, grad_bias};
  }

  static Triple linear_backward(const steps::LinearBackward& layer) {
    const bool by_columns = layer.wanted[0] && lies_by_columns(layer.input);
    // The product of the transposes has no plans.
    if (by_columns && !is_batch_invariant()) return Reference::linear_backward(layer);
    const c10::cuda::CUDAGuard guard(layer.grad_output.device());
    LayerGradients made(layer, layer.wanted[0]);
    auto grad_input = S::grad_input(layer.input, layer.wanted[0]);
    if (layer.wanted[0]) input_gradient(made.dz, layer.weight, grad_input, made.deferred);
    launch(made.deferred);
    if (by_columns) grad_input = S::grad_layer_input(layer.input, true).copy_(grad_input);
    return {grad_input, made.grad_weight, made.grad_bias};
  }

  static void weight_gradient(const Tensor& grad_output, const OptionalTensor& input,
                              const Tensor& into, bool adds) {
    if (into.numel() == 0) return;
    const c10::cuda::CUDAGuard guard(into.device());
    const auto grad = has_value(input) ? rows_of(grad_output) : plain_rows(grad_output);
    if (grad.matrix.rows == 0 && !adds) into.zero_();
    if (grad.matrix.rows == 0) return;
    const bool to_f32 = into.scalar_type() != grad_output.scalar_type();
    if (!has_value(input)) {
      one_pass(grad.matrix, {}, false, Activation::none, gemm_type(grad_output.scalar_type()),
               nullptr, {into.data_ptr(), to_f32, adds});
      return;
    }
    const auto rows = rows_of(*input);
    auto call = weight_call(grad.matrix, rows.matrix, into, !into.is_contiguous());
    call.problem.matmul.adds = adds;
    call.problem.matmul.to_f32 = to_f32;
    run_surely(call, *input);
  }

  static Quadruple linear_backward_across(const steps::LinearBackward& layer,
                                          const steps::PreviousLayer& previous) {
    const c10::cuda::CUDAGuard guard(layer.grad_output.device());
    LayerGradients made(layer, /*wants_input=*/true);
    auto dz = S::grad_input(layer.input, true);
    auto grad_bias = S::vector(layer.input, layer.input.size(-1), previous.bias_grad);
    previous_gradient(made.dz, layer.weight, previous, dz, grad_bias, made.deferred);
    launch(made.deferred);
    return {dz, made.grad_weight, made.grad_bias, grad_bias};
  }

 private:
  static bool run_forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          Activation activation, const Tensor& output, const Matrix& aux = {},
                          Keeps keeps = Keeps::nothing) {
    if (input.size(-1) == 0) return false;
    const auto left = rows_of(input), right = rows_of(weight);
    const auto added = bias_for_epilogue(bias);
    auto call = make_call(Pass::fprop, left.matrix, transposed(right.matrix), matrix_of(output),
                          data_of(added), activation, aux, keeps);
    call.bias_is_matrix = added.defined() && !bias->is_contiguous();
    return run(std::move(call), input);
  }

  // A mask needs no zeros if mask_bits(features) adds no padding.
  static Tensor with_zero_padding(const Tensor& aux, int64_t features, bool mask) {
    if (!mask) return fused::with_zero_padding(aux);
    return features == mask_bits(features) ? aux : aux.zero_();
  }

  static Tensor mask_of(const Tensor& output) {
    const c10::cuda::CUDAGuard guard(output.device());
    auto mask = S::mask(output);
    if (mask.numel() == 0) return mask;
    const auto rows = plain_rows(output);
    kernels::write_relu_mask(gemm_type(output.scalar_type()), rows.matrix.rows, rows.matrix.cols,
                             rows.matrix.data, rows.matrix.ld, mask.data_ptr(),
                             at::cuda::getCurrentCUDAStream());
    return mask;
  }

  static bool is_mask(const Tensor& saved) { return saved.scalar_type() == at::kByte; }

  // Computes dz of a layer, and from it the gradients of its weight and bias.
  struct LayerGradients {
    Workspace memory;  // holds dz, unless dz is the gradient that came
    Operand grad;
    Matrix dz;
    Tensor grad_weight, grad_bias;
    kernels::SmallGradients deferred;  // may hold the weight's gradient

    LayerGradients(const steps::LinearBackward& layer, bool wants_input)
        : memory(layer.activation != Activation::none && (wants_input || layer.wanted[1])
                     ? layer.grad_output.numel() * layer.grad_output.element_size()
                     : 0),
          grad(plain_rows(layer.grad_output)),
          dz(grad.matrix),
          grad_weight(S::grad_weight(layer.weight, layer.wanted[1])),
          grad_bias(S::grad_bias(layer.weight, layer.wanted[2])) {
      const bool active = layer.activation != Activation::none;
      if (active) {
        dz.data = memory.data();
        dz.ld = std::max(dz.cols, int64_t{1});
        activation_gradient(grad.matrix, plain_rows(*layer.saved).matrix, is_mask(*layer.saved),
                            layer.activation, layer.grad_output, dz.data, grad_bias);
      } else if (layer.wanted[2] && !layer.wanted[1]) {
        column_sum(dz, layer.grad_output, grad_bias);
      }
      if (layer.wanted[1]) {
        weight_gradient(dz, layer.input, grad_weight, grad_lies_by_columns(layer.weight),
                        !active && layer.wanted[2] ? grad_bias : Tensor(), deferred);
      }
    }
  };

  // A deferred product holds raw pointers, so one whose operand was copied here is not deferred.
  template <typename... Operands>
  static kernels::SmallGradients* unless_copied(kernels::SmallGradients& deferred,
                                                const Operands&... operands) {
    return (operands.copy.defined() || ...) ? nullptr : &deferred;
  }

  static void launch(const kernels::SmallGradients& gradients) {
    if (gradients.of_weight.rows == 0 && gradients.of_input.rows == 0) return;
    kernels::small_backward(gradients, at::cuda::getCurrentCUDAStream());
  }

  static void column_sum(const Matrix& matrix, const Tensor& like, const Tensor& sums) {
    activation_gradient(matrix, {}, false, Activation::none, like, nullptr, sums);
  }

  // Writes dz = act'(saved) · grad unless `dz` is null, and its column sums unless `sums` is empty.
  static void activation_gradient(const Matrix& grad, const Matrix& saved, bool mask,
                                  Activation activation, const Tensor& like, void* dz,
                                  const Tensor& sums) {
    const bool wants_sums = sums.numel() > 0;
    if (grad.rows == 0 && wants_sums) sums.zero_();
    if (grad.rows == 0 || grad.cols == 0 || (dz == nullptr && !wants_sums)) return;
    one_pass(grad, saved, mask, activation, gemm_type(like.scalar_type()), dz,
             {wants_sums ? sums.data_ptr() : nullptr});
  }

  // Describes dzᵀ input. By columns it is inputᵀ dz transposed, the product that eager computes.
  static PassCall weight_call(const Matrix& dz, const Matrix& input, const Tensor& grad_weight,
                              bool by_columns, void* sums = nullptr) {
    return by_columns ? make_call(Pass::wgrad, transposed(input), dz, matrix_of(grad_weight.t()))
                      : make_call(Pass::wgrad, transposed(dz), input, matrix_of(grad_weight), sums);
  }

  static void weight_gradient(const Matrix& dz, const Tensor& input, const Tensor& grad_weight,
                              bool by_columns, const Tensor& grad_bias,
                              kernels::SmallGradients& deferred) {
    if (dz.rows == 0 && grad_bias.defined()) grad_bias.zero_();
    if (dz.rows == 0) grad_weight.zero_();
    if (dz.rows == 0 || dz.cols == 0) return;
    const bool is_empty = grad_weight.numel() == 0;
    if (grad_bias.defined() && (is_empty || by_columns)) column_sum(dz, input, grad_bias);
    if (is_empty) return;
    const auto rows = rows_of(input);
    run_surely(weight_call(dz, rows.matrix, grad_weight, by_columns, data_of(grad_bias)), input,
               unless_copied(deferred, rows));
  }

  static void input_gradient(const Matrix& dz, const Tensor& weight, const Tensor& result,
                             kernels::SmallGradients& deferred) {
    if (dz.cols == 0) result.zero_();
    if (result.numel() == 0 || dz.cols == 0) return;
    const auto right = rows_of(weight);
    run_surely(make_call(Pass::dgrad, dz, right.matrix, matrix_of(result)), weight,
               unless_copied(deferred, right));
  }

  static void previous_gradient(const Matrix& dz, const Tensor& weight,
                                const steps::PreviousLayer& previous, const Tensor& result,
                                const Tensor& sums, kernels::SmallGradients& deferred) {
    const bool wants_sums = sums.numel() > 0;
    if (result.numel() == 0 && wants_sums) sums.zero_();
    if (result.numel() == 0) return;
    const auto kept = policy() == Policy::cublaslt ? as_aux(previous) : previous.saved;
    const auto aux = plain_rows(kept);
    if (dz.cols == 0) {
      result.zero_();
      activation_gradient(matrix_of(result), aux.matrix, is_mask(kept), previous.activation, result,
                          result.data_ptr(), sums);
      return;
    }
    const auto right = rows_of(weight);
    // A copy made here would be freed before a deferred product is launched.
    const bool stays = kept.is_same(previous.saved);
    run_surely(make_call(Pass::dgrad, dz, right.matrix, matrix_of(result),
                         wants_sums ? sums.data_ptr() : nullptr, previous.activation, aux.matrix,
                         is_mask(kept) ? Keeps::mask : Keeps::values),
               weight, stays ? unless_copied(deferred, right, aux) : nullptr);
  }

  static Tensor as_aux(const steps::PreviousLayer& previous) {
    const auto& saved = previous.saved;
    if (saved_for(previous.activation) == Saved::output) {
      return is_mask(saved) ? saved.contiguous() : mask_of(saved);
    }
    const auto rows = plain_rows(saved).matrix;
    return rows.ld % 8 == 0 && rows.rows > 1 ? saved : reference::pad_rows(saved);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fused, CUDA, m) { dispatch::register_linear<Linear>(m); }

}  // namespace fused::cuda
