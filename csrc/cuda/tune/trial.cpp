#include "cuda/tune/trial.h"
#include "core/explain.h"
#include "cuda/runtime/execute.h"
#include "cuda/tune/algorithms.h"
#include "cuda/tune/trial_operands.h"
#include "gemm/choice.h"
#include "plans/registry.h"

#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <string>
#include <vector>

namespace fused::cuda::tune {
namespace {

void log_refusal(const plans::Decision& decision, const std::string& why) {
  if (plans::verbosity() < 2) return;
  plans::log(std::string("  refused ") + decision.strategy->name + ": " + why);
}

}  // namespace

using plans::TrialErrors, plans::Verdict;

class Trial::Errors {
 public:
  explicit Errors(const PassCall& call)
      : operands_(call), exact_known_(TrialOperands::most_ends * TrialOperands::most_seeds) {}

  // Returns eager's errors, nullopt if eager does not run. A strided bias, or another number of
  // tokens, may spare eager's product a rounding, so the better way counts.
  const std::optional<TrialErrors>& reference() {
    if (!reference_) {
      auto least = errors_of_eager(/*bias_is_matrix=*/false);
      const auto& call = operands_.ends.front().call;
      if (gemm::is_forward(call.problem.pass) && call.bias != nullptr) {
        const auto other = errors_of_eager(/*bias_is_matrix=*/true);
        if (other && (!least || other->elements.squares < least->elements.squares)) least = other;
      }
      reference_ = least;  // of both runs; without both they run again
    }
    return *reference_;
  }

  std::optional<TrialErrors> errors_of(const plans::Decision& decision) {
    const auto run = [&](const TrialOperands::End& end) -> std::optional<bool> {
      auto plan = plan_for(end.call, *decision.strategy, decision.algorithm);
      if (!plan) return std::nullopt;
      return execute(end.call, *plan, operands_.workspace, operands_.stream);
    };
    const auto* strategy = decision.strategy;
    return errors_of(run, strategy, &TrialOperands::End::call, /*with_marks=*/true);
  }

 private:
  std::optional<TrialErrors> errors_of_eager(bool bias_is_matrix) {
    const auto& problem = operands_.ends.front().eager.problem;
    Plan plan{&gemm::eager_of(problem, available(problem)), {}, {}, {}, {}, {}};
    const auto run = [&](const TrialOperands::End& end) -> std::optional<bool> {
      auto call = end.eager;
      call.bias_is_matrix = bias_is_matrix;
      return execute(call, plan, nullptr, operands_.stream);
    };
    return errors_of(run, plan.strategy, &TrialOperands::End::eager, /*with_marks=*/false);
  }

  // Pools errors over seeds and ends of the bucket. Returns nullopt if a run fails, or returns
  // nothing at an end that is needed. Ends that the strategy never does are left out.
  template <typename Run>
  std::optional<TrialErrors> errors_of(const Run& run, const Strategy* strategy,
                                       PassCall TrialOperands::End::* which, bool with_marks) {
    const auto stream = operands_.stream;
    auto* errors = operands_.errors;
    C10_CUDA_CHECK(cudaMemsetAsync(errors, 0, sizeof(TrialErrors), stream));
    for (size_t e = 0; e < operands_.ends.size(); ++e) {
      const auto& end = operands_.ends[e];
      const auto& problem = (end.*which).problem;
      if (gemm::objection(problem, *strategy, available(problem))) continue;
      for (int64_t seed = 0; seed < operands_.seeds; ++seed) {
        operands_.prepare(end, seed);
        const auto* known = exact_of(e, seed);
        const auto ran = run(end);
        if (!ran && !end.needed) break;
        if (!ran || !*ran) return std::nullopt;
        add_errors(described(end.*which), known, errors, stream);
        if (with_marks && seed == 0 && !add_lost_marks(end, run)) return std::nullopt;
      }
    }
    TrialErrors found;
    C10_CUDA_CHECK(cudaMemcpyAsync(&found, errors, sizeof(found), cudaMemcpyDeviceToHost, stream));
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    const bool ran = found.elements.count + found.missed > 0;
    return ran ? std::optional(found) : std::nullopt;
  }

  // Puts NaN into each operand, one after the other, and +inf into a bias. For the library's own
  // epilogues only NaN in the product's operands is tried.
  template <typename Run>
  bool add_lost_marks(const TrialOperands::End& end, const Run& run) {
    const auto stream = operands_.stream;
    for (const auto& read : TrialOperands::reads_of(end.call)) {
      for (const bool infinite : {false, true}) {
        const Mark mark{read.operand, infinite};
        if (infinite && read.operand != Operand::bias) continue;
        if (is_library_only() && (infinite || read.operand != Operand::left)) continue;
        put(mark, end.call.problem.matmul.type, read.matrix, stream);
        operands_.renew_result(end.call, /*seed=*/0);
        if (!run(end).value_or(false)) return false;
        add_lost(mark, described(end.call), operands_.errors, stream);
      }
      operands_.fill_again(read, /*seed=*/0);
    }
    return true;
  }

  // If the user asks for the library's epilogues, they are taken as they are.
  bool is_library_only() const { return operands_.ends.front().call.problem.library_only; }
  TrialData described(const PassCall& call) const {
    const auto& matmul = call.problem.matmul;
    return {call, Roundoff(matmul.type), sign_error(matmul), is_library_only()};
  }

  const Exact* exact_of(size_t end, int64_t seed) {
    const size_t index = end * TrialOperands::most_seeds + seed;
    auto* values = operands_.exact(end, seed);
    if (!exact_known_[index]) {
      exact_values(described(operands_.ends[end].call), values, operands_.stream);
    }
    exact_known_[index] = true;
    return values;
  }

  TrialOperands operands_;
  std::vector<bool> exact_known_;
  std::optional<std::optional<TrialErrors>> reference_;
};

Trial::Trial(const PassCall& call, const PassProblem& bucket) : call_(call), bucket_(bucket) {}
Trial::~Trial() = default;

Verdict Trial::judge(const plans::Decision& decision) {
  if (call_.layers != nullptr) return judge_layers(decision);
  if (const auto verdict = known(decision)) return *verdict;
  auto verdict = Verdict::failed;
  try {
    verdict = try_out(decision);
  } catch (const c10::OutOfMemoryError&) {
    lacked_memory_ = true;
  } catch (const std::exception& failure) {
    static_cast<void>(cudaGetLastError());  // the call itself goes on
    log_refusal(decision, plans::message_of(failure));
  }
  if (verdict == Verdict::failed) return verdict;
  plans::passes().change(bucket_, [&](plans::KnownPass& known) {
    known.verdicts[{decision.strategy, decision.algorithm.bytes}] = verdict;
  });
  return verdict;
}

std::optional<Verdict> Trial::known(const plans::Decision& decision) const {
  return plans::passes().read(bucket_, [&](const plans::KnownPass& known) {
    const auto it = known.verdicts.find({decision.strategy, decision.algorithm.bytes});
    return it == known.verdicts.end() ? std::nullopt : std::optional(it->second);
  });
}

// A kernel for the whole network treats each layer as the strategy of its name treats a single one.
Verdict Trial::judge_layers(const plans::Decision& decision) {
  plans::Decision alone;
  alone.strategy = gemm::find_strategy(gemm::Pass::fprop, decision.strategy->name);
  for (const auto& layer : *call_.layers) {
    const auto bucket = gemm::bucket_of(layer.problem, bucket_.matmul.device);
    Trial trial(layer, bucket);
    const auto verdict = trial.judge(alone);
    lacked_memory_ = lacked_memory_ || trial.lacked_memory();
    if (verdict != Verdict::sound) return verdict;
  }
  return Verdict::sound;
}

Verdict Trial::try_out(const plans::Decision& decision) {
  const explain::Quiet nothing_shown;
  const c10::cuda::CUDAStreamCaptureModeGuard others_may_capture(cudaStreamCaptureModeRelaxed);
  if (!errors_) errors_ = std::make_unique<Errors>(call_);
  const auto& reference = errors_->reference();
  const auto errors = reference ? errors_->errors_of(decision) : std::nullopt;
  if (!errors) return Verdict::failed;
  // In fp64 the reference is no more exact than the results that it judges.
  const bool f64 = call_.problem.matmul.type == gemm::Type::f64;
  if (plans::is_as_exact(*errors, *reference, f64 ? 1 : 1e-6)) return Verdict::sound;
  log_refusal(decision, plans::summary(*errors, *reference));
  return Verdict::inexact;
}

}  // namespace fused::cuda::tune
