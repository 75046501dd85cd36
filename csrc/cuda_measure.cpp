#include "cuda_measure.h"

#include "accuracy.h"
#include "cuda_device.h"
#include "cuda_plan.h"
#include "explain.h"
#include "gemm/race.h"
#include "plans.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/Sleep.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>

#include <chrono>
#include <cmath>
#include <limits>
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
    errors = take(static_cast<int64_t>(contenders.size() * sizeof(AccuracyError)));
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
  return {p.product.type,
          call.left,
          call.right,
          call.result,
          forward,
          p.activation,
          forward ? call.bias : nullptr,
          call.aux,
          p.mask};
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
        errors_(reinterpret_cast<AccuracyError*>(scratch + layout.errors)),
        stream_(at::cuda::getCurrentCUDAStream(call.problem.product.device)),
        best_(contenders.size()) {}

  // Warms all contenders up; which of them run, and are as exact as the last, which is eager's way.
  std::vector<bool> sound() {
    const auto bytes = contenders_.size() * sizeof(AccuracyError);
    std::vector<bool> runs;
    C10_CUDA_CHECK(cudaMemsetAsync(errors_, 0, bytes, stream_));
    for (size_t i = 0; i < contenders_.size(); ++i) {
      runs.push_back(once(i));
      if (runs.back()) sample_error(sample_of(call_), errors_ + i, stream_);
    }
    std::vector<AccuracyError> errors(contenders_.size());
    C10_CUDA_CHECK(cudaMemcpyAsync(errors.data(), errors_, bytes, cudaMemcpyDeviceToHost, stream_));
    C10_CUDA_CHECK(cudaStreamSynchronize(stream_));
    for (size_t i = 0; i < runs.size(); ++i) {
      runs[i] = runs[i] && runs.back() &&
                is_as_exact(errors[i], errors.back(), call_.problem.product.type);
    }
    return runs;
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

  static constexpr double launch_bound = 20;

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
  AccuracyError* errors_;
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

// Everything worth trying, eager's way last.
std::vector<Contender> contenders_for(const StageCall& call) {
  std::vector<Contender> result;
  for (const auto& strategy : gemm::strategies) {
    if (gemm::objection(call.problem, strategy, lt_version())) continue;
    if (!gemm::has_step(strategy, Step::product)) {
      result.push_back(contender(call, strategy, {}));
      continue;
    }
    for (const auto& algorithm :
         algorithms_for(call, strategy, algorithms_asked, algorithms_asked)) {
      result.push_back(contender(call, strategy, algorithm));
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

std::mutex& one_at_a_time() {
  static auto* mutex = new std::mutex;
  return *mutex;
}

}  // namespace

std::optional<Decision> measure(const StageCall& call, const StageProblem& bucket,
                                const std::optional<Decision>& by_rule) {
  const std::lock_guard lock(one_at_a_time());
  if (const auto known = plans::measured().find(bucket)) return known;  // by another thread
  const c10::cuda::CUDAStreamCaptureModeGuard others_may_capture(cudaStreamCaptureModeRelaxed);
  const auto begin = std::chrono::steady_clock::now();
  const explain::Quiet nothing_shown;
  const auto watch = [begin] { return microseconds_since(begin); };

  auto contenders = contenders_for(call);
  if (contenders.empty()) return std::nullopt;
  const Layout layout(call, contenders);
  const Scratch scratch(layout.bytes);
  if (scratch.data() == nullptr) {
    plans::log("too little memory to measure, by rule: " + gemm::describe(bucket, *by_rule));
    return std::nullopt;
  }
  Measurement measurement(call, contenders, layout, scratch.data());

  // Who is unsound keeps its place, so that the others keep theirs, and is not let in.
  const auto sound = measurement.sound();
  std::vector<size_t> field;
  for (size_t i = 0; i < contenders.size(); ++i) {
    // The user who asked for the library's own epilogues gets no other strategy.
    const bool asked_for =
        !call.problem.literal || !by_rule || contenders[i].decision.strategy == by_rule->strategy;
    if (sound[i] && asked_for) field.push_back(i);
  }
  if (field.empty()) return std::nullopt;
  const auto first = by_rule ? index_of(contenders, *by_rule) : contenders.size() - 1;
  const auto incumbent = std::ranges::find(field, first);
  const size_t start = incumbent == field.end() ? field.size() - 1 : incumbent - field.begin();

  measurement.set_repeats(measurement.lap({field[start]}).front());
  const auto lap = [&](const std::vector<size_t>& running) {
    std::vector<size_t> indices;
    for (const size_t i : running) indices.push_back(field[i]);
    return measurement.lap(indices);
  };
  gemm::RaceRules rules;
  rules.budget_us = plans::budget() * 1e3;
  const auto race = gemm::race(field.size(), start, lap, watch, rules);

  if (!std::isfinite(race.medians[race.winner])) return std::nullopt;
  auto decision = contenders[field[race.winner]].decision;
  const auto device_time = [&](size_t i) {
    const double time = measurement.best(i).device;
    return std::isfinite(time) ? static_cast<float>(time) : 0;
  };
  decision.microseconds = device_time(field[race.winner]);
  decision.eager_microseconds = device_time(contenders.size() - 1);
  if (plans::verbosity() > 1) {
    for (const size_t i : field) {
      const auto times = measurement.best(i);
      std::ostringstream line;
      line << "  " << contenders[i].decision.strategy->name << ": " << times.device << " us, CPU "
           << times.host << " us" << (i == field[race.winner] ? " (taken)" : "");
      plans::log(line.str());
    }
  }
  if (plans::verbosity() > 0) {
    std::ostringstream line;
    line << gemm::describe(bucket, decision) << "; " << field.size() << " of " << contenders.size()
         << " candidates sound, " << race.rounds << " rounds, "
         << static_cast<int64_t>(watch() / 1e3) << " ms";
    plans::log(line.str());
  }
  return plans::measured().add(bucket, decision);
}

}  // namespace fused
