// CUDA kernels of the operators: allocate, describe the stages, run them. How a stage is done is
// decided in cuda_stage.cpp; where it cannot be done there, ATen's formula does the work.

#include "cuda/kernels/activation.h"
#include "reference/linear.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/gemm_call.h"
#include "dispatch/linear_kernels.h"
#include "core/policy.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>

namespace fused {
namespace {

using gemm::Matrix;
using gemm::Stage;

// The leading dimensions of `like` with another last one.
Tensor empty_rows(const Tensor& like, int64_t features, std::optional<at::ScalarType> type = {}) {
  c10::DimVector sizes(like.sizes());
  sizes.back() = features;
  return empty(sizes, like, type);
}

// Contiguous [*, cols] as [rows, cols].
Matrix matrix_of(const Tensor& result) {
  const auto cols = result.size(-1);
  return {cols == 0 ? 0 : result.numel() / cols, cols, std::max(cols, int64_t{1}), false,
          result.data_ptr()};
}

// What our own kernels read: rows of unit stride.
Operand plain_rows(const Tensor& tensor) {
  auto operand = rows_of(tensor);
  if (!operand.matrix.transposed) return operand;
  auto copy = tensor.contiguous();
  operand = rows_of(copy);
  operand.copy = std::move(copy);
  return operand;
}

StageCall stage(Stage stage, const Matrix& left, const Matrix& right, const Matrix& result,
                void* bias = nullptr, Activation activation = Activation::none,
                const Matrix& aux = {}, bool mask = false) {
  StageCall call{{}, left, right, result, aux, bias};
  call.problem.stage = stage;
  call.problem.activation = activation;
  call.problem.aux = stage == Stage::forward && aux.data != nullptr;
  call.problem.mask = mask;
  call.problem.literal = policy() == Policy::cublaslt;
  return call;
}

bool run(StageCall call, const Tensor& like) {
  describe(call, *gemm_type(like.scalar_type()), like.get_device());
  return fused::run(call);
}

// A gradient can always be computed in some way.
void run_surely(const StageCall& call, const Tensor& like) {
  TORCH_INTERNAL_ASSERT(run(call, like), "no way to run a gradient's stage");
}

struct Cuda {
  static constexpr bool obeys_policy = true;

  static Tensor forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        Activation activation) {
    const c10::cuda::CUDAGuard guard(input.device());
    auto output = empty_rows(input, weight.size(0));
    if (output.numel() == 0) return output;
    if (run_forward(input, weight, bias, activation, output, {}, false)) return output;
    return Reference::forward(input, weight, bias, activation);
  }

  static std::tuple<Tensor, Tensor> forward_aux(const Tensor& input, const Tensor& weight,
                                                const OptionalTensor& bias, Activation activation) {
    const c10::cuda::CUDAGuard guard(input.device());
    const bool mask = activation == Activation::relu;
    auto output = empty_rows(input, weight.size(0));
    auto aux = mask ? empty_mask(output) : empty_preactivation(output);
    if (output.numel() == 0) return {output, aux};
    if (run_forward(input, weight, bias, activation, output, rows_of(aux).matrix, mask)) {
      return {output, aux};
    }
    return Reference::forward_aux(input, weight, bias, activation);
  }

  static Tensor relu_mask(const Tensor& output) {
    explain::step("own mask kernel");
    return mask_of(output);
  }

  static std::tuple<Tensor, Tensor> activation_backward(const Tensor& grad_output,
                                                        const Tensor& saved, Activation activation,
                                                        bool bias_grad) {
    const c10::cuda::CUDAGuard guard(grad_output.device());
    auto dz = empty(grad_output.sizes(), grad_output);
    auto grad_bias = empty({bias_grad ? grad_output.size(-1) : 0}, grad_output);
    activation_gradient(plain_rows(grad_output).matrix, plain_rows(saved).matrix, is_mask(saved),
                        activation, grad_output, dz.data_ptr(), grad_bias);
    return {dz, grad_bias};
  }

  static std::tuple<Tensor, Tensor, Tensor> linear_backward(
      const Tensor& grad_output, const Tensor& input, const Tensor& weight,
      const OptionalTensor& saved, Activation activation, std::array<bool, 3> output_mask) {
    const c10::cuda::CUDAGuard guard(grad_output.device());
    const Own own(grad_output, input, weight, saved, activation, output_mask);
    auto grad_input = output_mask[0] ? empty_rows(input, input.size(-1)) : empty({0}, grad_output);
    if (output_mask[0]) input_gradient(own.dz, weight, grad_input);
    return {grad_input, own.grad_weight, own.grad_bias};
  }

  static std::tuple<Tensor, Tensor, Tensor, Tensor> linear_backward_across(
      const Tensor& grad_output, const Tensor& input, const Tensor& weight,
      const OptionalTensor& saved, Activation activation, std::array<bool, 3> output_mask,
      const Tensor& previous_saved, Activation previous, bool previous_bias_grad) {
    const c10::cuda::CUDAGuard guard(grad_output.device());
    output_mask[0] = true;
    const Own own(grad_output, input, weight, saved, activation, output_mask);
    auto dz = empty_rows(input, input.size(-1));
    auto grad_bias = empty({previous_bias_grad ? input.size(-1) : 0}, input);
    previous_gradient(own.dz, weight, previous_saved, previous, dz, grad_bias);
    return {dz, own.grad_weight, own.grad_bias, grad_bias};
  }

 private:
  static bool run_forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                          Activation activation, const Tensor& output, const Matrix& aux,
                          bool mask) {
    if (input.size(-1) == 0) return false;
    const auto left = rows_of(input), right = rows_of(weight);
    const auto added = has_value(bias) ? bias->contiguous() : Tensor();
    return run(stage(Stage::forward, left.matrix, transposed(right.matrix), matrix_of(output),
                     added.defined() ? const_cast<void*>(added.const_data_ptr()) : nullptr,
                     activation, aux, mask),
               input);
  }

  // Padding is zero, so that saved tensors compare equal; it exists only for odd widths.
  static Tensor empty_mask(const Tensor& output) {
    const auto features = output.size(-1), bits = gemm::mask_bits(features);
    auto mask = empty_rows(output, bits / 8, at::kByte);
    return features == bits ? mask : mask.zero_();
  }

  static Tensor mask_of(const Tensor& output) {
    const c10::cuda::CUDAGuard guard(output.device());
    auto mask = empty_rows(output, gemm::mask_bits(output.size(-1)) / 8, at::kByte);
    if (mask.numel() == 0) return mask;
    const auto rows = plain_rows(output);
    write_relu_mask(*gemm_type(output.scalar_type()), rows.matrix.rows, rows.matrix.cols,
                    rows.matrix.data, rows.matrix.ld, mask.data_ptr(),
                    at::cuda::getCurrentCUDAStream());
    return mask;
  }

  static Tensor empty_preactivation(const Tensor& output) {
    const auto features = output.size(-1), padded = gemm::padded_features(features);
    auto buffer = empty_rows(output, padded);
    if (features == padded) return buffer;
    buffer.narrow(-1, features, padded - features).zero_();
    return buffer.narrow(-1, 0, features);
  }

  static bool is_mask(const Tensor& saved) { return saved.scalar_type() == at::kByte; }

  // A layer's dz, and what follows from it alone: the gradients of its weight and bias.
  struct Own {
    Workspace memory;  // of dz, where it is not the gradient that came
    Operand grad;
    Matrix dz;
    Tensor grad_weight, grad_bias;

    Own(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
        const OptionalTensor& saved, Activation activation, std::array<bool, 3> wanted)
        : memory(activation != Activation::none && (wanted[0] || wanted[1])
                     ? grad_output.numel() * grad_output.element_size()
                     : 0),
          grad(plain_rows(grad_output)),
          dz(grad.matrix),
          grad_bias(empty({wanted[2] ? weight.size(0) : 0}, grad_output)) {
      if (activation != Activation::none) {
        dz.data = memory.data();
        dz.ld = std::max(dz.cols, int64_t{1});
        activation_gradient(grad.matrix, plain_rows(*saved).matrix, is_mask(*saved), activation,
                            grad_output, dz.data, grad_bias);
      } else if (wanted[2] && !wanted[1]) {
        column_sum(dz, grad_output, grad_bias);
      }
      if (!wanted[1]) {
        grad_weight = empty({0}, grad_output);
        return;
      }
      grad_weight = empty(weight.sizes(), weight);
      weight_gradient(dz, input, grad_weight,
                      activation == Activation::none && wanted[2] ? grad_bias : Tensor());
    }
  };

  static void column_sum(const Matrix& matrix, const Tensor& like, const Tensor& sums) {
    activation_gradient(matrix, {}, false, Activation::none, like, nullptr, sums);
  }

  // dz = act'(saved) · grad, where dz is wanted, and its column sums, where there is room for them.
  static void activation_gradient(const Matrix& grad, const Matrix& saved, bool mask,
                                  Activation activation, const Tensor& like, void* dz,
                                  const Tensor& sums) {
    const bool wants_sums = sums.numel() > 0;
    if (grad.rows == 0 && wants_sums) sums.zero_();
    if (grad.rows == 0 || grad.cols == 0 || (dz == nullptr && !wants_sums)) return;
    one_pass(grad, saved, mask, activation, *gemm_type(like.scalar_type()), dz,
             wants_sums ? sums.data_ptr() : nullptr);
  }

  // dzᵀ input, and dz's column sums if grad_bias is defined.
  static void weight_gradient(const Matrix& dz, const Tensor& input, const Tensor& grad_weight,
                              const Tensor& grad_bias) {
    if (dz.rows == 0 && grad_bias.defined()) grad_bias.zero_();
    if (dz.rows == 0) grad_weight.zero_();
    if (dz.rows == 0 || dz.cols == 0) return;
    if (grad_weight.numel() == 0) {
      if (grad_bias.defined()) column_sum(dz, input, grad_bias);
      return;
    }
    const auto right = rows_of(input);
    run_surely(stage(Stage::weight_gradient, transposed(dz), right.matrix, matrix_of(grad_weight),
                     grad_bias.defined() ? grad_bias.data_ptr() : nullptr),
               input);
  }

  // dz · weight
  static void input_gradient(const Matrix& dz, const Tensor& weight, const Tensor& result) {
    if (result.numel() == 0) return;
    if (dz.cols == 0) {
      result.zero_();
      return;
    }
    const auto right = rows_of(weight);
    run_surely(stage(Stage::input_gradient, dz, right.matrix, matrix_of(result)), weight);
  }

  // (dz · weight) · act'(saved), the gradient of the layer before, and its column sums where there
  // is room for them.
  static void previous_gradient(const Matrix& dz, const Tensor& weight, const Tensor& saved,
                                Activation previous, const Tensor& result, const Tensor& sums) {
    const bool wants_sums = sums.numel() > 0;
    if (result.numel() == 0 && wants_sums) sums.zero_();
    if (result.numel() == 0) return;
    const auto kept = policy() == Policy::cublaslt ? as_aux(saved, previous) : saved;
    const auto aux = plain_rows(kept);
    if (dz.cols == 0) {
      result.zero_();
      activation_gradient(matrix_of(result), aux.matrix, is_mask(kept), previous, result,
                          result.data_ptr(), sums);
      return;
    }
    const auto right = rows_of(weight);
    run_surely(stage(Stage::input_gradient, dz, right.matrix, matrix_of(result),
                     wants_sums ? sums.data_ptr() : nullptr, previous, aux.matrix, is_mask(kept)),
               weight);
  }

  // What was saved, in the layout that the library reads: a ReLU layer may have kept its output.
  static Tensor as_aux(const Tensor& saved, Activation activation) {
    if (activation == Activation::relu) {
      return is_mask(saved) ? saved.contiguous() : mask_of(saved);
    }
    const auto rows = plain_rows(saved).matrix;
    return rows.ld % 8 == 0 && rows.rows > 1 ? saved : pad_rows(saved);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fused, CUDA, m) { register_kernels<Cuda>(m); }

}  // namespace fused
