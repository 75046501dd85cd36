#include "cuda/tune/measure.h"

#include "core/explain.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/execute.h"
#include "cuda/tune/accuracy.h"
#include "cuda/tune/algorithms.h"
#include "plans/registry.h"
#include "plans/select.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <chrono>
#include <cmath>
#include <limits>
#include <mutex>
#include <sstream>

namespace fused::cuda::tune {
namespace {

using plans::Decision;

constexpr int algorithms_asked = 8;  // the heuristic knows no more, as a rule
constexpr double failed = std::numeric_limits<double>::infinity();
constexpr double launch_bound = 20;  // microseconds: below, the CPU's time counts as well

struct Candidate {
  Plan plan;
  Decision decision;
};

// Where in the scratch memory lies what the candidates write.
struct Layout {
  int64_t result = 0, aux = 0, bias = 0, errors = 0, workspace = 0, bytes = 0;

  Layout(const PassCall& call, const std::vector<Candidate>& candidates) {
    const auto& p = call.problem;
    const int64_t element = size_of(p.matmul.type);
    const auto take = [this](int64_t size) {
      const auto begin = bytes;
      bytes += (size + 511) / 512 * 512;
      return begin;
    };
    result = take(call.result.rows * call.result.ld * element);
    if (writes_aux(call)) {
      const auto row_bytes = p.mask ? p.matmul.ld_aux / 8 : p.matmul.ld_aux * element;
      aux = take(call.aux.rows * row_bytes);
    }
    bias = take(p.bias ? std::max(p.matmul.m, p.matmul.n) * element : 0);
    errors = take(static_cast<int64_t>(candidates.size() * sizeof(plans::SampledErrors)));
    int64_t most = 0;
    for (const auto& c : candidates) most = std::max(most, c.plan.algorithm.workspace);
    workspace = take(most);
  }

  static bool writes_aux(const PassCall& call) {
    return call.problem.pass == gemm::Pass::fprop && call.problem.aux;
  }

  // The call, writing to scratch memory.
  PassCall aside(const PassCall& call, char* memory) const {
    PassCall own = call;
    own.result.data = memory + result;
    if (writes_aux(call)) own.aux.data = memory + aux;
    if (call.bias != nullptr && call.problem.pass != gemm::Pass::fprop) {
      own.bias = memory + bias;
    }
    return own;
  }
};

AccuracySample sample_of(const PassCall& call) {
  const auto& p = call.problem;
  const bool forward = p.pass == gemm::Pass::fprop;
  AccuracySample sample;
  sample.type = p.matmul.type;
  sample.left = call.left, sample.right = call.right, sample.result = call.result;
  sample.forward = forward, sample.activation = p.activation;
  if (forward) {
    sample.bias = call.bias;
    if (p.aux) sample.aux = call.aux;
  } else {
    sample.aux = call.aux;
    sample.sums = call.bias;
    sample.summed = summed(call);
  }
  sample.mask = p.mask;
  return sample;
}

double microseconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
      .count();
}

// ---- one measurement ---------------------------------------------------------------------------

class Measurement {
 public:
  Measurement(const PassCall& call, std::vector<Candidate>& candidates, const Layout& layout,
              char* scratch)
      : call_(layout.aside(call, scratch)),
        candidates_(candidates),
        workspace_(scratch + layout.workspace),
        written_bytes_(layout.errors - layout.result),
        errors_(reinterpret_cast<plans::SampledErrors*>(scratch + layout.errors)),
        stream_(at::cuda::getCurrentCUDAStream(call.problem.matmul.device)),
        best_(candidates.size()) {}

  // Warms all candidates up; the errors of those that run.
  std::vector<std::optional<plans::SampledErrors>> errors() {
    const auto bytes = candidates_.size() * sizeof(plans::SampledErrors);
    std::vector<bool> runs;
    C10_CUDA_CHECK(cudaMemsetAsync(errors_, 0, bytes, stream_));
    for (size_t i = 0; i < candidates_.size(); ++i) {
      // NaN everywhere: what is not written is not taken for the work of the one before.
      C10_CUDA_CHECK(cudaMemsetAsync(call_.result.data, 0xff, written_bytes_, stream_));
      runs.push_back(once(i));
      if (runs.back()) sample_errors(sample_of(call_), errors_ + i, stream_);
    }
    std::vector<plans::SampledErrors> found(candidates_.size());
    C10_CUDA_CHECK(cudaMemcpyAsync(found.data(), errors_, bytes, cudaMemcpyDeviceToHost, stream_));
    C10_CUDA_CHECK(cudaStreamSynchronize(stream_));
    std::vector<std::optional<plans::SampledErrors>> result;
    for (size_t i = 0; i < runs.size(); ++i) {
      result.push_back(runs[i] ? std::optional(found[i]) : std::nullopt);
    }
    return result;
  }

  // What a call of each costs, in microseconds: the device's time, and where that is so short that
  // the CPU cannot keep up, some of the CPU's.
  std::vector<double> round(const std::vector<size_t>& running) {
    std::vector<Round> rounds(running.size());
    for (size_t n = 0; n < running.size(); ++n) {
      auto& round = rounds[n];
      // While the device sleeps, the launches queue up: its time is its own, not the CPU's.
      at::cuda::sleep(repeats_ * sleep_cycles);
      round.begin.record(stream_);
      const auto start = std::chrono::steady_clock::now();
      for (int r = 0; r < repeats_; ++r) round.ran = round.ran && once(running[n]);
      round.host = microseconds_since(start) / repeats_;
      round.end.record(stream_);
    }
    C10_CUDA_CHECK(cudaStreamSynchronize(stream_));
    std::vector<double> costs;
    for (size_t n = 0; n < running.size(); ++n) {
      const auto& round = rounds[n];
      const double device = round.begin.elapsed_time(round.end) * 1e3 / repeats_;
      auto& best = best_[running[n]];
      best = {std::min(best.device, device), std::min(best.host, round.host)};
      costs.push_back(!round.ran ? failed : device + (device < launch_bound ? round.host / 2 : 0));
    }
    return costs;
  }

  // The best lap of a candidate.
  struct Times {
    double device = failed, host = failed;
  };
  Times best(size_t i) const { return best_[i]; }

  // Short work is repeated until the events' resolution does not matter.
  void set_repeats(double microseconds) {
    constexpr double enough = 100;
    repeats_ = static_cast<int>(std::clamp(std::ceil(enough / microseconds), 1.0, 10.0));
  }

 private:
  static constexpr int64_t sleep_cycles = 20000;  // some 12 us, as long as launching takes at most

  struct Round {
    at::cuda::CUDAEvent begin{cudaEventDefault}, end{cudaEventDefault};
    double host = 0;
    bool ran = true;
  };

  bool once(size_t i) {
    try {
      return execute(call_, candidates_[i].plan, workspace_, stream_);
    } catch (const c10::Error&) {  // too little memory for ATen's own workspace
      return false;
    }
  }

  PassCall call_;
  std::vector<Candidate>& candidates_;
  void* workspace_;
  int64_t written_bytes_;  // from the result on: all that candidates write but the workspace
  plans::SampledErrors* errors_;
  c10::cuda::CUDAStream stream_;
  std::vector<Times> best_;
  int repeats_ = 1;
};

Candidate candidate(const PassCall& call, const Strategy& strategy, const Algorithm& algorithm) {
  Decision decision{Decision::Origin::measured, &strategy, algorithm, 0, 0};
  Plan plan{&strategy, {}, {}, {}, algorithm};
  if (strategy.provider == Provider::cublaslt) {
    plan.matmul = gemm::matmul_of(call.problem, strategy);
    plan.descriptors.emplace(plan.matmul);
  }
  return {std::move(plan), decision};
}

// Everything worth trying, eager's way among it. The user who asked for the library's own epilogues
// gets no other strategy, and eager's for comparison.
std::vector<Candidate> candidates_for(const PassCall& call, const Strategy* by_rule) {
  std::vector<Candidate> result;
  for (const auto& strategy : gemm::strategies) {
    if (gemm::objection(call.problem, strategy, lt_version())) continue;
    if (strategy.provider != Provider::cublaslt) {
      result.push_back(candidate(call, strategy, {}));
      continue;
    }
    if (call.problem.literal && by_rule != nullptr && &strategy != by_rule) continue;
    for (const auto& algorithm :
         algorithms_for(call, strategy, algorithms_asked, algorithms_asked)) {
      result.push_back(candidate(call, strategy, algorithm));
    }
  }
  return result;
}

// Other configurations of the algorithm that has won, between it and eager's way.
std::vector<Candidate> candidates_around(const PassCall& call, const Decision& winner) {
  std::vector<Candidate> result;
  if (winner.strategy->provider != Provider::cublaslt) return result;
  result.push_back(candidate(call, *winner.strategy, winner.algorithm));
  // Each runs a few times at least, and the first time of a kernel takes some milliseconds.
  constexpr double load_us = 10e3;
  const double room = plans::budget() * 1e3 / (load_us + 4 * winner.microseconds);
  for (const auto& algorithm :
       algorithms_around(call, *winner.strategy, winner.algorithm, static_cast<size_t>(room))) {
    result.push_back(candidate(call, *winner.strategy, algorithm));
  }
  for (const auto& strategy : gemm::strategies) {
    if (strategy.provider != Provider::cublaslt &&
        !gemm::objection(call.problem, strategy, lt_version())) {
      result.push_back(candidate(call, strategy, {}));
    }
  }
  return result;
}

// Eager's own way; where ATen has none (a bit mask), the last candidate.
size_t yardstick_of(const PassCall& call, const std::vector<Candidate>& candidates) {
  const auto& eager = gemm::eager_of(call.problem, lt_version());
  const auto it =
      std::ranges::find(candidates, &eager, [](const Candidate& c) { return c.decision.strategy; });
  return it == candidates.end() ? candidates.size() - 1 : it - candidates.begin();
}

size_t index_of(const std::vector<Candidate>& candidates, const Decision& decision,
                size_t otherwise) {
  for (size_t i = 0; i < candidates.size(); ++i) {
    const auto& d = candidates[i].decision;
    if (d.strategy == decision.strategy && d.algorithm == decision.algorithm) return i;
  }
  return otherwise;
}

double ulp_of(const PassCall& call) {
  constexpr double ulps[] = {0x1p-52, 0x1p-23, 0x1p-10, 0x1p-7};  // f64, f32, f16, bf16
  return ulps[static_cast<int>(call.problem.matmul.type)];
}

// The winner of a race; nothing where there is too little memory, or nobody sound.
std::optional<Decision> contest(const PassCall& call, std::vector<Candidate>& candidates,
                                const Decision& incumbent, const char* what) {
  const auto begin = std::chrono::steady_clock::now();
  const Layout layout(call, candidates);
  const Scratch scratch(layout.bytes);
  if (scratch.data() == nullptr) return std::nullopt;
  Measurement measurement(call, candidates, layout, scratch.data());

  const size_t yardstick = yardstick_of(call, candidates);
  plans::Candidates field{measurement.errors(),
                          {},
                          index_of(candidates, incumbent, yardstick),
                          yardstick,
                          ulp_of(call)};
  for (const auto& c : candidates) {
    field.eligible.push_back(!call.problem.literal || c.decision.strategy == incumbent.strategy);
  }
  measurement.set_repeats(measurement.round({field.incumbent}).front());
  plans::TuningRules rules;
  rules.budget_us = plans::budget() * 1e3;
  const auto choice = plans::choose(
      field, [&](const std::vector<size_t>& running) { return measurement.round(running); },
      [begin] { return microseconds_since(begin); }, rules);
  if (!choice) return std::nullopt;

  auto decision = candidates[choice->winner].decision;
  decision.microseconds = static_cast<float>(measurement.best(choice->winner).device);
  const double eager = measurement.best(yardstick).device;
  const bool is_eager = candidates[yardstick].decision.strategy->provider == Provider::aten;
  if (is_eager && std::isfinite(eager)) decision.eager_microseconds = static_cast<float>(eager);
  if (plans::verbosity() > 1) {
    for (size_t i = 0; i < candidates.size(); ++i) {
      const auto times = measurement.best(i);
      std::ostringstream line;
      line << "  " << candidates[i].decision.strategy->name << ": " << times.device << " us, CPU "
           << times.host << " us" << (i == choice->winner ? " (taken)" : "");
      plans::log(line.str());
    }
  }
  std::ostringstream line;
  line << what << choice->entered << " of " << candidates.size() << " candidates sound, "
       << choice->rounds << " rounds, " << static_cast<int>(microseconds_since(begin) / 1e3)
       << " ms, best " << decision.microseconds << " us";
  plans::log(line.str());
  return decision;
}

}  // namespace

std::optional<Decision> measure(const PassCall& call, const PassProblem& bucket,
                                const std::optional<Decision>& by_rule) {
  const std::lock_guard lock(measuring(call.problem.matmul.device));
  if (const auto known = plans::measured().find(bucket)) return known;  // by another thread
  const explain::Quiet nothing_shown;

  auto candidates = candidates_for(call, by_rule ? by_rule->strategy : nullptr);
  if (candidates.empty()) return std::nullopt;
  const auto incumbent = by_rule ? *by_rule : candidates[yardstick_of(call, candidates)].decision;
  auto decision = contest(call, candidates, incumbent, "");
  if (!decision) {
    plans::give_up(bucket);
    plans::log("not measured, by rule: " + plans::summary(bucket, incumbent));
    return std::nullopt;
  }
  // Beyond what the heuristic offers, around what has won; not worth it where launching is what
  // takes the time.
  if (decision->microseconds > launch_bound) {
    auto around = candidates_around(call, *decision);
    if (around.size() > 2) {
      const auto eager = decision->eager_microseconds;
      if (const auto better = contest(call, around, *decision, "  further configurations: ")) {
        decision = better;
      }
      decision->eager_microseconds = eager;
    }
  }
  plans::log(plans::summary(bucket, *decision));
  return plans::measured().add(bucket, *decision);
}

}  // namespace fused::cuda::tune
