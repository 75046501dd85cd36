#pragma once

// Which of several candidates is the fastest: decided in rounds, because clocks drift and single
// timings lie. Pure logic; the caller brings the timer.

#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

namespace fused::plans {

struct TuningRules {
  double budget_us = 200e3;  // of wall-clock time; asked between rounds
  int least_rounds = 5;      // also when the budget is used up ...
  int hard_factor = 4;       // ... but for this many times the budget
  int most_rounds = 15;
  double hopeless = 1.15;    // times the leader's best: timed no more
  double clear_lead = 0.02;  // below this part of its time the incumbent stays
  double least_gain_us = 0.5;
};

struct Timings {
  size_t winner = 0;
  std::vector<double> medians;  // microseconds; infinity where it failed
  int rounds = 0;
};

// One round: microseconds of each of the named candidates, in their order; infinity: it failed.
using Round = std::function<std::vector<double>(const std::vector<size_t>& candidates)>;
// Microseconds since the timing began.
using Clock = std::function<double()>;

// The incumbent wins unless another is clearly faster. Where all fail, the incumbent is returned
// with a time of infinity.
Timings time_in_rounds(size_t candidates, size_t incumbent, const Round& round, const Clock& clock,
                       const TuningRules& rules);

// The error of a candidate's result against the exact one, at some of its elements.
struct SampledError {
  double sum = 0;      // of |result - exact|
  double worst = 0;    //
  double largest = 0;  // |exact|
  double count = 0;    // elements that were finite
};

struct SampledErrors {
  SampledError elements;
  SampledError sums;  // of a bias gradient
};

// Whether errors are no worse than others, up to a tenth and one unit in the last place, which is
// given for numbers of magnitude 1. Of sums, which some add up before rounding and some after, only
// the worst case is held against eager's.
bool is_as_exact(const SampledErrors& errors, const SampledErrors& reference, double ulp);

struct Candidates {
  // By candidate; nothing: it does not run.
  std::vector<std::optional<SampledErrors>> errors;
  // Whether it may win. The others may be there for comparison.
  std::vector<bool> eligible;
  size_t incumbent;
  size_t yardstick;  // eager's way
  double ulp;
};

struct Choice {
  size_t winner;
  size_t entered;  // candidates that were timed
  int rounds;
};

// Times the eligible candidates that are as exact as eager's way; nothing where none can be told to
// be sound.
std::optional<Choice> choose(const Candidates& candidates, const Round& round, const Clock& clock,
                             const TuningRules& rules);

}  // namespace fused::plans
