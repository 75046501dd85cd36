#pragma once

// From tensors to the call of a pass.

#include "core/check.h"
#include "gemm/pass_call.h"

#include <ATen/core/Tensor.h>

namespace fused::cuda {

using gemm::Keeps, gemm::Matrix, gemm::Operands, gemm::Pass, gemm::PassCall, gemm::PassProblem,
    gemm::Provider, gemm::Step, gemm::Strategy;

// A tensor read as a matrix, in place wherever its strides allow.
struct Operand {
  Matrix matrix;
  Tensor copy;  // keeps it alive where they did not
};
Operand rows_of(const Tensor& tensor);     // [*, cols] -> [rows, cols]
Operand plain_rows(const Tensor& tensor);  // the same of unit stride, as our own kernels read them
void* data_of(const Tensor& tensor);     // nullptr of an undefined one; copy-on-write stays shared
Matrix matrix_of(const Tensor& result);  // contiguous [*, cols] as [rows, cols]

// Dense, and where every kernel of cuBLASLt can read it: whatever the address, its heuristic offers
// some that read two elements at a time. Undefined where there is none.
Tensor bias_for_epilogue(const OptionalTensor& bias);

PassCall make_call(Pass pass, const Matrix& left, const Matrix& right, const Matrix& result,
                   void* bias = nullptr, Activation activation = Activation::none,
                   const Matrix& aux = {}, Keeps keeps = Keeps::nothing);

// Completes the call: the matrices and the bias are set, and `problem` holds the pass, the
// activation, what is kept, and whether the product is added and in fp32.
void complete(PassCall& call, gemm::Type type, int device);

}  // namespace fused::cuda
