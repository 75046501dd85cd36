#pragma once

// Descriptors, algorithms and calls of cuBLASLt, without torch.

#include "gemm/problem.h"

#include <cublasLt.h>

#include <memory>
#include <optional>
#include <vector>

namespace fused::cuda {

using gemm::Algorithm, gemm::Operands, gemm::Problem;

size_t lt_version();
cublasLtHandle_t new_lt_handle();  // for the current device

// The library's description of a problem. Each call sets its pointers, so one thread uses it at a
// time.
struct Descriptors {
  explicit Descriptors(const Problem& problem);

  void set_pointers(const Operands& operands);

  struct Destroy {
    void operator()(cublasLtMatmulDescOpaque_t* p) const { cublasLtMatmulDescDestroy(p); }
    void operator()(cublasLtMatrixLayoutOpaque_t* p) const { cublasLtMatrixLayoutDestroy(p); }
  };
  using Layout = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, Destroy>;

  bool has_bias, has_aux;
  std::unique_ptr<cublasLtMatmulDescOpaque_t, Destroy> operation;
  Layout a, b, d;
};

// Asks the heuristic for algorithms, best guess first, and leaves out those known to be wrong. Must
// not be called while a stream captures.
std::vector<Algorithm> heuristic_algorithms(cublasLtHandle_t handle, const Problem& problem,
                                            Descriptors& descriptors, const Operands& operands,
                                            int most);

// Returns the algorithm with the workspace that this problem needs, or nullopt if it cannot be
// used. May be called while a stream captures.
std::optional<Algorithm> checked(cublasLtHandle_t handle, const Problem& problem,
                                 const Descriptors& descriptors, const Algorithm& algorithm);

// Finds at most `most` other valid configurations of the algorithm, the most similar first.
std::vector<Algorithm> neighbours(cublasLtHandle_t handle, const Problem& problem,
                                  const Descriptors& descriptors, const Algorithm& algorithm,
                                  size_t most);

// d = epilogue(a · b); the workspace holds algorithm.workspace bytes.
cublasStatus_t matmul(cublasLtHandle_t handle, const Problem& problem, Descriptors& descriptors,
                      const Algorithm& algorithm, const Operands& operands, void* workspace,
                      cudaStream_t stream);

}  // namespace fused::cuda
