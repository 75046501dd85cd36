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

// The strategy with the first algorithm that the library offers for it and that is sound, or why
// there is none.
struct Found {
  std::optional<Decision> decision;
  const char* reason = "no valid algorithm is known";
};

Found first_sound(const PassCall& call, const Strategy& strategy, Trial& trial) {
  Found found;
  Decision decision;
  decision.strategy = &strategy;
  for (const auto& algorithm : algorithms_for(call, strategy, /*most=*/4)) {
    decision.algorithm = algorithm;
    if (is_sound(call, decision, trial)) return {decision};
    const bool failed = trial.known(decision) != plans::Verdict::inexact;
    found.reason = failed ? "its trial failed" : "less exact than eager";
  }
  return found;
}

// The first strategy that applies and is sound; eager's own way where none can be told to be.
std::optional<Decision> decide_by_rule(const PassCall& call, Trial& trial) {
  const char* reason = nullptr;  // of the rule's strategy, which is the first
  for (const auto* strategy : in_order(call.problem)) {
    Found found;
    const auto* objection = gemm::objection(call.problem, *strategy, available(call.problem));
    if (objection == nullptr) found = first_sound(call, *strategy, trial);
    if (found.decision) {
      found.decision->reason = reason;
      return found.decision;
    }
    if (reason == nullptr) reason = objection ? objection : found.reason;
  }
  Decision eager;
  eager.strategy = &gemm::eager_of(call.problem, available(call.problem));
  eager.reason = reason;
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
  if (plan && decision.reason && decision.strategy != rule) {
    plan->remark = not_taken(problem, *rule, decision.reason);
  }
  return plan;
}

// What timing has decided for a bucket: measured, now if need be, or its neighbour's for a while.
struct Timed {
  std::optional<Decision> decision;  // nothing where the rule is to decide
  plans::CallsLeft calls_left;       // of this state of affairs; nothing: for good
};

// A plan from a file is judged before its first use, and forgotten where it is not sound.
std::optional<Decision> known_and_sound(const PassCall& call, const PassProblem& bucket,
                                        Trial& trial) {
  const auto known = plans::measured().find(bucket);
  if (!known || known->origin != Decision::Origin::file) return known;
  if (is_sound(call, *known, trial)) return known;
  if (!trial.lacked_memory()) {
    plans::measured().remove(bucket, *known);
    plans::log("refused: " + plans::summary(bucket, *known));
  }
  return std::nullopt;
}

Timed decide_by_measuring(const PassCall& call, const PassProblem& bucket, Trial& trial) {
  const auto& problem = call.problem;
  const auto known = known_and_sound(call, bucket, trial);
  if (problem.deterministic) {
    const bool of_file = known && known->origin == Decision::Origin::file;
    return {of_file ? known : std::nullopt, nullptr};
  }
  if (known) return {known, nullptr};
  if (trial.lacked_memory()) return {std::nullopt, plans::postpone(bucket)};
  if (plans::budget() == 0 || plans::measured().is_full()) return {};
  auto neighbours = plans::neighbours_of(bucket, [&problem](const Strategy& strategy) {
    return !gemm::objection(problem, strategy, available(problem));
  });
  if (const auto calls = plans::calls_left(bucket, neighbours.has_value())) {
    if (!neighbours || !is_sound(call, *neighbours, trial)) return {std::nullopt, calls};
    neighbours->origin = Decision::Origin::neighbour;
    plans::borrowed().replace(bucket, *neighbours);
    return {neighbours, calls};
  }
  if (auto measured = measure(call, bucket, decide_by_rule(call, trial), trial)) {
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

std::optional<Plan> plan_outside_capture(const PassCall& call, const PassProblem& bucket) {
  // Loading kernels and waiting for the stream would end a capture in another thread.
  const c10::cuda::CUDAStreamCaptureModeGuard others_may_capture(cudaStreamCaptureModeRelaxed);
  Trial trial(call);
  auto timed = decide_by_measuring(call, bucket, trial);
  const auto until_then = [&timed](std::optional<Plan> plan) {
    if (plan) plan->calls_left = timed.calls_left;
    return plan;
  };
  if (timed.decision) {
    if (auto plan = prepare(call, *timed.decision)) return until_then(std::move(plan));
    // Measured for another number of tokens, for which another algorithm serves.
    if (const auto instead = first_sound(call, *timed.decision->strategy, trial).decision) {
      if (auto plan = prepare(call, *instead)) return until_then(std::move(plan));
    }
  }
  auto decision = plans::ruled().find(call.problem);
  if (!decision) {
    decision = decide_by_rule(call, trial);
    if (trial.lacked_memory()) {
      timed.calls_left = plans::postpone(bucket);
    } else if (decision) {
      decision = plans::ruled().add(call.problem, *decision);
    }
  }
  if (decision) {
    if (auto plan = prepare(call, *decision)) return until_then(std::move(plan));
  }
  return until_then(fallback_plan(call.problem, "no valid algorithm is known"));
}

// The same, whatever fails on the way: the call goes on by the plain way, and the plan is made
// later.
std::optional<Plan> plan_outside_capture_or_plain(const PassCall& call, const PassProblem& bucket) {
  try {
    return plan_outside_capture(call, bucket);
  } catch (const std::exception& failure) {
    static_cast<void>(cudaGetLastError());
    plans::log("no plan: " + plans::message_of(failure));
    auto plan = fallback_plan(call.problem, "its trial failed");
    if (plan) plan->calls_left = plans::postpone(bucket);
    return plan;
  }
}

// Trying would end the capture: what is known of the bucket, and of a file what has been judged.
std::optional<Decision> known_in_capture(const PassCall& call, const PassProblem& bucket) {
  auto known = plans::measured().find(bucket);
  const bool of_file = known && known->origin == Decision::Origin::file;
  if (of_file && !is_eager(call.problem, *known->strategy) &&
      Trial(call).known(*known) != plans::Verdict::sound) {
    known.reset();
  }
  if (call.problem.deterministic) return of_file ? known : std::nullopt;
  return known ? known : plans::borrowed().find(bucket);
}

std::optional<Plan> plan_inside_capture(const PassCall& call, const PassProblem& bucket) {
  for (const auto& decision : {known_in_capture(call, bucket), plans::ruled().find(call.problem)}) {
    if (!decision) continue;
    if (auto plan = prepare(call, *decision)) return plan;
  }
  return fallback_plan(call.problem, "unknown while capturing");
}

}  // namespace

Plan* make_plan(const PassCall& call, std::optional<Plan>& spare) {
  const auto& machine = machine_of(call.problem.matmul.device);
  plans::adopt(machine);
  const auto bucket = gemm::bucket_of(call.problem, machine.first_equal_device);
  const auto generation = plans::generation();
  if (is_capturing()) {
    // For this call only: the thread must not keep what is borrowed, or by rule for now.
    spare = plan_inside_capture(call, bucket);
  } else {
    spare = plan_outside_capture_or_plain(call, bucket);
    if (spare) {
      if (auto* plan = remember_plan(call.problem, *spare, generation)) return plan;
    }
  }
  return spare ? &*spare : nullptr;
}

}  // namespace fused::cuda::tune
