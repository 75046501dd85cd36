#include "core/shapes.h"
#include "cuda/invariant.h"
#include "cuda/kernels/gating.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/execute.h"
#include "cuda/tune/decide.h"
#include "dispatch/gated_kernels.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>

namespace fused::cuda {
namespace {

using S = Shapes<Allocator>;

// Returns the address `bytes` further on; nullptr stays nullptr.
void* behind(void* data, int64_t bytes) {
  return data == nullptr ? nullptr : static_cast<char*>(data) + bytes;
}

struct Halves {
  Operand gate, up;

  Halves(const Tensor& gate_z, const OptionalTensor& up_z) : gate(plain_rows(gate_z)) {
    if (has_value(up_z)) {
      up = plain_rows(*up_z);
      return;
    }
    auto& matrix = gate.matrix;
    matrix.cols /= 2;
    up.matrix = matrix;
    up.matrix.data = behind(matrix.data, matrix.cols * gate_z.element_size());
  }

  kernels::Gating describe(Activation activation, const Tensor& like) const {
    return gating_of(activation, gemm_type(like.scalar_type()), gate.matrix, up.matrix);
  }
};

struct Glu : reference::Glu {
  static constexpr bool takes_down = true;
  static const char* batch_dependence(const Tensor& like) { return invariant::objection(like); }
  static bool is_usable(const Tensor& like) { return multiplies_as_torch(like); }

  // Runs both products and h by one plan. Returns nullopt if none of our kernels can do them.
  static std::optional<Triple> linear_glu(const gated::Layer& layer, Activation activation,
                                          bool keeps) {
    const auto& [input, gate, up, gate_bias, up_bias] = layer;
    const c10::cuda::CUDAGuard guard(input.device());
    const bool stacked = layer.is_stacked();
    const auto element = input.element_size();
    if (!device_of(input.get_device()).has_hopper_products || element != 2) return std::nullopt;
    const bool invariant = is_batch_invariant();
    const bool few = input.numel() < gemm::hopper::least_tokens_of_glu * input.size(-1);
    if ((few && !invariant) || gate.numel() == 0 || input.numel() == 0 ||
        (!stacked && has_value(gate_bias) != has_value(up_bias))) {
      return std::nullopt;
    }
    const auto left = rows_of(input), right = rows_of(gate);
    const auto right_of_up = stacked ? Operand() : rows_of(*up);
    const auto &first = right.matrix, &second = right_of_up.matrix;
    const bool alike = first.transposed == second.transposed && first.ld == second.ld;
    if (!stacked && !alike) return std::nullopt;
    const int64_t rows = left.matrix.rows, features = first.rows / (stacked ? 2 : 1);
    const int64_t half = features * element;  // bytes
    const auto bias = bias_for_epilogue(gate_bias), bias_of_up = bias_for_epilogue(up_bias);
    const auto hidden = S::rows(input, features);
    const auto gate_z = keeps ? S::rows(input, first.rows) : S::unwanted(input);
    const auto up_z = keeps && !stacked ? S::rows(input, features) : S::unwanted(input);

    Matrix aux;
    if (keeps) aux = {rows, features, first.rows, false, gate_z.data_ptr()};
    auto call = make_call(Pass::glu, left.matrix, transposed(first), matrix_of(hidden),
                          data_of(bias), activation, aux, keeps ? Keeps::values : Keeps::nothing);
    call.right.cols = features;
    call.up = stacked ? gemm::Up{behind(first.data, half * (first.transposed ? 1 : first.ld)),
                                 first.ld, behind(call.bias, half), behind(call.aux.data, half)}
                      : gemm::Up{second.data, second.ld, data_of(bias_of_up), data_of(up_z)};
    complete(call, gemm_type(input.scalar_type()), input.get_device());
    // The alignments count for both weights and both pre-activations.
    auto& matmul = call.problem.matmul;
    matmul.aligned_a &= gemm::is_aligned(call.up.weight);
    matmul.aligned_aux &= gemm::is_aligned(call.up.preactivation);
    if (invariant ? !invariant::is_whole(call) : gemm::own_objection(call.problem) != nullptr) {
      return std::nullopt;
    }
    explain::Row row("_linear_glu_aux", input, gate);
    if (invariant) {
      invariant::run(call);
      return {{hidden, gate_z, up_z}};
    }
    if (tune::run(call)) return {{hidden, gate_z, up_z}};
    row.drop();
    return std::nullopt;
  }

  static Tensor glu(const Tensor& gate, const OptionalTensor& up, Activation activation) {
    const c10::cuda::CUDAGuard guard(gate.device());
    const auto result = S::rows(gate, gate.size(-1) / (has_value(up) ? 1 : 2));
    if (result.numel() == 0) return result;
    const Halves halves(gate, up);
    auto args = halves.describe(activation, gate);
    args.hidden = result.data_ptr();
    explain::append("own gating kernel");
    kernels::gating_forward(args, at::cuda::getCurrentCUDAStream());
    return result;
  }

  static Quintuple glu_backward(const steps::GluBackward& step) {
    const c10::cuda::CUDAGuard guard(step.gate.device());
    if (has_value(step.down)) {
      if (const auto done = through_down(step)) return *done;
      if (is_batch_invariant()) return after_product(step);
      return reference::through_down(step, glu_backward);
    }
    if (step.grad_output.numel() == 0) return reference::Glu::glu_backward(step);
    const auto& wanted = step.wanted;
    const bool apart = has_value(step.up);
    const int64_t features = step.grad_output.size(-1);
    const auto grad_gate = S::grad_input(step.gate, wanted[0]);
    const auto grad_up = S::grad_input(step.gate, apart && wanted[1]);
    const auto gate_sums = S::vector(step.gate, step.gate.size(-1), wanted[2]);
    const auto up_sums = S::vector(step.gate, features, apart && wanted[3]);
    const auto hidden = S::grad_input(step.grad_output, wanted[4]);

    const Halves halves(step.gate, step.up);
    kernels::GatingBackward args{halves.describe(step.activation, step.gate)};
    const auto grad = plain_rows(step.grad_output);
    args.grad = grad.matrix.data, args.ld_grad = grad.matrix.ld;
    args.ld_result = step.gate.size(-1);
    args.hidden = data_of(hidden);
    args.grad_gate = data_of(grad_gate), args.gate_sums = data_of(gate_sums);
    args.grad_up = data_of(grad_up), args.up_sums = data_of(up_sums);
    if (!apart) {
      const int64_t half = features * step.gate.element_size();
      args.grad_up = behind(args.grad_gate, half), args.up_sums = behind(args.gate_sums, half);
    }
    gating_pass(args);
    return {grad_gate, grad_up, gate_sums, up_sums, hidden};
  }

 private:
  static Quintuple after_product(const steps::GluBackward& step) {
    const auto& down = *step.down;
    const auto hidden = S::rows(step.grad_output, down.size(1));  // only its shape is read
    const auto grad = std::get<0>(steps::linear_backward(
        {step.grad_output, hidden, down, std::nullopt, Activation::none, {true, false, false}}));
    return glu_backward({grad, step.gate, step.up, step.activation, step.wanted});
  }

  // Runs the product and the gradients of gate and up by one plan. Returns nullopt if there is none
  // for the wanted gradients.
  static std::optional<Quintuple> through_down(const steps::GluBackward& step) {
    const auto& wanted = step.wanted;
    const bool apart = has_value(step.up);
    if (!wanted[0] || wanted[1] != apart || wanted[2] || wanted[3]) return std::nullopt;
    if (step.grad_output.numel() == 0 || step.gate.numel() == 0) return std::nullopt;
    const Halves halves(step.gate, step.up);
    const auto &gate = halves.gate.matrix, &up = halves.up.matrix;
    const auto element = step.gate.element_size();
    // Our kernels and the hardware's copies need these alignments, which a plan's key does not
    // hold.
    if (!gemm::is_aligned(up.data) || up.ld * element % 16 != 0 || gate.cols * element % 16 != 0) {
      return std::nullopt;
    }
    const auto grad_gate = S::grad_input(step.gate, true);
    const auto grad_up = S::grad_input(step.gate, apart);
    const auto none = [&] { return S::unwanted(step.gate); };
    const auto hidden = wanted[4] ? S::rows(step.gate, gate.cols) : none();

    const auto left = rows_of(step.grad_output), right = rows_of(*step.down);
    const Matrix result{gate.rows, gate.cols, step.gate.size(-1), false, grad_gate.data_ptr()};
    auto call = make_call(Pass::gating, left.matrix, right.matrix, result, nullptr, step.activation,
                          gate, Keeps::values);
    call.gating = {up.data, up.ld,
                   apart ? grad_up.data_ptr() : behind(result.data, gate.cols * element),
                   data_of(hidden)};
    complete(call, gemm_type(step.gate.scalar_type()), step.gate.get_device());
    if (is_batch_invariant()) {
      invariant::run(call);
    } else if (!tune::run(call)) {
      return std::nullopt;
    }
    return {{grad_gate, grad_up, none(), none(), hidden}};
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fused, CUDA, m) { dispatch::register_gated<Glu>(m); }

}  // namespace fused::cuda
