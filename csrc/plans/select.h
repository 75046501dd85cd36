#pragma once

// Which candidate is the fastest that is as exact as eager: timed in rounds, as clocks drift and
// single timings lie, then judged from the fastest on.

#include <algorithm>
#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

namespace fused::plans {

struct TuningRules {
  double budget_us = 200e3;   // of wall-clock time; asked between rounds
  int least_rounds = 3;       // also when the budget is used up ...
  double hard_factor = 1.25;  // ... unless they would take longer than so many times the budget
  int most_rounds = 15;
  double out_of_reach = 3;  // times the leader's best: timed no more, after a single round
  double hopeless = 1.15;   // the same after two, of which the better counts: one may be disturbed
  double steady_us =
      200;  // laps so long vary little: hopeless after one, and two rounds are enough
  double clear_lead = 0.02;  // below this part of its time the incumbent stays
  double least_gain_us = 0.5;
  int most_judged = 8;  // then eager's way is taken
};

// A call of few operations is soon over, while loading a kernel takes as long for any.
inline double share_of_budget(double operations) {
  constexpr double all = 2e10, least = 0.15;
  return std::clamp(operations / all, least, 1.0);
}

struct Timings {
  std::vector<double> medians;  // microseconds; infinity where it failed
  int rounds = 0;
};

// One round: microseconds of each of the named candidates, in their order; infinity: it failed.
using Round = std::function<std::vector<double>(const std::vector<size_t>& candidates)>;
using Clock = std::function<double()>;

// The incumbent is timed as long as it runs at all: the others are compared with it.
Timings time_in_rounds(size_t candidates, size_t incumbent, const Round& round, const Clock& clock,
                       const TuningRules& rules);

// failed: it does not run, or there is no memory to try it, now.
enum class Verdict { sound, inexact, failed };
using Judge = std::function<Verdict(size_t candidate)>;

struct Candidates {
  // Whether it may win. The others may be there for comparison.
  std::vector<bool> eligible;
  size_t incumbent;
  size_t yardstick;  // eager's way; none: the number of candidates
};

struct Choice {
  size_t winner;
  int rounds;
};

// Takes the incumbent unless another is clearly faster; does not judge the yardstick.
std::optional<Choice> choose(const Candidates& candidates, const Round& round, const Clock& clock,
                             const Judge& judge, const TuningRules& rules);

}  // namespace fused::plans
