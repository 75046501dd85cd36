#include "cuda/tune/algorithms.h"

#include "cuda/runtime/device.h"

namespace fused::cuda::tune {

std::vector<Algorithm> algorithms_for(const PassCall& call, const Strategy& strategy, int most) {
  const auto matmul = gemm::matmul_of(call.problem, strategy);
  Descriptors descriptors(matmul);
  return heuristic_algorithms(lt_handle(matmul.device), matmul, descriptors,
                              operands_of(call, strategy), most);
}

std::vector<Algorithm> algorithms_around(const PassCall& call, const Strategy& strategy,
                                         const Algorithm& algorithm, size_t most) {
  const auto matmul = gemm::matmul_of(call.problem, strategy);
  Descriptors descriptors(matmul);
  descriptors.set_pointers(operands_of(call, strategy));
  return neighbours(lt_handle(matmul.device), matmul, descriptors, algorithm, most);
}

}  // namespace fused::cuda::tune
