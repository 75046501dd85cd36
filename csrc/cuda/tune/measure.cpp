#include "cuda/tune/measure.h"
#include "core/explain.h"
#include "cuda/runtime/execute.h"
#include "cuda/tune/algorithms.h"
#include "cuda/tune/stopwatch.h"
#include "gemm/choice.h"
#include "plans/registry.h"

#include <ATen/cuda/CUDAContext.h>

#include <algorithm>
#include <cmath>
#include <mutex>
#include <numeric>
#include <sstream>

namespace fused::cuda::tune {
namespace {

using plans::Decision;

constexpr int algorithms_asked = 8;  // the heuristic seldom knows more
// Loading the candidates' kernels may take this share of the budget.
constexpr double share_at_first = 0.5, share_around = 0.25;

struct Candidate {
  Plan plan;
  Decision decision;
};

Candidate candidate(const PassCall& call, const Strategy& strategy, const Algorithm& algorithm) {
  Plan plan{&strategy, {}, {}, {}, algorithm, {}};
  if (strategy.provider == Provider::cublaslt) {
    plan.matmul = gemm::matmul_of(call.problem, strategy);
    plan.descriptors.emplace(plan.matmul);
  }
  return {std::move(plan), {Decision::Origin::measured, &strategy, algorithm}};
}

// Lists the candidates, the rule's decision first: the heuristic may not name it again if it is
// asked for more algorithms or for fewer tokens. Under the policy "cublaslt" only the library's own
// epilogues are candidates, and eager's way for comparison.
std::vector<Candidate> candidates_for(const PassCall& call, const std::optional<Decision>& rule) {
  std::vector<Candidate> result;
  if (rule) result.push_back(candidate(call, *rule->strategy, rule->algorithm));
  for (const auto& strategy : gemm::strategies) {
    if (gemm::objection(call.problem, strategy, available(call.problem))) continue;
    const bool by_rule = rule && rule->strategy == &strategy;
    const bool of_library = strategy.provider == Provider::cublaslt;
    if (call.problem.library_only && of_library && rule && !by_rule) continue;
    for (const auto& algorithm : algorithms_for(call, strategy, algorithms_asked)) {
      if (by_rule && algorithm.bytes == rule->algorithm.bytes) continue;
      result.push_back(candidate(call, strategy, algorithm));
    }
  }
  // Loading the library's kernels may use up a small problem's budget before ours are timed.
  std::stable_partition(result.begin() + (rule ? 1 : 0), result.end(), [](const Candidate& c) {
    return c.decision.strategy->provider == Provider::own;
  });
  return result;
}

double budget_for(const PassCall& call) {
  const auto& g = call.problem.matmul;
  const double operations = 2.0 * static_cast<double>(g.m) * static_cast<double>(g.n) *
                            static_cast<double>(std::max<int64_t>(g.k, 1));
  return plans::budget() * 1e3 * plans::share_of_budget(operations);
}

// Lists the winning algorithm, then other configurations of it.
std::vector<Candidate> candidates_around(const PassCall& call, const Decision& winner) {
  std::vector<Candidate> result;
  result.push_back(candidate(call, *winner.strategy, winner.algorithm));
  if (winner.strategy->provider != Provider::cublaslt) return result;
  // Each runs a few times at least, and a kernel's first launch takes some milliseconds.
  constexpr double load_us = 5e3;
  const double room = share_around * budget_for(call) / (load_us + 4 * winner.microseconds);
  for (const auto& algorithm :
       algorithms_around(call, *winner.strategy, winner.algorithm, static_cast<size_t>(room))) {
    result.push_back(candidate(call, *winner.strategy, algorithm));
  }
  return result;
}

// Returns the place of eager's way, or the number of candidates if ATen has none (a bit mask).
size_t yardstick_of(const PassCall& call, const std::vector<Candidate>& candidates) {
  const auto& eager = gemm::eager_of(call.problem, available(call.problem));
  const auto it =
      std::ranges::find(candidates, &eager, [](const Candidate& c) { return c.decision.strategy; });
  return eager.is_eager() ? it - candidates.begin() : candidates.size();
}

void log_times(const std::vector<Candidate>& candidates, const Stopwatch& stopwatch,
               size_t winner) {
  for (size_t i = 0; i < candidates.size(); ++i) {
    const auto times = stopwatch.best(i);
    std::ostringstream line;
    line << "  " << candidates[i].decision.strategy->name << ": " << times.device << " us, CPU "
         << times.host << " us" << (i == winner ? " (taken)" : "");
    plans::log(line.str());
  }
}

// Chooses among candidates. Another one must clearly beat the first.
std::optional<Decision> contest(const PassCall& call, std::vector<Candidate>& candidates,
                                Trial& trial, double calls, double share, const char* what) {
  const auto clock = start_clock();
  int64_t bytes = 1;
  for (const auto& c : candidates) bytes = std::max(bytes, c.plan.algorithm.workspace);
  const DriverMemory workspace(bytes);
  if (workspace.data() == nullptr) return std::nullopt;
  const auto stream = at::cuda::getCurrentCUDAStream(call.problem.matmul.device);
  // The call itself writes its results again later.
  Stopwatch stopwatch(candidates.size(), [&](size_t i) {
    return execute(call, candidates[i].plan, workspace.data(), stream);
  });

  const size_t yardstick = yardstick_of(call, candidates);
  plans::Candidates field{{}, /*incumbent=*/0, yardstick};
  // Candidates that must be timed are loaded first, because loading all kernels may take too long.
  const auto is_needed = [&](size_t i) { return i == field.incumbent || i == yardstick; };
  std::vector<size_t> order(candidates.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::stable_partition(order, is_needed);
  field.eligible.resize(candidates.size());
  for (const size_t i : order) {
    const auto* strategy = candidates[i].decision.strategy;
    const bool wanted =
        !call.problem.library_only || strategy == candidates.front().decision.strategy;
    const bool in_time = clock() < share * budget_for(call);
    field.eligible[i] = wanted && (is_needed(i) || in_time) && stopwatch.once(i);
  }
  const auto choice = fastest(field, stopwatch, clock, budget_for(call), calls,
                              [&](size_t i) { return trial.judge(candidates[i].decision); });
  if (!choice) return std::nullopt;

  auto decision = candidates[choice->winner].decision;
  decision.microseconds = static_cast<float>(stopwatch.best(choice->winner).device);
  const double eager =
      yardstick < candidates.size() ? stopwatch.best(yardstick).device : Stopwatch::failed;
  if (std::isfinite(eager)) decision.eager_microseconds = static_cast<float>(eager);
  if (plans::verbosity() > 1) log_times(candidates, stopwatch, choice->winner);
  std::ostringstream line;
  line << what << std::ranges::count(field.eligible, true) << " of " << candidates.size()
       << " candidates run, " << choice->rounds << " rounds, " << static_cast<int>(clock() / 1e3)
       << " ms, best " << decision.microseconds << " us";
  plans::log(line.str());
  return decision;
}

// Returns the call with fewer tokens if a run takes several milliseconds. The fastest way stays the
// same.
PassCall shortened(const PassCall& call) {
  const auto& matmul = call.problem.matmul;
  const double operations = size_of(matmul.type) == 2 ? 2e12 : 2e11;
  const double per_token =
      2.0 * static_cast<double>(call.result.cols) *
      static_cast<double>(call.problem.pass == Pass::wgrad ? call.result.rows : call.left.cols);
  const auto most = std::max<int64_t>(256, static_cast<int64_t>(operations / per_token));
  PassCall own = call;
  if (gemm::tokens_of(call.problem) <= most) return own;
  if (call.problem.pass == Pass::wgrad) {
    own.left.cols = own.right.rows = own.problem.matmul.k = most;
  } else {
    own.left.rows = own.result.rows = own.problem.matmul.n = most;
    if (own.aux.data != nullptr) own.aux.rows = most;
  }
  return own;
}

}  // namespace

std::optional<Decision> measure(const PassCall& whole, const PassProblem& bucket,
                                const std::optional<Decision>& by_rule, Trial& trial) {
  const std::lock_guard lock(device_of(whole.problem.matmul.device).measuring);
  if (const auto known = plans::measured(bucket)) return known;  // by another thread
  const explain::Quiet nothing_shown;

  auto call = shortened(whole);
  // Runs would add to the values in the result, so measuring writes somewhere else.
  std::optional<DriverMemory> result;
  if (call.problem.matmul.adds) {
    result.emplace(call.result.rows * call.result.ld *
                   size_of(gemm::result_type(call.problem.matmul)));
    call.result.data = result->data();
    if (result->data() == nullptr) return std::nullopt;
  }
  auto candidates = candidates_for(call, by_rule);
  if (candidates.empty()) return std::nullopt;
  constexpr double calls = 24, calls_around = 8;
  auto decision = contest(call, candidates, trial, calls, share_at_first, "");
  if (!decision || trial.lacked_memory()) {
    const auto& instead = by_rule ? *by_rule : candidates.front().decision;
    plans::log("not measured, by rule: " + plans::summary(bucket, instead));
    return std::nullopt;
  }
  // The heuristic does not offer all configurations. Trying more does not pay if the launch takes
  // most of the time.
  if (decision->microseconds > Stopwatch::launch_bound) {
    auto around = candidates_around(call, *decision);
    if (around.size() > 1) {
      const auto eager = decision->eager_microseconds;
      if (const auto better = contest(call, around, trial, calls_around, share_around,
                                      "further configurations: ")) {
        decision = better;
      }
      decision->eager_microseconds = eager;
    }
  }
  plans::log(plans::summary(bucket, *decision));
  plans::passes().change(bucket, [&](plans::KnownPass& known) { known.decide(*decision); });
  return decision;
}

}  // namespace fused::cuda::tune
