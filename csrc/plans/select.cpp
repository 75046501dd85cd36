#include "plans/select.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace fused::plans {
namespace {

constexpr double failed = std::numeric_limits<double>::infinity();

double median(std::vector<double> values) {
  if (values.empty()) return failed;
  const auto middle = values.begin() + values.size() / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double best(const std::vector<double>& values) {
  return values.empty() ? failed : *std::ranges::min_element(values);
}

// Returns the incumbent, if it is there, unless another has a clear lead.
size_t winner_of(const std::vector<double>& medians, size_t incumbent, const TuningRules& rules) {
  const size_t fastest = std::ranges::min_element(medians) - medians.begin();
  if (incumbent >= medians.size() || !std::isfinite(medians[incumbent])) return fastest;
  const double old_time = medians[incumbent], new_time = medians[fastest];
  const bool is_clear =
      new_time <= old_time * (1 - rules.clear_lead) && new_time <= old_time - rules.least_gain_us;
  return is_clear ? fastest : incumbent;
}

}  // namespace

Timings time_in_rounds(size_t candidates, size_t incumbent, const Round& round, const Clock& clock,
                       const TuningRules& rules) {
  std::vector<std::vector<double>> times(candidates);
  std::vector<size_t> running(candidates);
  std::iota(running.begin(), running.end(), 0);

  Timings result;
  double last_round = 0, leader = 0;
  // There is no leader before the first round.
  const auto is_steady = [&] { return result.rounds > 0 && leader >= rules.steady_us; };
  while (result.rounds < rules.most_rounds && !running.empty()) {
    const double spent = clock();
    if (result.rounds > 0 && spent + last_round > rules.budget_us * rules.hard_factor) break;
    const int least = is_steady() ? std::min(rules.least_rounds, 2) : rules.least_rounds;
    if (result.rounds >= least && spent > rules.budget_us) break;
    // A candidate that is left alone has won, unless it was not compared with the incumbent.
    if (result.rounds >= least && running.size() == 1) break;

    // The order changes from round to round, so that no candidate always runs after the same one.
    std::ranges::rotate(running, running.begin() + (running.size() > 1 ? 1 : 0));
    const auto now = round(running);
    last_round = clock() - spent;
    ++result.rounds;
    std::vector<size_t> left;
    for (size_t i = 0; i < running.size(); ++i) {
      if (std::isfinite(now[i])) {
        times[running[i]].push_back(now[i]);
        left.push_back(running[i]);
      } else {
        times[running[i]].clear();
      }
    }
    leader = failed;
    for (const size_t i : left) leader = std::min(leader, best(times[i]));
    const bool is_known = result.rounds > 1 || is_steady();
    const double limit = leader * (is_known ? rules.hopeless : rules.out_of_reach);
    std::erase_if(left, [&](size_t i) { return i != incumbent && best(times[i]) > limit; });
    running = std::move(left);
  }

  for (const auto& values : times) result.medians.push_back(median(values));
  return result;
}

std::optional<Choice> choose(const Candidates& candidates, const Round& round, const Clock& clock,
                             const Judge& judge, const TuningRules& rules) {
  std::vector<size_t> entered;
  for (size_t i = 0; i < candidates.eligible.size(); ++i) {
    if (candidates.eligible[i] || i == candidates.yardstick) entered.push_back(i);
  }
  const auto place_of = [&](size_t candidate) -> size_t {
    return std::ranges::find(entered, candidate) - entered.begin();
  };
  const size_t incumbent = place_of(candidates.incumbent);
  const auto timings = time_in_rounds(
      entered.size(), incumbent,
      [&](const std::vector<size_t>& running) {
        std::vector<size_t> timed;
        for (const size_t i : running) timed.push_back(entered[i]);
        return round(timed);
      },
      clock, rules);

  auto medians = timings.medians;
  const size_t yardstick = place_of(candidates.yardstick);
  if (yardstick < medians.size() && !candidates.eligible[candidates.yardstick]) {
    medians[yardstick] = failed;
  }
  for (int judged = 0; judged < rules.most_judged; ++judged) {
    // An incumbent that is not sound gives its place to eager's way.
    const bool stays = incumbent < medians.size() && std::isfinite(medians[incumbent]);
    const size_t winner = winner_of(medians, stays ? incumbent : yardstick, rules);
    if (winner == medians.size() || !std::isfinite(medians[winner])) return std::nullopt;
    if (winner == yardstick || judge(entered[winner]) == Verdict::sound) {
      return Choice{entered[winner], timings.rounds};
    }
    medians[winner] = failed;
  }
  if (yardstick < medians.size() && std::isfinite(medians[yardstick])) {
    return Choice{candidates.yardstick, timings.rounds};
  }
  return std::nullopt;
}

}  // namespace fused::plans
