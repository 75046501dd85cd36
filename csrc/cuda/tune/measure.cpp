#include "cuda/tune/measure.h"

#include "cuda/tune/accuracy.h"
#include "cuda/runtime/device.h"
#include "cuda/tune/decide.h"
#include "core/explain.h"
#include "plans/select.h"
#include "plans/registry.h"

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

namespace fused {
namespace {

using gemm::Algorithm;
using gemm::Decision;
using gemm::Matrix;
using gemm::StageProblem;
using gemm::Step;
using gemm::Strategy;

constexpr int algorithms_asked = 8;  // the heuristic knows no more, as a rule
constexpr double failed = std::numeric_limits<double>::infinity();
constexpr double launch_bound = 20;  // microseconds: below, the CPU's time counts as well

struct Contender {
  gemm::Plan plan;
  Decision decision;
};

// Where in the scratch memory lies what the contenders write.
struct Layout {
  int64_t result = 0, aux = 0, bias = 0, errors = 0, workspace = 0, bytes = 0;

  Layout(const StageCall& call, const std::vector<Contender>& contenders) {
    const auto& p = call.problem;
    const int64_t element = size_of(p.product.type);
    const auto take = [this](int64_t size) {
      const auto begin = bytes;
      bytes += (size + 511) / 512 * 512;
      return begin;
    };
    result = take(call.result.rows * call.result.ld * element);
    if (writes_aux(call)) {
      const auto row_bytes = p.mask ? p.product.ld_aux / 8 : p.product.ld_aux * element;
      aux = take(call.aux.rows * row_bytes);
    }
    bias = take(p.bias ? std::max(p.product.m, p.product.n) * element : 0);
    errors = take(static_cast<int64_t>(contenders.size() * sizeof(gemm::SampledErrors)));
    int64_t most = 0;
    for (const auto& c : contenders) most = std::max(most, c.plan.algorithm.workspace);
    workspace = take(most);
  }

  static bool writes_aux(const StageCall& call) {
    return call.problem.stage == gemm::Stage::forward && call.problem.aux;
  }

  // The call, writing to scratch memory.
  StageCall aside(const StageCall& call, char* memory) const {
    StageCall own = call;
    own.result.data = memory + result;
    if (writes_aux(call)) own.aux.data = memory + aux;
    if (call.bias != nullptr && call.problem.stage != gemm::Stage::forward) {
      own.bias = memory + bias;
    }
    return own;
  }
};

AccuracySample sample_of(const StageCall& call) {
  const auto& p = call.problem;
  const bool forward = p.stage == gemm::Stage::forward;
  AccuracySample sample;
  sample.type = p.product.type;
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
  Measurement(const StageCall& call, std::vector<Contender>& contenders, const Layout& layout,
              char* scratch)
      : call_(layout.aside(call, scratch)),
        contenders_(contenders),
        workspace_(scratch + layout.workspace),
        written_bytes_(layout.errors - layout.result),
        errors_(reinterpret_cast<gemm::SampledErrors*>(scratch + layout.errors)),
        stream_(at::cuda::getCurrentCUDAStream(call.problem.product.device)),
        best_(contenders.size()) {}

  // Warms all contenders up; the errors of those that run.
  std::vector<std::optional<gemm::SampledErrors>> errors() {
    const auto bytes = contenders_.size() * sizeof(gemm::SampledErrors);
    std::vector<bool> runs;
    C10_CUDA_CHECK(cudaMemsetAsync(errors_, 0, bytes, stream_));
    for (size_t i = 0; i < contenders_.size(); ++i) {
      // NaN everywhere: what is not written is not taken for the work of the one before.
      C10_CUDA_CHECK(cudaMemsetAsync(call_.result.data, 0xff, written_bytes_, stream_));
      runs.push_back(once(i));
      if (runs.back()) sample_errors(sample_of(call_), errors_ + i, stream_);
    }
    std::vector<gemm::SampledErrors> found(contenders_.size());
    C10_CUDA_CHECK(cudaMemcpyAsync(found.data(), errors_, bytes, cudaMemcpyDeviceToHost, stream_));
    C10_CUDA_CHECK(cudaStreamSynchronize(stream_));
    std::vector<std::optional<gemm::SampledErrors>> result;
    for (size_t i = 0; i < runs.size(); ++i) {
      result.push_back(runs[i] ? std::optional(found[i]) : std::nullopt);
    }
    return result;
  }

  // What a call of each costs, in microseconds: the device's time, and where that is so short that
  // the CPU cannot keep up, some of the CPU's.
  std::vector<double> lap(const std::vector<size_t>& running) {
    std::vector<Lap> laps(running.size());
    for (size_t n = 0; n < running.size(); ++n) {
      auto& lap = laps[n];
      // While the device sleeps, the launches queue up: its time is its own, not the CPU's.
      at::cuda::sleep(repeats_ * sleep_cycles);
      lap.begin.record(stream_);
      const auto start = std::chrono::steady_clock::now();
      for (int r = 0; r < repeats_; ++r) lap.ran = lap.ran && once(running[n]);
      lap.host = microseconds_since(start) / repeats_;
      lap.end.record(stream_);
    }
    C10_CUDA_CHECK(cudaStreamSynchronize(stream_));
    std::vector<double> costs;
    for (size_t n = 0; n < running.size(); ++n) {
      const auto& lap = laps[n];
      const double device = lap.begin.elapsed_time(lap.end) * 1e3 / repeats_;
      auto& best = best_[running[n]];
      best = {std::min(best.device, device), std::min(best.host, lap.host)};
      costs.push_back(!lap.ran ? failed : device + (device < launch_bound ? lap.host / 2 : 0));
    }
    return costs;
  }

  // The best lap of a contender.
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

  struct Lap {
    at::cuda::CUDAEvent begin{cudaEventDefault}, end{cudaEventDefault};
    double host = 0;
    bool ran = true;
  };

  bool once(size_t i) {
    try {
      return execute(call_, contenders_[i].plan, workspace_, stream_);
    } catch (const c10::Error&) {  // too little memory for ATen's own workspace
      return false;
    }
  }

  StageCall call_;
  std::vector<Contender>& contenders_;
  void* workspace_;
  int64_t written_bytes_;  // from the result on: all that contenders write but the workspace
  gemm::SampledErrors* errors_;
  c10::cuda::CUDAStream stream_;
  std::vector<Times> best_;
  int repeats_ = 1;
};

Contender contender(const StageCall& call, const Strategy& strategy, const Algorithm& algorithm) {
  Decision decision{Decision::Origin::measured, &strategy, algorithm, 0, 0};
  gemm::Plan plan{&strategy, {}, {}, {}, algorithm};
  if (gemm::has_step(strategy, Step::product)) {
    plan.product = gemm::product_of(call.problem, strategy);
    plan.descriptors.emplace(plan.product);
  }
  return {std::move(plan), decision};
}

// Everything worth trying, eager's way last. The user who asked for the library's own epilogues
// gets no other strategy, and eager's for comparison.
std::vector<Contender> contenders_for(const StageCall& call, const Strategy* by_rule) {
  std::vector<Contender> result;
  for (const auto& strategy : gemm::strategies) {
    if (gemm::objection(call.problem, strategy, lt_version())) continue;
    if (!gemm::has_step(strategy, Step::product)) {
      result.push_back(contender(call, strategy, {}));
      continue;
    }
    if (call.problem.literal && by_rule != nullptr && &strategy != by_rule) continue;
    for (const auto& algorithm :
         algorithms_for(call, strategy, algorithms_asked, algorithms_asked)) {
      result.push_back(contender(call, strategy, algorithm));
    }
  }
  return result;
}

// Other configurations of the algorithm that has won, between it and eager's way.
std::vector<Contender> contenders_around(const StageCall& call, const Decision& winner) {
  std::vector<Contender> result;
  if (!gemm::has_step(*winner.strategy, Step::product)) return result;
  result.push_back(contender(call, *winner.strategy, winner.algorithm));
  // Each runs a few times at least, and the first time of a kernel takes some milliseconds.
  constexpr double load_us = 10e3;
  const double room = plans::budget() * 1e3 / (load_us + 4 * winner.microseconds);
  for (const auto& algorithm :
       algorithms_around(call, *winner.strategy, winner.algorithm, static_cast<size_t>(room))) {
    result.push_back(contender(call, *winner.strategy, algorithm));
  }
  for (const auto& strategy : gemm::strategies) {
    if (!gemm::has_step(strategy, Step::product) &&
        !gemm::objection(call.problem, strategy, lt_version())) {
      result.push_back(contender(call, strategy, {}));
    }
  }
  return result;
}

size_t index_of(const std::vector<Contender>& contenders, const Decision& decision) {
  for (size_t i = 0; i < contenders.size(); ++i) {
    const auto& d = contenders[i].decision;
    if (d.strategy == decision.strategy && d.algorithm == decision.algorithm) return i;
  }
  return contenders.size() - 1;
}

double ulp_of(const StageCall& call) {
  constexpr double ulps[] = {0x1p-52, 0x1p-23, 0x1p-10, 0x1p-7};  // f64, f32, f16, bf16
  return ulps[static_cast<int>(call.problem.product.type)];
}

// The winner of a race; nothing where there is too little memory, or nobody sound.
std::optional<Decision> contest(const StageCall& call, std::vector<Contender>& contenders,
                                const Decision& incumbent, const char* what) {
  const auto begin = std::chrono::steady_clock::now();
  const Layout layout(call, contenders);
  const Scratch scratch(layout.bytes);
  if (scratch.data() == nullptr) return std::nullopt;
  Measurement measurement(call, contenders, layout, scratch.data());

  gemm::Field field{measurement.errors(), {}, index_of(contenders, incumbent), ulp_of(call)};
  for (const auto& c : contenders) {
    field.eligible.push_back(!call.problem.literal || c.decision.strategy == incumbent.strategy);
  }
  measurement.set_repeats(measurement.lap({field.incumbent}).front());
  gemm::RaceRules rules;
  rules.budget_us = plans::budget() * 1e3;
  const auto choice = gemm::choose(
      field, [&](const std::vector<size_t>& running) { return measurement.lap(running); },
      [begin] { return microseconds_since(begin); }, rules);
  if (!choice) return std::nullopt;

  auto decision = contenders[choice->winner].decision;
  decision.microseconds = static_cast<float>(measurement.best(choice->winner).device);
  const double eager = measurement.best(contenders.size() - 1).device;
  const bool is_eager = !gemm::has_step(*contenders.back().decision.strategy, Step::product);
  if (is_eager && std::isfinite(eager)) decision.eager_microseconds = static_cast<float>(eager);
  if (plans::verbosity() > 1) {
    for (size_t i = 0; i < contenders.size(); ++i) {
      const auto times = measurement.best(i);
      std::ostringstream line;
      line << "  " << contenders[i].decision.strategy->name << ": " << times.device << " us, CPU "
           << times.host << " us" << (i == choice->winner ? " (taken)" : "");
      plans::log(line.str());
    }
  }
  std::ostringstream line;
  line << what << choice->entered << " of " << contenders.size() << " candidates sound, "
       << choice->rounds << " rounds, " << static_cast<int>(microseconds_since(begin) / 1e3)
       << " ms, best " << decision.microseconds << " us";
  plans::log(line.str());
  return decision;
}

}  // namespace

std::optional<Decision> measure(const StageCall& call, const StageProblem& bucket,
                                const std::optional<Decision>& by_rule) {
  const std::lock_guard lock(measuring(call.problem.product.device));
  if (const auto known = plans::measured().find(bucket)) return known;  // by another thread
  const explain::Quiet nothing_shown;

  auto contenders = contenders_for(call, by_rule ? by_rule->strategy : nullptr);
  if (contenders.empty()) return std::nullopt;
  const auto incumbent = by_rule ? *by_rule : contenders.back().decision;
  auto decision = contest(call, contenders, incumbent, "");
  if (!decision) {
    plans::give_up(bucket);
    plans::log("not measured, by rule: " + gemm::describe(bucket, incumbent));
    return std::nullopt;
  }
  // Beyond what the heuristic offers, around what has won; not worth it where launching is what
  // takes the time.
  if (decision->microseconds > launch_bound) {
    auto around = contenders_around(call, *decision);
    if (around.size() > 2) {
      const auto eager = decision->eager_microseconds;
      if (const auto better = contest(call, around, *decision, "  further configurations: ")) {
        decision = better;
      }
      decision->eager_microseconds = eager;
    }
  }
  plans::log(gemm::describe(bucket, *decision));
  return plans::measured().add(bucket, *decision);
}

}  // namespace fused
