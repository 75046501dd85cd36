#pragma once

// The unit of an element's error is the error by rounding there, so that an error counts as much
// where the activation is flat. For host and device.

#include "gemm/problem.h"

namespace fused::cuda::tune {

struct Roundoff {
  double of_type = 0;       // of the stored type
  double of_functions = 0;  // of an activation or its derivative, relative to the argument

  constexpr Roundoff() = default;
  constexpr explicit Roundoff(gemm::Type type) {
    constexpr double types[] = {0x1p-53, 0x1p-24, 0x1p-11, 0x1p-8};       // f64, f32, f16, bf16
    constexpr double functions[] = {0x1p-53, 0x1p-24, 0x1p-18, 0x1p-18};  // 16 bits: in fp32
    of_type = types[static_cast<int>(type)], of_functions = functions[static_cast<int>(type)];
  }
};

constexpr double magnitude_of(double x) { return x < 0 ? -x : x; }

// Returns the unit of `value` = act(z) for a sum z with this magnitude, Σ|aₖbₖ| + |bias|.
constexpr double unit_of_value(const Roundoff& u, double value, double slope, double z,
                               double magnitude) {
  return u.of_type * (magnitude_of(slope) * magnitude + magnitude_of(value)) +
         u.of_functions * magnitude_of(z);
}

constexpr double unit_of_gradient(const Roundoff& u, double slope, double sum, double magnitude) {
  return u.of_type * magnitude_of(slope) * magnitude + u.of_functions * magnitude_of(sum);
}

}  // namespace fused::cuda::tune
