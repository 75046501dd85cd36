// From a call to a plan: what has been measured, or else the rule.

#include "cuda/tune/decide.h"

#include "cuda/runtime/device.h"
#include "cuda/tune/measure.h"
#include "plans/registry.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <ATen/cuda/CUDAGraphsUtils.cuh>

#include <map>
#include <mutex>
#include <string>
#include <tuple>

namespace fused {
namespace {

using gemm::Decision;
using gemm::StageProblem;
using gemm::Step;
using gemm::Strategy;

// The strategies that may be taken where nothing has been measured, the rule's first.
std::vector<const Strategy*> in_order(const StageProblem& problem) {
  std::vector<const Strategy*> order{gemm::find_strategy(problem.stage, gemm::rule(problem))};
  for (const auto& s : gemm::strategies) {
    const bool plain =
        !s.fuses_activation && !(s.fuses_bias && problem.stage == gemm::Stage::weight_gradient);
    if (s.stage == problem.stage && plain && &s != order.front()) order.push_back(&s);
  }
  return order;
}

std::string not_taken(const StageProblem& problem, const Strategy& strategy, const char* why) {
  if (why == gemm::approximate) return "(no GELU epilogue: approximate)";
  const auto epilogue = gemm::epilogue_of(problem, strategy);
  return std::string("(not ") + (epilogue ? gemm::name(*epilogue) : strategy.name) + ": " + why +
         ")";
}

// The first strategy that applies, with the first algorithm that the library offers for it.
std::optional<Decision> decide_by_rule(const StageCall& call) {
  for (const auto* strategy : in_order(call.problem)) {
    if (gemm::objection(call.problem, *strategy, lt_version())) continue;
    Decision decision;
    decision.strategy = strategy;
    if (!gemm::has_step(*strategy, Step::product)) return decision;
    const auto offered = algorithms_for(call, *strategy, /*most=*/4, /*enough=*/1);
    if (offered.empty()) continue;
    decision.algorithm = offered.front();
    return decision;
  }
  return std::nullopt;
}

bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

// A decision made ready for this very problem; nothing where its algorithm cannot serve it.
std::optional<gemm::Plan> prepare(const StageCall& call, const Decision& decision) {
  const auto& problem = call.problem;
  if (gemm::objection(problem, *decision.strategy, lt_version())) return std::nullopt;
  gemm::Plan plan{decision.strategy, {}, {}, {}, {}};
  const auto* rule = gemm::find_strategy(problem.stage, gemm::rule(problem));
  if (decision.origin == Decision::Origin::rule && decision.strategy != rule) {
    const char* why = gemm::objection(problem, *rule, lt_version());
    plan.remark = not_taken(problem, *rule, why ? why : "no valid algorithm is known");
  }
  if (!gemm::has_step(*decision.strategy, Step::product)) return plan;
  plan.product = gemm::product_of(problem, *decision.strategy);
  plan.descriptors.emplace(plan.product);
  plan.descriptors->set_pointers(operands_of(call, *decision.strategy));
  const auto algorithm = gemm::checked(lt_handle(plan.product.device), plan.product,
                                       *plan.descriptors, decision.algorithm);
  if (!algorithm) return std::nullopt;
  plan.algorithm = *algorithm;
  return plan;
}

// What has been measured for the problem's bucket, now if need be; nothing where timing must not
// decide, or may not be taken now.
std::optional<Decision> decide_by_measuring(const StageCall& call, bool capturing) {
  const auto& problem = call.problem;
  const auto& machine = machine_of(problem.product.device);
  plans::adopt(machine);
  const auto bucket = gemm::bucket_of(problem, machine.first_equal_device);
  const auto known = plans::measured().find(bucket);
  if (problem.deterministic) {
    return known && known->origin == Decision::Origin::file ? known : std::nullopt;
  }
  if (known) return known;
  if (capturing || plans::budget() == 0 || plans::measured().is_full() || plans::given_up(bucket)) {
    return std::nullopt;
  }
  return measure(call, bucket, decide_by_rule(call));
}

// What trials have found: it is the algorithm's nature, whatever the sizes.
class NanVerdicts {
 public:
  std::optional<bool> find(const gemm::Problem& product, const gemm::Algorithm& algorithm) {
    const std::lock_guard lock(mutex_);
    const auto it = known_.find(key(product, algorithm));
    return it == known_.end() ? std::nullopt : std::optional(it->second);
  }
  void add(const gemm::Problem& product, const gemm::Algorithm& algorithm, bool verdict) {
    const std::lock_guard lock(mutex_);
    known_.emplace(key(product, algorithm), verdict);
  }

 private:
  using Key = std::tuple<gemm::Epilogue, gemm::Type, int, decltype(gemm::Algorithm::bytes)>;
  static Key key(const gemm::Problem& product, const gemm::Algorithm& algorithm) {
    return {product.epilogue, product.type, product.arch, algorithm.bytes};
  }

  std::mutex mutex_;
  std::map<Key, bool> known_;
};

NanVerdicts& nan_verdicts() {
  static auto* value = new NanVerdicts;  // outlives every thread
  return *value;
}

// A ReLU's epilogue must let NaN through, which not every algorithm does.
bool lets_nan_through(const StageCall& call, const Strategy& strategy, const gemm::Problem& product,
                      gemm::Descriptors& descriptors, const gemm::Algorithm& algorithm) {
  if (const auto known = nan_verdicts().find(product, algorithm)) return *known;
  const auto bytes = static_cast<int64_t>(gemm::nan_trial_bytes(product));
  const Scratch scratch(bytes);
  // PyTorch's allocator may hold all memory there is, and knows how to make room.
  const Workspace instead(scratch.data() == nullptr ? bytes : 0);
  const bool verdict = gemm::passes_nan(lt_handle(product.device), product, descriptors, algorithm,
                                        operands_of(call, strategy),
                                        scratch.data() ? scratch.data() : instead.data(),
                                        at::cuda::getCurrentCUDAStream(product.device));
  nan_verdicts().add(product, algorithm, verdict);
  return verdict;
}

std::vector<gemm::Algorithm> without_nan_eaters(const StageCall& call, const Strategy& strategy,
                                                const gemm::Problem& product,
                                                gemm::Descriptors& descriptors,
                                                std::vector<gemm::Algorithm> algorithms,
                                                size_t enough) {
  if (!gemm::needs_nan_trial(product)) return algorithms;
  std::vector<gemm::Algorithm> good;
  for (const auto& algorithm : algorithms) {
    if (good.size() == enough) break;
    if (lets_nan_through(call, strategy, product, descriptors, algorithm)) {
      good.push_back(algorithm);
    }
  }
  return good;
}

}  // namespace

std::vector<gemm::Algorithm> algorithms_for(const StageCall& call, const Strategy& strategy,
                                            int most, size_t enough) {
  const auto product = gemm::product_of(call.problem, strategy);
  gemm::Descriptors descriptors(product);
  auto offered = gemm::candidates(lt_handle(product.device), product, descriptors,
                                  operands_of(call, strategy), most);
  return without_nan_eaters(call, strategy, product, descriptors, std::move(offered), enough);
}

std::vector<gemm::Algorithm> algorithms_around(const StageCall& call, const Strategy& strategy,
                                               const gemm::Algorithm& algorithm, size_t most) {
  const auto product = gemm::product_of(call.problem, strategy);
  gemm::Descriptors descriptors(product);
  descriptors.set_pointers(operands_of(call, strategy));
  auto found = gemm::neighbours(lt_handle(product.device), product, descriptors, algorithm, most);
  return without_nan_eaters(call, strategy, product, descriptors, std::move(found), most);
}

std::optional<gemm::Plan> aten_plan(const StageProblem& problem, const char* why) {
  const auto* rule = gemm::find_strategy(problem.stage, gemm::rule(problem));
  const auto remark = not_taken(problem, *rule, why);
  for (const auto& strategy : gemm::strategies) {
    if (!gemm::has_step(strategy, Step::product) &&
        !gemm::objection(problem, strategy, lt_version())) {
      return gemm::Plan{&strategy, remark, {}, {}, {}};
    }
  }
  return std::nullopt;
}

namespace {

std::optional<gemm::Plan> plan_outside_capture(const StageCall& call) {
  // Loading kernels and waiting for the stream would end a capture in another thread.
  const c10::cuda::CUDAStreamCaptureModeGuard others_may_capture(cudaStreamCaptureModeRelaxed);
  if (auto decision = decide_by_measuring(call, /*capturing=*/false)) {
    if (auto plan = prepare(call, *decision)) return plan;
    // Measured for another number of tokens, for which another algorithm serves.
    const auto offered = algorithms_for(call, *decision->strategy, /*most=*/4, /*enough=*/1);
    if (!offered.empty()) {
      decision->algorithm = offered.front();
      if (auto plan = prepare(call, *decision)) return plan;
    }
  }
  auto decision = plans::ruled().find(call.problem);
  if (!decision) {
    decision = decide_by_rule(call);
    if (decision) decision = plans::ruled().add(call.problem, *decision);
  }
  if (decision) {
    if (auto plan = prepare(call, *decision)) return plan;
  }
  return aten_plan(call.problem, "no valid algorithm is known");
}

// Searching would end the capture: what is known, or nothing.
std::optional<gemm::Plan> plan_inside_capture(const StageCall& call) {
  if (const auto decision = decide_by_measuring(call, /*capturing=*/true)) {
    if (auto plan = prepare(call, *decision)) return plan;
  }
  const auto decision = plans::ruled().find(call.problem);
  return decision ? prepare(call, *decision) : std::nullopt;
}

}  // namespace

gemm::Plan* make_plan(const StageCall& call, std::optional<gemm::Plan>& spare) {
  const auto generation = gemm::plan_generation();
  const bool capturing = is_capturing();
  spare = capturing ? plan_inside_capture(call) : plan_outside_capture(call);
  if (spare) {
    if (auto* plan = gemm::remember_plan(call.problem, *spare, generation)) return plan;
  } else if (capturing) {
    spare = aten_plan(call.problem, "unknown while capturing");
  }
  return spare ? &*spare : nullptr;
}

}  // namespace fused
