#include "plans/errors.h"

#include <algorithm>
#include <cmath>
#include <sstream>

namespace fused::plans {
namespace {

double root_mean_square(const PooledError& e) {
  return e.count > 0 ? std::sqrt(e.squares / e.count) : 0;
}

bool is_as_exact(const PooledError& error, const PooledError& reference, double floor) {
  if (error.count == 0) return reference.count == 0;
  constexpr double enough = 2048;
  const double by_chance = error.count < enough ? 2 / std::sqrt(error.count) : 0;
  constexpr double margin = 1.05;  // 1.1 is promised; users' numbers differ from a trial's
  const double allowed = (margin + by_chance) * root_mean_square(reference);
  const double noise = error.noise / error.count;
  return root_mean_square(error) <= std::sqrt(allowed * allowed + noise) + floor &&
         error.worst <= 4 * std::max(reference.worst, std::sqrt(noise)) + 4 * floor;
}

}  // namespace

bool is_as_exact(const TrialErrors& errors, const TrialErrors& reference, double floor) {
  return errors.missed == 0 && is_as_exact(errors.elements, reference.elements, floor) &&
         is_as_exact(errors.aux, reference.aux, floor) &&
         is_as_exact(errors.sums, reference.sums, floor);
}

std::string summary(const TrialErrors& errors, const TrialErrors& eager) {
  std::ostringstream text;
  text << errors.missed << " values or bits missed";
  const auto compare = [&](const char* what, const PooledError& ours, const PooledError& theirs) {
    if (ours.count == 0) return;
    text << "; " << what << " " << root_mean_square(ours) << ", worst " << ours.worst << " (eager "
         << root_mean_square(theirs) << ", " << theirs.worst << ")";
  };
  compare("errors", errors.elements, eager.elements);
  compare("saved", errors.aux, eager.aux);
  compare("sums", errors.sums, eager.sums);
  return text.str();
}

}  // namespace fused::plans
