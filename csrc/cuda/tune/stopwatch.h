#pragma once

// Times ways to do the same beside each other, on the current stream.

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
  // The CPU cannot keep up below so many microseconds, and its time counts as well.
  static constexpr double launch_bound = 20;

  Stopwatch(size_t ways, std::function<bool(size_t way)> run);

  // Runs a way, which the first time loads its kernels; false where it fails.
  bool once(size_t way);

  // Gives the microseconds that a call of each costs; infinity where it fails.
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

// Chooses by those times, until the budget is used up or so many calls of the incumbent would be
// over, so that measuring is worth its time sooner.
std::optional<plans::Choice> fastest(const plans::Candidates& field, Stopwatch& stopwatch,
                                     const plans::Clock& clock, double budget_us, double calls,
                                     const plans::Judge& judge);

}  // namespace fused::cuda::tune
