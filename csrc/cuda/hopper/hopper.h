#pragma once

// Our own products for Hopper GPUs, where TORCH_FUSED_LINEAR_HOPPER says so; else absent.cpp.

#include "gemm/pass_problem.h"

#include <cuda_runtime_api.h>

namespace fused::cuda::hopper {

// Tells whether the kernels were built, and run on this architecture, 90 for 9.0.
bool available(int arch);

// Tells run's bytes of scratch, for the bias gradient's partial sums.
int64_t workspace_bytes(const gemm::PassProblem& problem);

// narrow: for few tokens, of a forward product that keeps nothing. The results have the same bits.
enum class Tiles { wide, narrow };

// Forward: d = act(a · b + bias), and to aux what problem.keeps says. Backward: d = a · b ·
// act'(aux), and its column sums to bias, if problem.bias. Gated layers: gemm::Gating and gemm::Up.
// Tells whether it ran.
bool run(const gemm::PassProblem& problem, const gemm::Algorithm& algorithm,
         const gemm::Operands& operands, void* workspace, int processors, cudaStream_t stream,
         Tiles tiles = Tiles::wide);

}  // namespace fused::cuda::hopper
