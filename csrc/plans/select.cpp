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

}  // namespace

Timings time_in_rounds(size_t candidates, size_t incumbent, const Round& round, const Clock& clock,
                       const TuningRules& rules) {
  std::vector<std::vector<double>> times(candidates);
  std::vector<size_t> running(candidates);
  std::iota(running.begin(), running.end(), 0);

  Timings result;
  while (result.rounds < rules.most_rounds && !running.empty()) {
    const double spent = clock();
    if (result.rounds > 0 && spent > rules.budget_us * rules.hard_factor) break;
    if (result.rounds >= rules.least_rounds && spent > rules.budget_us) break;
    // A lone runner has won, unless it has yet to be compared with the incumbent.
    if (result.rounds >= rules.least_rounds && running.size() == 1) break;

    // Who runs after whom changes, so that nobody always runs behind the hottest.
    std::ranges::rotate(running, running.begin() + (running.size() > 1 ? 1 : 0));
    const auto now = round(running);
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
    double leader = failed;
    for (const size_t i : left) leader = std::min(leader, best(times[i]));
    // The incumbent stays in as long as it runs at all: the others are compared with it.
    std::erase_if(
        left, [&](size_t i) { return i != incumbent && best(times[i]) > leader * rules.hopeless; });
    running = std::move(left);
  }

  for (const auto& values : times) result.medians.push_back(median(values));
  result.winner = std::ranges::min_element(result.medians) - result.medians.begin();
  const double old_time = result.medians[incumbent], new_time = result.medians[result.winner];
  if (!std::isfinite(new_time) || new_time > old_time * (1 - rules.clear_lead) ||
      new_time > old_time - rules.least_gain_us) {
    result.winner = incumbent;
  }
  return result;
}

bool is_as_exact(const SampledErrors& errors, const SampledErrors& reference, double ulp) {
  const auto mean = [](const SampledError& e) { return e.count > 0 ? e.sum / e.count : 0; };
  const auto worst_is_fine = [ulp](const SampledError& e, const SampledError& r) {
    return e.count >= r.count && e.worst <= 1.1 * r.worst + ulp * r.largest;
  };
  // In 16 bits the mean is that of rounding the result, about a quarter of an ulp, and shows who
  // rounds twice. In wider types it is the sum's, where two orders of adding up differ by more than
  // a tenth, and either is fine.
  const bool narrow = ulp >= 0x1p-10;
  const double slack = (narrow ? 1e-4 : 0.1) * ulp * reference.elements.largest;
  return worst_is_fine(errors.elements, reference.elements) &&
         worst_is_fine(errors.sums, reference.sums) &&
         mean(errors.elements) <= 1.1 * mean(reference.elements) + slack;
}

std::optional<Choice> choose(const Candidates& candidates, const Round& round, const Clock& clock,
                             const TuningRules& rules) {
  const auto& reference = candidates.errors[candidates.yardstick];
  // Where everything is 0, every way is exact.
  if (!reference || reference->elements.largest == 0) return std::nullopt;
  std::vector<size_t> entered;
  for (size_t i = 0; i < candidates.errors.size(); ++i) {
    const auto& error = candidates.errors[i];
    if (error && candidates.eligible[i] && is_as_exact(*error, *reference, candidates.ulp)) {
      entered.push_back(i);
    }
  }
  if (entered.empty()) return std::nullopt;
  // Where the incumbent is not sound itself, eager takes its place.
  auto place = std::ranges::find(entered, candidates.incumbent);
  if (place == entered.end()) place = std::ranges::find(entered, candidates.yardstick);
  if (place == entered.end()) --place;
  const auto result = time_in_rounds(
      entered.size(), place - entered.begin(),
      [&](const std::vector<size_t>& running) {
        std::vector<size_t> timed;
        for (const size_t i : running) timed.push_back(entered[i]);
        return round(timed);
      },
      clock, rules);
  if (!std::isfinite(result.medians[result.winner])) return std::nullopt;
  return Choice{entered[result.winner], entered.size(), result.rounds};
}

}  // namespace fused::plans
