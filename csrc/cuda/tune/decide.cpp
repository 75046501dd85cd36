// From a call to a plan: what has been measured, or else the rule.

#include "cuda/tune/decide.h"

#include "cuda/runtime/device.h"
#include "cuda/tune/algorithms.h"
#include "cuda/tune/measure.h"
#include "cuda/tune/trial.h"
#include "gemm/choice.h"
#include "plans/registry.h"

#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <ATen/cuda/CUDAGraphsUtils.cuh>

#include <string>

namespace fused::cuda::tune {
namespace {

using gemm::PassProblem;
using gemm::Step;
using plans::Decision;

// The strategies that may be taken where nothing has been measured, the rule's first.
std::vector<const Strategy*> in_order(const PassProblem& problem) {
  std::vector<const Strategy*> order{
      gemm::find_strategy(problem.pass, gemm::rule(problem, available(problem)))};
  for (const auto& s : gemm::strategies) {
    const bool plain = !s.fuses_activation && !(s.fuses_bias && problem.pass == gemm::Pass::wgrad);
    if (s.pass == problem.pass && plain && &s != order.front()) order.push_back(&s);
  }
  return order;
}

std::string not_taken(const PassProblem& problem, const Strategy& strategy, const char* why) {
  if (std::string_view(why) == gemm::approximate_gelu) return "(no GELU epilogue: approximate)";
  const auto epilogue = gemm::epilogue_of(problem, strategy);
  return std::string("(not ") + (epilogue ? gemm::name(*epilogue) : strategy.name) + ": " + why +
         ")";
}

bool is_eager(const PassProblem& problem, const Strategy& strategy) {
  return &strategy == &gemm::eager_of(problem, available(problem)) &&
         (strategy.role == gemm::Role::eager || strategy.role == gemm::Role::eager_fallback);
}

bool is_sound(const PassCall& call, const Decision& decision, Trial& trial) {
  return is_eager(call.problem, *decision.strategy) ||
         trial.judge(decision) == plans::Verdict::sound;
}

// The strategy with the first algorithm that the library offers for it and that is sound.
std::optional<Decision> first_sound(const PassCall& call, const Strategy& strategy, Trial& trial) {
  Decision decision;
  decision.strategy = &strategy;
  for (const auto& algorithm : algorithms_for(call, strategy, /*most=*/4)) {
    decision.algorithm = algorithm;
    if (is_sound(call, decision, trial)) return decision;
  }
  return std::nullopt;
}

// The first strategy that applies and is sound; eager's own way where none can be told to be.
std::optional<Decision> decide_by_rule(const PassCall& call, Trial& trial) {
  for (const auto* strategy : in_order(call.problem)) {
    if (gemm::objection(call.problem, *strategy, available(call.problem))) continue;
    if (const auto decision = first_sound(call, *strategy, trial)) return decision;
  }
  Decision eager;
  eager.strategy = &gemm::eager_of(call.problem, available(call.problem));
  if (gemm::objection(call.problem, *eager.strategy, available(call.problem))) return std::nullopt;
  return eager;
}

bool is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

// A decision made ready for this very problem; nothing where its algorithm cannot serve it.
std::optional<Plan> prepare(const PassCall& call, const Decision& decision) {
  const auto& problem = call.problem;
  auto plan = plan_for(call, *decision.strategy, decision.algorithm);
  const auto* rule = gemm::find_strategy(problem.pass, gemm::rule(problem, available(problem)));
  if (plan && decision.origin == Decision::Origin::rule && decision.strategy != rule) {
    const char* why = gemm::objection(problem, *rule, available(problem));
    plan->remark = not_taken(problem, *rule, why ? why : "no valid algorithm is known");
  }
  return plan;
}

// What timing has decided for a bucket: measured, now if need be, or its neighbour's for a while.
struct Timed {
  std::optional<Decision> decision;  // nothing where the rule is to decide
  plans::CallsLeft calls_left;       // of this state of affairs; nothing: for good
};

Timed decide_by_measuring(const PassCall& call, Trial* trial) {
  const auto& problem = call.problem;
  const auto& machine = machine_of(problem.matmul.device);
  plans::adopt(machine);
  const auto bucket = gemm::bucket_of(problem, machine.first_equal_device);
  const auto known = plans::measured().find(bucket);
  if (problem.deterministic) {
    const bool of_file = known && known->origin == Decision::Origin::file;
    return {of_file ? known : std::nullopt, nullptr};
  }
  if (known) return {known, nullptr};
  const bool capturing = trial == nullptr;
  if (capturing) return {plans::borrowed().find(bucket), nullptr};
  if (plans::budget() == 0 || plans::measured().is_full()) return {};
  auto neighbours = plans::neighbours_of(bucket, [&problem](const Strategy& strategy) {
    return !gemm::objection(problem, strategy, available(problem));
  });
  if (const auto calls = plans::calls_left(bucket, neighbours.has_value())) {
    if (!neighbours || !is_sound(call, *neighbours, *trial)) return {std::nullopt, calls};
    neighbours->origin = Decision::Origin::neighbour;
    plans::borrowed().replace(bucket, *neighbours);
    return {neighbours, calls};
  }
  if (auto measured = measure(call, bucket, decide_by_rule(call, *trial), *trial)) {
    return {measured, nullptr};
  }
  return {std::nullopt, plans::postpone(bucket)};
}

}  // namespace

std::optional<Plan> fallback_plan(const PassProblem& problem, const char* why) {
  const auto& fallback = gemm::fallback_of(problem.pass);
  if (gemm::objection(problem, fallback, available(problem))) return std::nullopt;
  const auto* rule = gemm::find_strategy(problem.pass, gemm::rule(problem, available(problem)));
  return Plan{&fallback, not_taken(problem, *rule, why), {}, {}, {}, {}};
}

namespace {

std::optional<Plan> plan_outside_capture(const PassCall& call) {
  // Loading kernels and waiting for the stream would end a capture in another thread.
  const c10::cuda::CUDAStreamCaptureModeGuard others_may_capture(cudaStreamCaptureModeRelaxed);
  Trial trial(call);
  auto timed = decide_by_measuring(call, &trial);
  const auto until_then = [&timed](std::optional<Plan> plan) {
    if (plan) plan->calls_left = timed.calls_left;
    return plan;
  };
  if (timed.decision) {
    if (auto plan = prepare(call, *timed.decision)) return until_then(std::move(plan));
    // Measured for another number of tokens, for which another algorithm serves.
    if (const auto instead = first_sound(call, *timed.decision->strategy, trial)) {
      if (auto plan = prepare(call, *instead)) return until_then(std::move(plan));
    }
  }
  auto decision = plans::ruled().find(call.problem);
  if (!decision) {
    decision = decide_by_rule(call, trial);
    if (trial.lacked_memory()) {
      const int device = machine_of(call.problem.matmul.device).first_equal_device;
      timed.calls_left = plans::postpone(gemm::bucket_of(call.problem, device));
    } else if (decision) {
      decision = plans::ruled().add(call.problem, *decision);
    }
  }
  if (decision) {
    if (auto plan = prepare(call, *decision)) return until_then(std::move(plan));
  }
  return until_then(fallback_plan(call.problem, "no valid algorithm is known"));
}

// Searching would end the capture: what is known, or nothing.
std::optional<Plan> plan_inside_capture(const PassCall& call) {
  if (const auto timed = decide_by_measuring(call, /*trial=*/nullptr); timed.decision) {
    if (auto plan = prepare(call, *timed.decision)) return plan;
  }
  const auto decision = plans::ruled().find(call.problem);
  return decision ? prepare(call, *decision) : std::nullopt;
}

}  // namespace

Plan* make_plan(const PassCall& call, std::optional<Plan>& spare) {
  const auto generation = plans::generation();
  const bool capturing = is_capturing();
  spare = capturing ? plan_inside_capture(call) : plan_outside_capture(call);
  if (spare) {
    if (auto* plan = remember_plan(call.problem, *spare, generation)) return plan;
  } else if (capturing) {
    spare = fallback_plan(call.problem, "unknown while capturing");
  }
  return spare ? &*spare : nullptr;
}

}  // namespace fused::cuda::tune
