#pragma once

#include "core/check.h"
#include "core/policy.h"
#include "cuda/runtime/device.h"
#include "gemm/pass_call.h"

namespace fused::cuda {

using gemm::Keeps, gemm::Matrix, gemm::Operands, gemm::Pass, gemm::PassCall, gemm::PassProblem,
    gemm::Provider, gemm::Step, gemm::Strategy;

// A tensor as a matrix: the tensor's own memory if its strides allow, else a copy.
struct Operand {
  Matrix matrix;
  Tensor copy;  // keeps the copy alive
};

// Returns the tensor's memory, nullptr if it is undefined. A copy-on-write tensor stays shared.
inline void* data_of(const Tensor& tensor) {
  return tensor.defined() ? const_cast<void*>(tensor.const_data_ptr()) : nullptr;
}

inline Operand rows_of(const Tensor& tensor) {
  const auto dim = tensor.dim();
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  const int64_t cols = sizes[dim - 1], across = strides[dim - 1];
  int64_t rows = 1, down = 0;
  bool regular = true;  // one stride leads from each row to the next
  for (int64_t d = dim - 2; d >= 0; --d) {
    if (sizes[d] == 1) continue;
    if (rows == 1) {
      down = strides[d];
    } else {
      regular = regular && strides[d] == down * rows;
    }
    rows *= sizes[d];
  }
  auto* data = data_of(tensor);
  if (regular && (across == 1 || cols == 1) && (down >= cols || rows == 1)) {
    return {{rows, cols, std::max(rows == 1 ? cols : down, int64_t{1}), false, data}, {}};
  }
  if (regular && (down == 1 || rows == 1) && (across >= rows || cols == 1)) {
    return {{rows, cols, std::max(cols == 1 ? rows : across, int64_t{1}), true, data}, {}};
  }
  auto copy = tensor.contiguous();
  return {{rows, cols, cols, false, copy.data_ptr()}, copy};
}

inline Operand plain_rows(const Tensor& tensor) {
  auto operand = rows_of(tensor);
  if (!operand.matrix.transposed) return operand;
  auto copy = tensor.contiguous();
  operand = rows_of(copy);
  operand.copy = std::move(copy);
  return operand;
}

// Returns a dense bias at a multiple of 16 bytes, or an undefined tensor if there is none.
// cuBLASLt's heuristic offers kernels that read two elements at a time, whatever the address.
inline Tensor bias_for_epilogue(const OptionalTensor& bias) {
  if (!bias || !bias->defined()) return {};
  auto dense = bias->contiguous();
  return gemm::is_aligned(dense.const_data_ptr()) ? dense : dense.clone();
}

inline Matrix matrix_of(const Tensor& result) {
  const auto cols = result.size(-1);
  return {cols == 0 ? 0 : result.numel() / cols, cols, std::max(cols, int64_t{1}), false,
          result.data_ptr()};
}

inline PassCall make_call(Pass pass, const Matrix& left, const Matrix& right, const Matrix& result,
                          void* bias = nullptr, Activation activation = Activation::none,
                          const Matrix& aux = {}, Keeps keeps = Keeps::nothing) {
  PassCall call{{}, left, right, result, aux, bias};
  call.problem.pass = pass;
  call.problem.activation = activation;
  call.problem.keeps = keeps;
  call.problem.library_only = policy() == Policy::cublaslt;
  return call;
}

// Fills in the problem of a call whose matrices, bias, pass, activation and saved tensor are set.
inline void complete(PassCall& call, gemm::Type type, int device) {
  auto& matmul = call.problem.matmul;
  const auto given = matmul;
  matmul = gemm::matmul_problem(call.left, call.right, call.result, gemm::Epilogue::identity, type,
                                nullptr, nullptr, 0, gemm_settings(device, type));
  matmul.adds = given.adds, matmul.to_f32 = given.to_f32;
  if (call.bias != nullptr) matmul.aligned_bias = gemm::is_aligned(call.bias);
  if (call.aux.data != nullptr) {
    matmul.aligned_aux = gemm::is_aligned(call.aux.data);
    // A mask's leading dimension counts bits. A single row has no stride. If we made it for the
    // library it is padded; another one may end with its last element.
    const bool padded = gemm::is_forward(call.problem.pass) || call.problem.library_only;
    matmul.ld_aux = call.problem.keeps != Keeps::values ? call.aux.ld * 8
                    : call.aux.rows == 1 && padded      ? padded_features(call.aux.cols)
                                                        : call.aux.ld;
  }
  call.problem.bias = call.bias != nullptr;
  call.problem.deterministic = at::globalContext().deterministicAlgorithms();
}

}  // namespace fused::cuda
