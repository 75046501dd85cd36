#include "cuda/tune/algorithms.h"
#include "cuda/hopper/hopper.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/execute.h"
#include "gemm/choice.h"

#include <iterator>

namespace fused::cuda::tune {

std::vector<Algorithm> algorithms_for(const PassCall& call, const Strategy& strategy, int most) {
  if (gemm::is_own_product(strategy)) {
    std::vector<Algorithm> orders(std::size(gemm::hopper::orders));
    for (size_t i = 0; i < orders.size(); ++i) {
      orders[i] = {{i}, hopper::workspace_bytes(call.problem)};
    }
    return orders;
  }
  if (strategy.provider != Provider::cublaslt) return {Algorithm()};
  const auto matmul = gemm::matmul_of(call.problem, strategy);
  Descriptors descriptors(matmul);
  return heuristic_algorithms(device_of(matmul.device).handle, matmul, descriptors,
                              operands_of(call, strategy), most);
}

std::vector<Algorithm> algorithms_around(const PassCall& call, const Strategy& strategy,
                                         const Algorithm& algorithm, size_t most) {
  const auto matmul = gemm::matmul_of(call.problem, strategy);
  Descriptors descriptors(matmul);
  descriptors.set_pointers(operands_of(call, strategy));
  return neighbours(device_of(matmul.device).handle, matmul, descriptors, algorithm, most);
}

std::optional<Plan> plan_for(const PassCall& call, const Strategy& strategy,
                             const Algorithm& algorithm) {
  if (gemm::objection(call.problem, strategy, available(call.problem))) return std::nullopt;
  Plan plan{&strategy, {}, {}, {}, {}, {}};
  if (gemm::is_own_product(strategy)) {
    if (!gemm::hopper::order_of(algorithm)) return std::nullopt;
    plan.algorithm = {algorithm.bytes, hopper::workspace_bytes(call.problem)};
  }
  if (strategy.provider != Provider::cublaslt) return plan;
  plan.matmul = gemm::matmul_of(call.problem, strategy);
  plan.descriptors.emplace(plan.matmul);
  plan.descriptors->set_pointers(operands_of(call, strategy));
  const auto valid =
      checked(device_of(plan.matmul.device).handle, plan.matmul, *plan.descriptors, algorithm);
  if (!valid) return std::nullopt;
  plan.algorithm = *valid;
  return plan;
}

}  // namespace fused::cuda::tune
