#include "cuda/tune/stopwatch.h"

#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/Sleep.h>

#include <algorithm>
#include <chrono>
#include <cmath>

namespace fused::cuda::tune {
namespace {

struct Lap {
  at::cuda::CUDAEvent begin{cudaEventDefault}, end{cudaEventDefault};
  double host = 0;
  bool ran = true;
};

}  // namespace

plans::Clock start_clock() {
  return [begin = std::chrono::steady_clock::now()] {
    const auto now = std::chrono::steady_clock::now();
    return std::chrono::duration<double, std::micro>(now - begin).count();
  };
}

Stopwatch::Stopwatch(size_t ways, std::function<bool(size_t)> run)
    : run_(std::move(run)), best_(ways) {}

bool Stopwatch::once(size_t way) {
  try {
    return run_(way);
  } catch (const c10::Error&) {  // too little memory for ATen's own workspace
    return false;
  }
}

std::vector<double> Stopwatch::round(const std::vector<size_t>& ways) {
  constexpr int64_t sleep_cycles = 20000;  // some 12 us, as long as launching takes at most
  std::vector<Lap> laps(ways.size());
  for (size_t n = 0; n < ways.size(); ++n) {
    auto& lap = laps[n];
    // The launches queue up while the device sleeps, so that the time measured is the device's.
    at::cuda::sleep(repeats_ * sleep_cycles);
    lap.begin.record(stream_);
    const auto clock = start_clock();
    for (int r = 0; r < repeats_; ++r) lap.ran = lap.ran && once(ways[n]);
    lap.host = clock() / repeats_;
    lap.end.record(stream_);
  }
  C10_CUDA_CHECK(cudaStreamSynchronize(stream_));
  std::vector<double> costs;
  for (size_t n = 0; n < ways.size(); ++n) {
    const auto& lap = laps[n];
    const double device = lap.begin.elapsed_time(lap.end) * 1e3 / repeats_;
    auto& best = best_[ways[n]];
    best = {std::min(best.device, device), std::min(best.host, lap.host)};
    costs.push_back(!lap.ran ? failed : device + (device < launch_bound ? lap.host / 2 : 0));
  }
  return costs;
}

void Stopwatch::set_repeats(double microseconds) {
  constexpr double enough = 100;
  repeats_ = static_cast<int>(std::clamp(std::ceil(enough / microseconds), 1.0, 10.0));
}

std::optional<plans::Choice> fastest(const plans::Candidates& field, Stopwatch& stopwatch,
                                     const plans::Clock& clock, double budget_us, double calls,
                                     const plans::Judge& judge) {
  plans::TuningRules rules{.budget_us = budget_us};
  if (field.incumbent < field.eligible.size()) {
    constexpr double least = 5e3;
    const double once = stopwatch.round({field.incumbent}).front();
    if (std::isfinite(once)) {
      stopwatch.set_repeats(once);
      rules.budget_us = std::min(budget_us, clock() + std::max(least, calls * once));
    }
  }
  const auto round = [&](const std::vector<size_t>& running) { return stopwatch.round(running); };
  return plans::choose(field, round, clock, judge, rules);
}

}  // namespace fused::cuda::tune
