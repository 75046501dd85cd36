#include "cuda/tune/algorithms.h"

#include "cuda/runtime/device.h"

#include <ATen/cuda/CUDAContext.h>

#include <map>
#include <mutex>
#include <optional>
#include <tuple>

namespace fused::cuda::tune {
namespace {

// What trials have found, by algorithm and for every size.
class NanVerdicts {
 public:
  std::optional<bool> find(const Problem& matmul, const Algorithm& algorithm) {
    const std::lock_guard lock(mutex_);
    const auto it = known_.find(key(matmul, algorithm));
    return it == known_.end() ? std::nullopt : std::optional(it->second);
  }
  void add(const Problem& matmul, const Algorithm& algorithm, bool verdict) {
    const std::lock_guard lock(mutex_);
    known_.emplace(key(matmul, algorithm), verdict);
  }

 private:
  using Key = std::tuple<gemm::Epilogue, gemm::Type, int, decltype(Algorithm::bytes)>;
  static Key key(const Problem& matmul, const Algorithm& algorithm) {
    return {matmul.epilogue, matmul.type, matmul.arch, algorithm.bytes};
  }

  std::mutex mutex_;
  std::map<Key, bool> known_;
};

NanVerdicts& nan_verdicts() {
  static auto* value = new NanVerdicts;  // outlives every thread
  return *value;
}

// A ReLU's epilogue must let NaN through, which not every algorithm does.
bool lets_nan_through(const PassCall& call, const Strategy& strategy, const Problem& matmul,
                      Descriptors& descriptors, const Algorithm& algorithm) {
  if (const auto known = nan_verdicts().find(matmul, algorithm)) return *known;
  const auto bytes = static_cast<int64_t>(nan_trial_bytes(matmul));
  const Scratch scratch(bytes);
  // PyTorch's allocator may hold all memory there is, and knows how to make room.
  const Workspace instead(scratch.data() == nullptr ? bytes : 0);
  const bool verdict =
      passes_nan(lt_handle(matmul.device), matmul, descriptors, algorithm,
                 operands_of(call, strategy), scratch.data() ? scratch.data() : instead.data(),
                 at::cuda::getCurrentCUDAStream(matmul.device));
  nan_verdicts().add(matmul, algorithm, verdict);
  return verdict;
}

std::vector<Algorithm> without_nan_eaters(const PassCall& call, const Strategy& strategy,
                                          const Problem& matmul, Descriptors& descriptors,
                                          std::vector<Algorithm> algorithms, size_t enough) {
  if (!gemm::needs_nan_trial(matmul)) return algorithms;
  std::vector<Algorithm> good;
  for (const auto& algorithm : algorithms) {
    if (good.size() == enough) break;
    if (lets_nan_through(call, strategy, matmul, descriptors, algorithm)) {
      good.push_back(algorithm);
    }
  }
  return good;
}

}  // namespace

std::vector<Algorithm> algorithms_for(const PassCall& call, const Strategy& strategy, int most,
                                      size_t enough) {
  const auto matmul = gemm::matmul_of(call.problem, strategy);
  Descriptors descriptors(matmul);
  auto offered = heuristic_algorithms(lt_handle(matmul.device), matmul, descriptors,
                                      operands_of(call, strategy), most);
  return without_nan_eaters(call, strategy, matmul, descriptors, std::move(offered), enough);
}

std::vector<Algorithm> algorithms_around(const PassCall& call, const Strategy& strategy,
                                         const Algorithm& algorithm, size_t most) {
  const auto matmul = gemm::matmul_of(call.problem, strategy);
  Descriptors descriptors(matmul);
  descriptors.set_pointers(operands_of(call, strategy));
  auto found = neighbours(lt_handle(matmul.device), matmul, descriptors, algorithm, most);
  return without_nan_eaters(call, strategy, matmul, descriptors, std::move(found), most);
}

}  // namespace fused::cuda::tune
