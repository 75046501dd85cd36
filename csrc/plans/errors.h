#pragma once

// Compares the errors of results with those of eager's results.

#include <string>

namespace fused::plans {

// The errors of many elements, each e / (u·Σ|aₖbₖ| + u·|bias|), where e is the difference to the
// exact result and u the unit roundoff of the result's type.
struct PooledError {
  double squares = 0;  // sum of the errors' squares
  double worst = 0;
  double count = 0;  // number of elements
  double noise = 0;  // the part of `squares` that comes from the rounded operands
};

struct TrialErrors {
  PooledError elements, aux, sums;
  double missed = 0;  // elements that are wrongly NaN, infinite or finite, and wrong mask bits
};

// Returns whether the root mean square is at most 1.05 times the reference's, the largest error is
// close to the reference's, and nothing is missed. Below 2048 elements it allows for chance, and it
// ignores errors below `floor`, the error of the exact results.
bool is_as_exact(const TrialErrors& errors, const TrialErrors& reference, double floor = 1e-6);

std::string summary(const TrialErrors& errors, const TrialErrors& eager);

}  // namespace fused::plans
