#pragma once

// Errors of results against exact ones, and whether they are no larger than eager's.

#include <string>

namespace fused::plans {

// Errors of results against exact ones, over many elements: of e / (u·Σ|aₖbₖ| + u·|bias|), where u
// is the unit roundoff of the result's type.
struct PooledError {
  double squares = 0;  // sum of them
  double worst = 0;
  double count = 0;  // of elements
  double noise = 0;  // sum of squares that come of what was summed, not of the summing
};

struct TrialErrors {
  PooledError elements, aux, sums;
  double missed = 0;  // elements that are not finite but should be, or NaN but are not; mask bits
};

// Allows root mean squares of 1.05 times the reference's, largest errors in their neighbourhood,
// chance below 2048 elements, and errors below `floor`, that of the exact results; nothing may be
// missed.
bool is_as_exact(const TrialErrors& errors, const TrialErrors& reference, double floor = 1e-6);

std::string summary(const TrialErrors& errors, const TrialErrors& eager);

}  // namespace fused::plans
