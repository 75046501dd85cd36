#include "cuda/tune/trial.h"

#include "core/explain.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/execute.h"
#include "cuda/tune/algorithms.h"
#include "cuda/tune/trial_operands.h"
#include "gemm/choice.h"
#include "plans/bounded_map.h"
#include "plans/registry.h"

#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <string>
#include <tuple>
#include <vector>

namespace fused::cuda::tune {

using gemm::Algorithm;
using plans::TrialErrors, plans::Verdict;

// ---- errors ------------------------------------------------------------------------------------

class Trial::Errors {
 public:
  explicit Errors(const PassCall& call)
      : operands_(call), exact_known_(TrialOperands::most_ends * TrialOperands::most_seeds) {}

  // Eager's errors, once; nothing where it does not run. A bias that is no dense vector, or another
  // number of tokens, may spare its product a rounding before the bias: the better way counts.
  const std::optional<TrialErrors>& reference() {
    if (!reference_known_) {
      reference_known_ = true;
      reference_errors_ = errors_of_eager(/*bias_is_matrix=*/false);
      const auto& call = operands_.ends().front().call;
      if (gemm::is_forward(call.problem.pass) && call.bias != nullptr) {
        const auto other = errors_of_eager(/*bias_is_matrix=*/true);
        if (other &&
            (!reference_errors_ || other->elements.squares < reference_errors_->elements.squares)) {
          reference_errors_ = other;
        }
      }
    }
    return reference_errors_;
  }

  std::optional<TrialErrors> errors_of(const Strategy& strategy, const Algorithm& algorithm) {
    return errors_of(
        [&](const TrialOperands::End& end) {
          auto plan = plan_for(end.call, strategy, algorithm);
          return plan && execute(end.call, *plan, operands_.workspace(), operands_.stream());
        },
        &TrialOperands::End::call, /*with_nan=*/true);
  }

 private:
  std::optional<TrialErrors> errors_of_eager(bool bias_is_matrix) {
    const auto& problem = operands_.ends().front().eager.problem;
    Plan plan{&gemm::eager_of(problem, available(problem)), {}, {}, {}, {}, {}};
    const auto run = [&](const TrialOperands::End& end) {
      auto call = end.eager;
      call.bias_is_matrix = bias_is_matrix;
      return execute(call, plan, nullptr, operands_.stream());
    };
    return errors_of(run, &TrialOperands::End::eager, /*with_nan=*/false);
  }

  // Errors at the ends where it runs, pooled over the seeds; nothing where it runs at neither.
  template <typename Run>
  std::optional<TrialErrors> errors_of(const Run& run, PassCall TrialOperands::End::* which,
                                       bool with_nan) {
    const auto stream = operands_.stream();
    auto* errors = operands_.errors();
    C10_CUDA_CHECK(cudaMemsetAsync(errors, 0, sizeof(TrialErrors), stream));
    bool ran = false;
    for (size_t e = 0; e < operands_.ends().size(); ++e) {
      const auto& end = operands_.ends()[e];
      for (int64_t seed = 0; seed < operands_.seeds(); ++seed) {
        operands_.prepare(end, seed);
        const auto* known = exact_of(e, seed);
        if (!run(end)) break;
        ran = true;
        const auto data = describe(end.*which);
        add_errors(data, known, errors, stream);
        if (!with_nan || seed > 0) continue;
        operands_.prepare(end, seed);
        poison(end.call.problem.matmul.type, end.call.left, stream);
        if (run(end)) add_lost_nans(data, errors, stream);
      }
    }
    if (!ran) return std::nullopt;
    TrialErrors found;
    C10_CUDA_CHECK(cudaMemcpyAsync(&found, errors, sizeof(found), cudaMemcpyDeviceToHost, stream));
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    return found;
  }

  // Computed once, from operands that are there.
  const Exact* exact_of(size_t end, int64_t seed) {
    const size_t index = end * TrialOperands::most_seeds + seed;
    auto* values = operands_.exact(end, seed);
    if (!exact_known_[index]) {
      exact_values(describe(operands_.ends()[end].call), values, operands_.stream());
    }
    exact_known_[index] = true;
    return values;
  }

  TrialOperands operands_;
  std::vector<bool> exact_known_;
  bool reference_known_ = false;
  std::optional<TrialErrors> reference_errors_;
};

// ---- verdict -----------------------------------------------------------------------------------

namespace {

using Key = std::tuple<size_t, const Strategy*, decltype(Algorithm::bytes)>;

// Of a bucket, by its hash; two may share one.
auto& verdicts() {
  static auto* value = new plans::BoundedMap<Key, std::pair<PassProblem, Verdict>, 1 << 16>;
  return *value;  // outlives every thread
}

void log_refusal(const Strategy& strategy, const TrialErrors& errors, const TrialErrors& eager) {
  if (plans::verbosity() < 2) return;
  plans::log(std::string("  refused ") + strategy.name + ": " + plans::summary(errors, eager));
}

}  // namespace

Trial::Trial(const PassCall& call) : call_(call) {}
Trial::~Trial() = default;

Verdict Trial::judge(const Strategy& strategy, const Algorithm& algorithm) {
  auto bucket =
      gemm::bucket_of(call_.problem, machine_of(call_.problem.matmul.device).first_equal_device);
  const Key key{gemm::PassProblemHash()(bucket), &strategy, algorithm.bytes};
  const auto known = verdicts().find(key);
  if (known && known->first == bucket) return known->second;
  const explain::Quiet nothing_shown;
  const c10::cuda::CUDAStreamCaptureModeGuard others_may_capture(cudaStreamCaptureModeRelaxed);
  try {
    if (!errors_) errors_ = std::make_unique<Errors>(call_);
    const auto& reference = errors_->reference();
    const auto errors = reference ? errors_->errors_of(strategy, algorithm) : std::nullopt;
    if (!errors) return Verdict::failed;
    // In fp64 the exact results are no more exact than those that they judge.
    const bool f64 = call_.problem.matmul.type == gemm::Type::f64;
    const auto verdict =
        plans::is_as_exact(*errors, *reference, f64 ? 1 : 1e-6) ? Verdict::sound : Verdict::inexact;
    verdicts().put(key, {bucket, verdict});
    if (verdict == Verdict::inexact) log_refusal(strategy, *errors, *reference);
    return verdict;
  } catch (const c10::OutOfMemoryError&) {
    lacked_memory_ = true;
    return Verdict::failed;
  }
}

}  // namespace fused::cuda::tune
