#pragma once

// A stage of a layer on a GPU: its operands as matrices, made a problem, planned and run.

#include "cuda/runtime/prepared_plan.h"
#include "gemm/strategy.h"

#include <ATen/core/Tensor.h>
#include <cuda_runtime_api.h>

namespace fused {

using at::Tensor;

// A tensor read as a matrix, in place wherever its strides allow.
struct Operand {
  gemm::Matrix matrix;
  Tensor copy;  // keeps it alive where they did not
};
Operand rows_of(const Tensor& tensor);  // [*, cols] -> [rows, cols]
gemm::Matrix transposed(const gemm::Matrix& matrix);

struct StageCall {
  gemm::StageProblem problem;
  gemm::Matrix left, right;  // of the product, as meant
  gemm::Matrix result;       // rows of unit stride
  gemm::Matrix aux;  // forward: written, if problem.aux; input gradient: what act' is read from
  void* bias;        // read forward, its gradient written backward; or nullptr
};

// Completes the call: `problem` holds the stage, the activation and the flags, the matrices and the
// bias are set.
void describe(StageCall& call, gemm::Type type, int device);

// The product's operands under a strategy.
gemm::Operands operands_of(const StageCall& call, const gemm::Strategy& strategy);

// The matrix whose column sums are the stage's bias gradient.
gemm::Matrix summed(const StageCall& call);

// Runs the stage on the current stream of the current device. False, with nothing done, only for a
// forward that writes aux where neither the library nor ATen can: a mask, or padded rows.
bool run(const StageCall& call);

// One strategy, its product by the algorithm. The steps of `plan`; false where the product does not
// run, and nothing after it has then.
bool execute(const StageCall& call, gemm::Plan& plan, void* workspace, cudaStream_t stream);

// matrix's column sums; act'(saved) · grad and its column sums. Either of dz and sums may be null;
// dz, contiguous rows, may be grad itself.
void one_pass(const gemm::Matrix& grad, const gemm::Matrix& saved, bool mask, Activation activation,
              gemm::Type type, void* dz, void* sums);

}  // namespace fused
