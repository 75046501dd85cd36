#pragma once

// Several ways to do the same, timed beside each other on the current stream.

#include "plans/select.h"

#include <ATen/cuda/CUDAContext.h>

#include <chrono>
#include <functional>
#include <limits>
#include <optional>
#include <vector>

namespace fused::cuda::tune {

// Microseconds since it was made.
class Clock {
 public:
  double operator()() const {
    return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin_)
        .count();
  }

 private:
  std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

class Stopwatch {
 public:
  static constexpr double failed = std::numeric_limits<double>::infinity();
  // Below so many microseconds the CPU cannot keep up, and its time counts as well.
  static constexpr double launch_bound = 20;

  // `run` launches a way, and says whether it runs.
  Stopwatch(size_t ways, std::function<bool(size_t way)> run);

  // The first time loads a way's kernels.
  bool once(size_t way);

  // What a call of each of these costs, in microseconds; infinity where it fails.
  std::vector<double> round(const std::vector<size_t>& ways);

  // The best lap of a way.
  struct Times {
    double device = failed, host = failed;
  };
  Times best(size_t way) const { return best_[way]; }

  // Short work is repeated until the events' resolution does not matter.
  void set_repeats(double microseconds);

 private:
  struct Lap;

  std::function<bool(size_t)> run_;
  c10::cuda::CUDAStream stream_ = at::cuda::getCurrentCUDAStream();
  std::vector<Times> best_;
  int repeats_ = 1;
};

// plans::choose by those times. It ends with the budget, counted from the clock's beginning, or
// after as long as so many calls of the incumbent take if that is less, so that measuring is worth
// its time sooner.
std::optional<plans::Choice> fastest(const plans::Candidates& field, Stopwatch& stopwatch,
                                     const Clock& clock, double budget_us, double calls,
                                     const plans::Judge& judge);

}  // namespace fused::cuda::tune
