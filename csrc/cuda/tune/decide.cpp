#include "cuda/tune/decide.h"
#include "core/explain.h"
#include "cuda/runtime/execute.h"
#include "cuda/tune/algorithms.h"
#include "cuda/tune/measure.h"
#include "gemm/choice.h"
#include "plans/registry.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <ATen/cuda/CUDAGraphsUtils.cuh>

#include <string>

namespace fused::cuda::tune {
namespace {

using gemm::PassProblem;
using plans::Decision, plans::KnownPass, plans::Verdict;

constexpr const char* no_algorithm = "no valid algorithm is known";
constexpr const char* its_trial_failed = "its trial failed";

const Strategy& rule_of(const PassProblem& problem) {
  return *gemm::find_strategy(problem.pass, gemm::rule(problem, available(problem)));
}

// Lists the strategies that may be taken without measuring, the rule's first.
std::vector<const Strategy*> in_order(const PassProblem& problem) {
  std::vector<const Strategy*> order{&rule_of(problem)};
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
  return strategy.is_eager() && &strategy == &gemm::eager_of(problem, available(problem));
}

bool is_of_file(const std::optional<Decision>& decision) {
  return decision && decision->origin == Decision::Origin::file;
}

std::optional<Plan> prepare(const PassCall& call, const Decision& decision) {
  auto plan = plan_for(call, *decision.strategy, decision.algorithm);
  const auto& rule = rule_of(call.problem);
  if (plan && decision.reason && decision.strategy != &rule) {
    plan->remark = not_taken(call.problem, rule, decision.reason);
  }
  return plan;
}

std::optional<Plan> fallback_plan(const PassProblem& problem, const char* why) {
  const auto& fallback = gemm::fallback_of(problem.pass);
  if (gemm::objection(problem, fallback, available(problem))) return std::nullopt;
  return Plan{&fallback, not_taken(problem, rule_of(problem), why), {}, {}, {}, {}};
}

class Maker {
 public:
  Maker(const PassCall& call, const PassProblem& bucket)
      : call_(call), problem_(call.problem), bucket_(bucket), trial_(call, bucket) {}

  std::optional<Plan> make() {
    auto plan = first_that_serves();
    if (plan) plan->calls_left = calls_left_;
    return plan;
  }

 private:
  std::optional<Plan> first_that_serves() {
    if (const auto timed = by_timing()) {
      if (auto plan = prepare(call_, *timed)) return plan;
      // The decision was measured for another number of tokens, and its algorithm cannot do this
      // one.
      if (const auto other = first_sound(*timed->strategy).decision) {
        if (auto plan = prepare(call_, *other)) return plan;
      }
    }
    if (const auto decision = by_rule_for_all_threads()) {
      if (auto plan = prepare(call_, *decision)) return plan;
    }
    return fallback_plan(problem_, no_algorithm);
  }

  // Returns the bucket's measured decision, measures it now if necessary, or borrows its
  // neighbour's for a while. Returns nullopt if the rule must decide.
  std::optional<Decision> by_timing() {
    const auto known = measured_and_sound();
    if (problem_.deterministic) return is_of_file(known) ? known : std::nullopt;
    if (known) return known;
    if (trial_.lacked_memory()) return later();
    if (plans::budget() == 0 || plans::passes().is_full_for(bucket_)) return std::nullopt;
    const auto neighbours = plans::neighbours_of(bucket_, [this](const Strategy& strategy) {
      return !gemm::objection(problem_, strategy, available(problem_));
    });
    calls_left_ = plans::calls_left(bucket_, neighbours.has_value());
    if (calls_left_) {
      if (!neighbours || judge(*neighbours) != Verdict::sound) return std::nullopt;
      plans::borrow(bucket_, *neighbours);
      return neighbours;
    }
    const auto measured = measure(call_, bucket_, by_rule(), trial_);
    return measured ? measured : later();
  }

  // Judges a file's plan before its first use, and forgets it if it is not sound.
  std::optional<Decision> measured_and_sound() {
    const auto known = plans::measured(bucket_);
    if (!is_of_file(known) || judge(*known) == Verdict::sound) return known;
    if (!trial_.lacked_memory()) {
      plans::passes().change(bucket_, [&](KnownPass& now) {
        if (now.decision == known) now.decision.reset();
      });
      plans::log("refused: " + plans::summary(bucket_, *known));
    }
    return std::nullopt;
  }

  std::optional<Decision> by_rule_for_all_threads() {
    auto& passes = plans::passes();
    const auto known = passes.read(problem_, [](const KnownPass& known) { return known.by_rule; });
    if (known) return known;
    const auto decision = by_rule();
    if (trial_.lacked_memory()) {
      later();
      return decision;
    }
    return passes.change(problem_, [&](KnownPass& known) {
      if (!known.by_rule) known.by_rule = decision;
      return known.by_rule;
    });
  }

  // Takes the first strategy that applies and is sound, or eager's own if none can be judged.
  std::optional<Decision> by_rule() {
    const char* reason = nullptr;  // why the rule's strategy, the first, is not taken
    for (const auto* strategy : in_order(problem_)) {
      Found found;
      const auto* objection = gemm::objection(problem_, *strategy, available(problem_));
      if (objection == nullptr) found = first_sound(*strategy);
      if (found.decision) {
        found.decision->reason = reason;
        return found.decision;
      }
      if (reason == nullptr) reason = objection ? objection : found.reason;
    }
    Decision eager;
    eager.strategy = &gemm::eager_of(problem_, available(problem_));
    eager.reason = reason;
    if (gemm::objection(problem_, *eager.strategy, available(problem_))) return std::nullopt;
    return eager;
  }

  // Returns a strategy with its first sound algorithm, or the reason why there is none.
  struct Found {
    std::optional<Decision> decision;
    const char* reason = no_algorithm;
  };

  Found first_sound(const Strategy& strategy) {
    Found found;
    Decision decision;
    decision.strategy = &strategy;
    for (const auto& algorithm : algorithms_for(call_, strategy, /*most=*/4)) {
      decision.algorithm = algorithm;
      const auto verdict = judge(decision);
      if (verdict == Verdict::sound) return {decision};
      found.reason = verdict == Verdict::failed ? its_trial_failed : "less exact than eager";
    }
    return found;
  }

  Verdict judge(const Decision& decision) {
    return is_eager(problem_, *decision.strategy) ? Verdict::sound : trial_.judge(decision);
  }

  std::nullopt_t later() {
    calls_left_ = plans::decide_later(bucket_);
    return std::nullopt;
  }

  const PassCall& call_;
  const PassProblem& problem_;
  const PassProblem& bucket_;
  Trial trial_;
  plans::CallsLeft calls_left_;  // the plan's
};

// If anything fails, this call runs as in eager PyTorch, and the plan is made later.
std::optional<Plan> plan_outside_capture(const PassCall& call, const PassProblem& bucket) {
  try {
    // Loading kernels and waiting for the stream would end a capture in another thread.
    const c10::cuda::CUDAStreamCaptureModeGuard others_may_capture(cudaStreamCaptureModeRelaxed);
    return Maker(call, bucket).make();
  } catch (const std::exception& failure) {
    static_cast<void>(cudaGetLastError());
    plans::log("no plan: " + plans::message_of(failure));
    auto plan = fallback_plan(call.problem, its_trial_failed);
    if (plan) plan->calls_left = plans::decide_later(bucket);
    return plan;
  }
}

// Returns the decision that is known for the bucket; one from a file only if it has been judged,
// because a trial would end the capture.
std::optional<Decision> known_in_capture(const PassCall& call, const PassProblem& bucket) {
  auto known = plans::passes().read(bucket, [](const KnownPass& known) { return known.decision; });
  if (is_of_file(known) && !is_eager(call.problem, *known->strategy) &&
      Trial(call, bucket).known(*known) != Verdict::sound) {
    known.reset();
  }
  return call.problem.deterministic && !is_of_file(known) ? std::nullopt : known;
}

std::optional<Plan> plan_inside_capture(const PassCall& call, const PassProblem& bucket) {
  const auto by_rule =
      plans::passes().read(call.problem, [](const KnownPass& known) { return known.by_rule; });
  for (const auto& decision : {known_in_capture(call, bucket), by_rule}) {
    if (!decision) continue;
    if (auto plan = prepare(call, *decision)) return plan;
  }
  return fallback_plan(call.problem, "unknown while capturing");
}

// Returns a plan that this thread keeps, or one for this call alone; nullptr if no strategy works.
Plan* make_plan(const PassCall& call, std::optional<Plan>& for_this_call) {
  const auto& machine = device_of(call.problem.matmul.device).machine;
  plans::adopt(machine);
  const auto bucket = gemm::bucket_of(call.problem, machine.first_equal_device);
  const auto generation = plans::generation();
  if (is_capturing()) {
    // The thread must not keep a borrowed plan, or one by rule for the time being.
    for_this_call = plan_inside_capture(call, bucket);
  } else {
    for_this_call = plan_outside_capture(call, bucket);
    if (for_this_call) {
      if (auto* plan = remember_plan(call.problem, *for_this_call, generation)) return plan;
    }
  }
  return for_this_call ? &*for_this_call : nullptr;
}

Plan* plan_of(const PassCall& call, std::optional<Plan>& for_this_call) {
  if (auto* known = take_plan(call.problem)) return known;
  if (!is_capturing() && call.layers != nullptr) {
    const explain::Quiet nothing_shown;
    for (const auto& layer : *call.layers) run(layer);  // makes the plans to compare with
  }
  return make_plan(call, for_this_call);
}

}  // namespace

bool is_small(const PassCall& call) {
  std::optional<Plan> for_this_call;
  const auto* plan = plan_of(call, for_this_call);
  return plan != nullptr && gemm::has_step(*plan->strategy, Step::own_small);
}

bool run(const PassCall& call, kernels::SmallGradients* deferred) {
  std::optional<Plan> for_this_call;
  auto* plan = plan_of(call, for_this_call);
  if (plan == nullptr) return false;
  const char* name = plan->strategy->name;  // making the layers' plans may free this one
  if (!plan->remark.empty()) explain::append(plan->remark.c_str());
  const auto stream = at::cuda::getCurrentCUDAStream(call.problem.matmul.device);
  const Workspace workspace(plan->algorithm.workspace);
  if (execute(call, *plan, workspace.data(), stream, deferred)) return true;
  // The product was checked before, so memory or the like is short now, and the plan stays.
  TORCH_WARN_ONCE("fused: a product failed that had run before (", name, ", ", call.problem.matmul,
                  "); eager's way is taken");
  for_this_call = fallback_plan(call.problem, "it failed");
  return for_this_call && execute(call, *for_this_call, nullptr, stream);
}

}  // namespace fused::cuda::tune
