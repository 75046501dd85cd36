#include "cuda/runtime/gemm_call.h"

#include "core/aux_layout.h"
#include "core/policy.h"
#include "cuda/runtime/device.h"

#include <ATen/Context.h>

namespace fused::cuda {

const Matrix& matmul_result(const PassCall& call, const Strategy& strategy) {
  const bool is_glu = call.problem.pass == Pass::glu;
  const bool apart = !strategy.fuses_activation &&
                     (is_glu || (call.problem.pass == Pass::fprop && call.problem.aux));
  return apart ? call.aux : call.result;
}

// A weight gradient's left operand is dz, transposed.
Matrix summed(const PassCall& call) {
  return call.problem.pass == gemm::Pass::wgrad ? transposed(call.left) : call.result;
}

gemm::Operands operands_of(const PassCall& call, const Strategy& strategy) {
  return {call.right.data, call.left.data, matmul_result(call, strategy).data,
          call.bias,       call.aux.data,  call.gating,
          call.up};
}

Operand rows_of(const Tensor& tensor) {
  const auto dim = tensor.dim();
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  const int64_t cols = sizes[dim - 1], across = strides[dim - 1];
  int64_t rows = 1, down = 0;
  bool regular = true;  // whether one stride leads from each row to the next
  for (int64_t d = dim - 2; d >= 0; --d) {
    if (sizes[d] == 1) continue;
    if (rows == 1) {
      down = strides[d];
    } else {
      regular = regular && strides[d] == down * rows;
    }
    rows *= sizes[d];
  }
  auto* data = const_cast<void*>(tensor.const_data_ptr());  // copy-on-write stays shared
  if (regular && (across == 1 || cols == 1) && (down >= cols || rows == 1)) {
    return {{rows, cols, std::max(rows == 1 ? cols : down, int64_t{1}), false, data}, {}};
  }
  if (regular && (down == 1 || rows == 1) && (across >= rows || cols == 1)) {
    return {{rows, cols, std::max(cols == 1 ? rows : across, int64_t{1}), true, data}, {}};
  }
  auto copy = tensor.contiguous();
  return {{rows, cols, cols, false, copy.data_ptr()}, copy};
}

Operand plain_rows(const Tensor& tensor) {
  auto operand = rows_of(tensor);
  if (!operand.matrix.transposed) return operand;
  auto copy = tensor.contiguous();
  operand = rows_of(copy);
  operand.copy = std::move(copy);
  return operand;
}

Matrix transposed(const Matrix& matrix) {
  return {matrix.cols, matrix.rows, matrix.ld, !matrix.transposed, matrix.data};
}

Tensor bias_for_epilogue(const std::optional<Tensor>& bias) {
  if (!bias || !bias->defined()) return {};
  auto dense = bias->contiguous();
  const auto alignment = gemm::alignment_class(dense.const_data_ptr());
  return gemm::is_aligned_to_16_bytes(alignment) ? dense : dense.clone();
}

Matrix matrix_of(const Tensor& result) {
  const auto cols = result.size(-1);
  return {cols == 0 ? 0 : result.numel() / cols, cols, std::max(cols, int64_t{1}), false,
          result.data_ptr()};
}

PassCall make_call(Pass pass, const Matrix& left, const Matrix& right, const Matrix& result,
                   void* bias, Activation activation, const Matrix& aux, bool mask) {
  PassCall call{{}, left, right, result, aux, bias};
  call.problem.pass = pass;
  call.problem.activation = activation;
  call.problem.aux = pass == Pass::fprop && aux.data != nullptr;
  call.problem.mask = mask;
  call.problem.literal = policy() == Policy::cublaslt;
  return call;
}

void complete(PassCall& call, gemm::Type type, int device) {
  const bool has_aux = call.aux.data != nullptr;
  // A mask's leading dimension counts bits. A single row has no stride to speak of.
  // Whoever makes an aux buffer for the library pads it; a tensor of one row that was saved in some
  // other way has nothing behind its end.
  const bool padded = gemm::is_forward(call.problem.pass) || call.problem.literal;
  const int64_t ld_aux = !has_aux                       ? 0
                         : call.problem.mask            ? call.aux.ld * 8
                         : call.aux.rows == 1 && padded ? padded_features(call.aux.cols)
                                                        : call.aux.ld;
  call.problem.matmul =
      gemm::matmul_problem(call.left, call.right, call.result, gemm::Epilogue::identity, type,
                           nullptr, nullptr, 0, gemm_settings(device, type));
  call.problem.matmul.adds = call.adds;
  call.problem.matmul.to_f32 = call.is_wide;
  if (call.bias != nullptr) call.problem.matmul.align_bias = gemm::alignment_class(call.bias);
  if (has_aux) {
    call.problem.matmul.align_aux = gemm::alignment_class(call.aux.data);
    call.problem.matmul.ld_aux = ld_aux;
  }
  call.problem.bias = call.bias != nullptr;
  call.problem.deterministic = at::globalContext().deterministicAlgorithms();
}

}  // namespace fused::cuda
