#pragma once

// Chooses the fastest candidate that is as exact as eager. Candidates are timed in rounds, because
// clocks drift and single timings are disturbed; then they are judged, the fastest first.

#include <algorithm>
#include <cstddef>
#include <functional>
#include <optional>
#include <vector>

namespace fused::plans {

struct TuningRules {
  double budget_us = 200e3;   // wall-clock time; compared after each round
  int least_rounds = 3;       // are run even if the budget is used up,
  double hard_factor = 1.25;  // unless they would take more than this many budgets
  int most_rounds = 15;
  double out_of_reach = 3;     // times the leader's best time: dropped after one round
  double hopeless = 1.15;      // times it: dropped after two rounds, as one may be disturbed
  double steady_us = 200;      // laps this long vary little: one round decides, and two are enough
  double clear_lead = 0.02;    // the incumbent stays unless it is slower by this part of its time
  double least_gain_us = 0.5;  // and by this many microseconds
  int most_judged = 8;         // after that, eager's way is taken
};

// Small problems get a smaller share. It has a lower bound because loading a kernel takes the same
// time for every size.
inline double share_of_budget(double operations) {
  constexpr double all = 2e10, least = 0.15;
  return std::clamp(operations / all, least, 1.0);
}

struct Timings {
  std::vector<double> medians;  // microseconds; infinity where it failed
  int rounds = 0;
};

// Times each of these candidates once and returns microseconds in their order, infinity for one
// that failed.
using Round = std::function<std::vector<double>(const std::vector<size_t>& candidates)>;
using Clock = std::function<double()>;

// The incumbent is timed in every round in which it runs, because the others are compared with it.
Timings time_in_rounds(size_t candidates, size_t incumbent, const Round& round, const Clock& clock,
                       const TuningRules& rules);

// failed: it does not run now, or memory is short.
enum class Verdict { sound, inexact, failed };
using Judge = std::function<Verdict(size_t candidate)>;

struct Candidates {
  std::vector<bool> eligible;  // may win; the others are timed for comparison
  size_t incumbent;
  size_t yardstick;  // eager's way, or the number of candidates if it is not among them
};

struct Choice {
  size_t winner;
  int rounds;
};

// Takes the incumbent unless another is clearly faster; does not judge the yardstick.
std::optional<Choice> choose(const Candidates& candidates, const Round& round, const Clock& clock,
                             const Judge& judge, const TuningRules& rules);

}  // namespace fused::plans
