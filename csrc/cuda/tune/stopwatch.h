#pragma once

// Times several ways to do one thing in turns, on the current stream.

#include "plans/select.h"

#include <ATen/cuda/CUDAContext.h>

#include <functional>
#include <limits>
#include <optional>
#include <vector>

namespace fused::cuda::tune {

// Microseconds since then.
plans::Clock start_clock();

class Stopwatch {
 public:
  static constexpr double failed = std::numeric_limits<double>::infinity();
  // Below this many microseconds the CPU's launches limit the speed, and its time counts as well.
  static constexpr double launch_bound = 20;

  Stopwatch(size_t ways, std::function<bool(size_t way)> run);

  // Runs a way, which loads its kernels the first time. Returns false if it fails.
  bool once(size_t way);

  // Returns the microseconds of one call of each, infinity for one that fails.
  std::vector<double> round(const std::vector<size_t>& ways);

  struct Times {
    double device = failed, host = failed;
  };
  Times best(size_t way) const { return best_[way]; }

  // Short work is repeated until the events' resolution does not matter.
  void set_repeats(double microseconds);

 private:
  std::function<bool(size_t)> run_;
  c10::cuda::CUDAStream stream_ = at::cuda::getCurrentCUDAStream();
  std::vector<Times> best_;
  int repeats_ = 1;
};

// Chooses by these times until the budget is used up, or the time of `calls` calls of the
// incumbent, so that measuring pays sooner.
std::optional<plans::Choice> fastest(const plans::Candidates& field, Stopwatch& stopwatch,
                                     const plans::Clock& clock, double budget_us, double calls,
                                     const plans::Judge& judge);

}  // namespace fused::cuda::tune
