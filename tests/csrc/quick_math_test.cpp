// The activations of quick_math.cuh on a CPU, at every number of 16 bits, against fp64.
// `quick_math_test NAME` runs one test and exits with 1 where it fails.

#include "expect.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define __device__
#include "cuda/kernels/quick_math.cuh"

using fused::Activation;
namespace quick = fused::cuda::quick;

namespace {

constexpr double beta = 0.7978845608028654, kappa = 0.044715;

double share(Activation activation, double z) {  // act(z) = z · share
  switch (activation) {
    case Activation::relu:
      return z > 0;
    case Activation::gelu_tanh:
      return 1 / (1 + std::exp(-2 * beta * (z + kappa * z * z * z)));
    case Activation::gelu_erf:
      return 0.5 * std::erfc(-z * std::sqrt(0.5));
    case Activation::silu:
      return 1 / (1 + std::exp(-z));
    default:
      return 1;
  }
}

// d(share)/dz
double slope(Activation activation, double z) {
  const double s = share(activation, z);
  switch (activation) {
    case Activation::gelu_tanh:
      return s * (1 - s) * 2 * beta * (1 + 3 * kappa * z * z);
    case Activation::gelu_erf:
      return std::exp(-z * z / 2) / std::sqrt(8 * std::atan(1.0));
    case Activation::silu:
      return s * (1 - s);
    default:
      return 0;
  }
}

// Half a unit in T's last place at `exact`, and what fp32 may add to that.
template <typename T>
double allowance(double exact, double z) {
  constexpr int digits = std::is_same_v<T, c10::Half> ? 11 : 8;
  constexpr int least = std::is_same_v<T, c10::Half> ? -14 : -126;
  const int exponent = exact == 0 ? least : std::max(std::ilogb(exact), least);
  return 0.5 * std::ldexp(1.0, exponent - digits + 1) + 2.5e-7 * std::max(1.0, std::abs(z));
}

template <typename T, Activation activation>
void compare() {
  constexpr double modest = 1e18;  // the square of what is beyond is no number of fp32
  for (int bits = 0; bits < 1 << 16; ++bits) {
    const auto pattern = static_cast<uint16_t>(bits);
    T z;
    std::memcpy(&z, &pattern, sizeof(z));
    const auto value = static_cast<float>(z);
    const float act = static_cast<T>(quick::activate<activation>(value));
    const float gradient = static_cast<T>(quick::gradient<activation>(1.0f, value));
    if (std::isnan(value)) {
      EXPECT(std::isnan(act));
      EXPECT(std::isnan(gradient) || (activation == Activation::relu && gradient == 1));
    } else if (std::abs(value) <= modest) {
      const double s = share(activation, value), exact = value * s;
      const double derivative = s + value * slope(activation, value);
      EXPECT(std::abs(act - exact) <= allowance<T>(exact, value));
      EXPECT(std::abs(gradient - derivative) <= allowance<T>(derivative, value));
    } else {  // NaN at -inf, as torch's
      EXPECT(value > 0 ? act == value : act == 0 || std::isinf(value));
    }
  }
}

template <Activation activation>
void both() {
  compare<c10::BFloat16, activation>();
  compare<c10::Half, activation>();
}

const Tests tests = {
    {"relu", both<Activation::relu>},
    {"gelu_tanh", both<Activation::gelu_tanh>},
    {"gelu_erf", both<Activation::gelu_erf>},
    {"silu", both<Activation::silu>},
};

}  // namespace

int main(int, char** argv) { return run_one(tests, argv); }
