#pragma once

// A pass of a layer on a GPU: its operands as matrices, made a problem.

#include "fused_linear.h"
#include "gemm/pass_problem.h"
#include "gemm/strategy.h"

#include <ATen/core/Tensor.h>

#include <vector>

namespace fused::cuda {

using gemm::Matrix, gemm::Operands, gemm::Pass, gemm::PassProblem, gemm::Provider, gemm::Step,
    gemm::Strategy;

// A tensor read as a matrix, in place wherever its strides allow.
struct Operand {
  Matrix matrix;
  Tensor copy;  // keeps it alive where they did not
};
Operand rows_of(const Tensor& tensor);     // [*, cols] -> [rows, cols]
Operand plain_rows(const Tensor& tensor);  // the same of unit stride, as our own kernels read them
Matrix transposed(const Matrix& matrix);
Matrix matrix_of(const Tensor& result);  // contiguous [*, cols] as [rows, cols]

// Dense, and where every kernel of cuBLASLt can read it: whatever the address, its heuristic offers
// some that read two elements at a time. Undefined where there is none.
Tensor bias_for_epilogue(const std::optional<Tensor>& bias);

struct PassCall {
  PassProblem problem;
  Matrix left, right;  // of the product, as meant; without one left is the gradient that came
  Matrix result;       // rows of unit stride
  Matrix aux;  // forward: written, if problem.aux or wants_bits; backward: what act' is read from
  void* bias;  // read forward, its gradient written backward; or nullptr
  gemm::Gating gating = {};
  gemm::Up up = {};
  bool adds = false;            // the product to the result that is there
  bool is_wide = false;         // the result is in fp32, whatever the operands are in
  bool bias_is_matrix = false;  // ATen adds it to the sum, as eager does one that is strided
  std::vector<PassCall> layers = {};  // of a chain
};

PassCall make_call(Pass pass, const Matrix& left, const Matrix& right, const Matrix& result,
                   void* bias = nullptr, Activation activation = Activation::none,
                   const Matrix& aux = {}, bool mask = false);

// Completes the call: `problem` holds the pass, the activation and the flags, the matrices and the
// bias are set.
void complete(PassCall& call, gemm::Type type, int device);

// The product's operands under a strategy.
Operands operands_of(const PassCall& call, const Strategy& strategy);

// The matrix whose column sums are the pass's bias gradient.
Matrix summed(const PassCall& call);

// Where the matrix product leaves its result: the pre-activation, if it is kept, is not overwritten
// by the activation.
const Matrix& matmul_result(const PassCall& call, const Strategy& strategy);

}  // namespace fused::cuda
