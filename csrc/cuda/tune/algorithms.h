#pragma once

// cuBLASLt's algorithms that may serve a strategy: offered by its heuristic, or around a good one.

#include "cuda/hopper/hopper.h"
#include "cuda/runtime/cublaslt.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/gemm_call.h"
#include "cuda/runtime/prepared_plan.h"
#include "gemm/choice.h"

#include <vector>

namespace fused::cuda::tune {

inline bool is_own_product(const Strategy& strategy) {
  return strategy.provider == Provider::own && gemm::has_step(strategy, Step::matmul);
}

// What is offered for the strategy's product, best guess first, by the library at most so many. An
// empty algorithm stands for those that leave nothing to choose.
inline std::vector<Algorithm> algorithms_for(const PassCall& call, const Strategy& strategy,
                                             int most) {
  if (is_own_product(strategy)) {
    std::vector<Algorithm> orders(std::size(gemm::hopper::orders));
    for (size_t i = 0; i < orders.size(); ++i) {
      orders[i] = {{i}, hopper::workspace_bytes(call.problem)};
    }
    return orders;
  }
  if (strategy.provider != Provider::cublaslt) return {Algorithm()};
  const auto matmul = gemm::matmul_of(call.problem, strategy);
  Descriptors descriptors(matmul);
  return heuristic_algorithms(lt_handle(matmul.device), matmul, descriptors,
                              operands_of(call, strategy), most);
}

// Other configurations of an algorithm (tile, cluster), the most similar first.
inline std::vector<Algorithm> algorithms_around(const PassCall& call, const Strategy& strategy,
                                                const Algorithm& algorithm, size_t most) {
  const auto matmul = gemm::matmul_of(call.problem, strategy);
  Descriptors descriptors(matmul);
  descriptors.set_pointers(operands_of(call, strategy));
  return neighbours(lt_handle(matmul.device), matmul, descriptors, algorithm, most);
}

// A plan ready for this very call; nothing where the strategy or the algorithm cannot serve it.
// Launches nothing and may be called while a stream captures.
inline std::optional<Plan> plan_for(const PassCall& call, const Strategy& strategy,
                                    const Algorithm& algorithm) {
  if (gemm::objection(call.problem, strategy, available(call.problem))) return std::nullopt;
  Plan plan{&strategy, {}, {}, {}, {}, {}};
  if (is_own_product(strategy)) {
    if (!gemm::hopper::order_of(algorithm)) return std::nullopt;
    plan.algorithm = {algorithm.bytes, hopper::workspace_bytes(call.problem)};
  }
  if (strategy.provider != Provider::cublaslt) return plan;
  plan.matmul = gemm::matmul_of(call.problem, strategy);
  plan.descriptors.emplace(plan.matmul);
  plan.descriptors->set_pointers(operands_of(call, strategy));
  const auto valid =
      checked(lt_handle(plan.matmul.device), plan.matmul, *plan.descriptors, algorithm);
  if (!valid) return std::nullopt;
  plan.algorithm = *valid;
  return plan;
}

}  // namespace fused::cuda::tune
