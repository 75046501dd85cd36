#include "cuda/float8/multiply.h"

#include "core/explain.h"
#include "cuda/float8/cast.h"
#include "cuda/float8/product.h"
#include "cuda/runtime/device.h"
#include "cuda/tune/stopwatch.h"
#include "plans/registry.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <ATen/cuda/CUDAGraphsUtils.cuh>

#include <mutex>
#include <sstream>
#include <unordered_map>

namespace fused::cuda::float8 {
namespace {

using gemm::Algorithm;

struct ShapeHash {
  size_t operator()(const ProductShape& s) const {
    uint64_t hash = 0;
    const auto mix = [&hash](uint64_t value) {
      hash = (hash ^ value) * 0x9e3779b97f4a7c15ull;
      hash ^= hash >> 32;
    };
    mix(s.m), mix(s.n), mix(s.k), mix(s.workspace_limit);
    uint64_t flags = static_cast<uint64_t>(s.device) << 8 | static_cast<uint64_t>(s.type);
    for (const bool flag : {s.a_is_e5m2, s.b_is_e5m2, s.has_bias, s.adds, s.fast}) {
      flags = flags << 1 | static_cast<uint64_t>(flag);
    }
    mix(flags);
    return hash;
  }
};

// --- what is known -------------------------------------------------------------------------------

// The choices of this process, for all threads.
struct Chosen {
  std::mutex mutex;
  uint64_t generation = 0;
  std::unordered_map<ProductShape, Algorithm, ShapeHash> algorithms;
};

Chosen& chosen() {
  static auto* all = new Chosen;  // never destroyed: threads may outlive the process's end
  return *all;
}

// A thread's own descriptors, which carry pointers.
struct Ready {
  Product product;
  Algorithm algorithm;
};

struct ThreadProducts {
  uint64_t generation = 0;
  std::unordered_map<ProductShape, Ready, ShapeHash> ready;
};

auto& thread_products() {
  constexpr size_t kept = 4096;
  thread_local ThreadProducts mine;
  const auto now = plans::generation();
  if (mine.generation != now || mine.ready.size() >= kept) {
    mine.ready.clear();
    mine.generation = now;
  }
  return mine.ready;
}

// --- choosing ------------------------------------------------------------------------------------

// Returns whether the results agree as closely as sums in another order do.
bool agree(const Tensor& result, const Tensor& expected) {
  constexpr double tolerance = 0.02;
  const auto difference = at::norm(result.to(at::kFloat).sub_(expected)).item<double>();
  return !(difference > tolerance * at::norm(expected).item<double>());  // NaN is no reason
}

// Times the algorithms on the call's own operands. The first is the heuristic's choice.
Algorithm fastest(const ProductShape& shape, Product& product, const ProductOperands& operands,
                  const std::vector<Algorithm>& candidates, const Tensor& result) {
  const auto& device = device_of(shape.device);
  int64_t bytes = 1;
  for (const auto& candidate : candidates) bytes = std::max(bytes, candidate.workspace);
  const DriverMemory workspace(bytes);
  if (workspace.data() == nullptr) return candidates.front();
  const auto stream = at::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(shape.device));
  const auto clock = tune::start_clock();
  const auto run = [&](size_t i) {
    return product.run(device.handle, candidates[i], operands, workspace.data(), stream);
  };
  tune::Stopwatch stopwatch(candidates.size(), run);
  plans::Candidates field{{}, /*incumbent=*/0, /*yardstick=*/candidates.size()};
  for (size_t i = 0; i < candidates.size(); ++i) field.eligible.push_back(stopwatch.once(i));
  if (!run(0)) return candidates.front();
  const auto expected = result.to(at::kFloat, /*non_blocking=*/false, /*copy=*/true);
  const double operations = 2.0 * static_cast<double>(shape.m) * static_cast<double>(shape.n) *
                            static_cast<double>(shape.k);
  constexpr double calls = 24;
  const auto choice = tune::fastest(
      field, stopwatch, clock, plans::budget() * 1e3 * plans::share_of_budget(operations), calls,
      [&](size_t i) {
        if (!run(i)) return plans::Verdict::failed;
        return agree(result, expected) ? plans::Verdict::sound : plans::Verdict::inexact;
      });
  const size_t winner = choice ? choice->winner : 0;
  std::ostringstream line;
  line << "FP8 product m=" << shape.m << " n=" << shape.n << " k=" << shape.k
       << (shape.fast ? " fast" : "") << (shape.has_bias ? " bias" : "")
       << (shape.adds ? " added" : "") << ": " << stopwatch.best(winner).device << " us ("
       << "the heuristic's choice " << stopwatch.best(0).device << " us, " << candidates.size()
       << " candidates)";
  plans::log(line.str());
  return candidates[winner];
}

// Nothing where the library has none. What is found while a stream captures, or under deterministic
// algorithms, is the heuristic's choice and remembered for this call alone.
std::optional<Algorithm> choose(const ProductShape& shape, Product& product,
                                const ProductOperands& operands, const Tensor& result) {
  const c10::cuda::CUDAStreamCaptureModeGuard others_may_capture(cudaStreamCaptureModeRelaxed);
  constexpr int asked = 8;
  const auto candidates = product.algorithms(device_of(shape.device).handle, operands, asked);
  if (candidates.empty()) return std::nullopt;
  return candidates.size() == 1 ? candidates.front()
                                : fastest(shape, product, operands, candidates, result);
}

std::optional<Algorithm> known(const ProductShape& shape, uint64_t generation) {
  auto& all = chosen();
  const std::lock_guard lock(all.mutex);
  if (all.generation != generation) all.algorithms.clear();
  all.generation = generation;
  const auto it = all.algorithms.find(shape);
  return it == all.algorithms.end() ? std::nullopt : std::optional(it->second);
}

void remember(const ProductShape& shape, const Algorithm& algorithm, uint64_t generation) {
  auto& all = chosen();
  const std::lock_guard lock(all.mutex);
  if (all.generation == generation) all.algorithms.emplace(shape, algorithm);
}

bool run(const ProductShape& shape, Product& product, const Algorithm& algorithm,
         const ProductOperands& operands) {
  const Workspace workspace(algorithm.workspace);
  const auto stream = at::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(shape.device));
  return product.run(device_of(shape.device).handle, algorithm, operands, workspace.data(), stream);
}

bool run_first(const ProductShape& shape, const ProductOperands& operands) {
  Product product(shape);
  const c10::cuda::CUDAStreamCaptureModeGuard others_may_capture(cudaStreamCaptureModeRelaxed);
  const auto found = product.algorithms(device_of(shape.device).handle, operands, /*most=*/1);
  return !found.empty() && run(shape, product, found.front(), operands);
}

bool run_fastest(const ProductShape& shape, const ProductOperands& operands, const Tensor& result) {
  auto& ready = thread_products();
  auto it = ready.find(shape);
  if (it == ready.end()) {
    const auto generation = plans::generation();
    auto algorithm = known(shape, generation);
    if (!algorithm && is_capturing()) return run_first(shape, operands);
    Product product(shape);
    if (!algorithm) {
      const std::lock_guard lock(device_of(shape.device).measuring);
      algorithm = known(shape, generation);  // by another thread
      if (!algorithm) algorithm = choose(shape, product, operands, result);
      if (!algorithm) return false;
      remember(shape, *algorithm, generation);
    }
    it = ready.emplace(shape, Ready{std::move(product), *algorithm}).first;
  }
  return run(shape, it->second.product, it->second.algorithm, operands);
}

// The library needs an alignment of 16 bytes.
Tensor aligned(const Tensor& tensor) {
  return gemm::is_aligned(tensor.data_ptr()) ? tensor : tensor.clone();
}

}  // namespace

std::optional<Tensor> multiply(const Call& call) {
  const c10::cuda::CUDAGuard guard(call.a.device());
  const int64_t m = call.a.size(0), n = call.b.size(0), k = call.a.size(1);
  if (m == 0 || n == 0 || k == 0 || n % multiple != 0 || k % multiple != 0) return std::nullopt;
  const auto a = aligned(call.a), b = aligned(call.b);
  const auto result = empty({m, n}, call.a, call.dtype);
  // For fp32 results the library takes no bias of theirs.
  const bool has_bias = has_value(call.bias), bias_apart = has_bias && call.dtype == at::kFloat;
  Tensor bias, add;
  if (has_bias && !bias_apart) bias = aligned(*call.bias);
  if (has_value(call.add)) add = aligned(*call.add);
  const ProductShape shape{call.a.get_device(),
                           gemm_type(call.dtype),
                           a.scalar_type() == at::kFloat8_e5m2,
                           b.scalar_type() == at::kFloat8_e5m2,
                           bias.defined(),
                           add.defined(),
                           call.fast,
                           m,
                           n,
                           k,
                           device_of(call.a.get_device()).workspace_limit};
  const ProductOperands operands{a.data_ptr(),
                                 b.data_ptr(),
                                 call.inverse_a.data_ptr<float>(),
                                 call.inverse_b.data_ptr<float>(),
                                 bias.defined() ? bias.data_ptr() : nullptr,
                                 add.defined() ? add.data_ptr() : nullptr,
                                 result.data_ptr()};
  const bool measures = plans::budget() > 0 && !at::globalContext().deterministicAlgorithms();
  const bool done = measures ? run_fastest(shape, operands, result) : run_first(shape, operands);
  if (!done) return std::nullopt;
  explain::append("cuBLASLt FP8");
  if (bias_apart) result.add_(*call.bias);
  return result;
}

}  // namespace fused::cuda::float8
