// The activations of quick_math.cuh on a CPU, at every number of 16 bits, against fp64; and what a
// trial thinks of such, and of coarser ones.

#include "expect.h"

#include "cuda/tune/error_unit.h"
#include "plans/errors.h"

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>

#define __device__
#include "cuda/kernels/quick_math.cuh"

using fused::Activation, fused::plans::TrialErrors;
using fused::cuda::tune::Roundoff;
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

template <typename T>
constexpr bool is_half = std::is_same_v<T, c10::Half>;

// Half a unit in T's last place at `exact`.
template <typename T>
double rounding(double exact) {
  constexpr int digits = is_half<T> ? 11 : 8, least = is_half<T> ? -14 : -126;
  const int exponent = exact == 0 ? least : std::max(std::ilogb(exact), least);
  return 0.5 * std::ldexp(1.0, exponent - digits + 1);
}

template <typename T>
const Roundoff roundoff(is_half<T> ? fused::gemm::Type::f16 : fused::gemm::Type::bf16);

double derivative(Activation activation, double z) {
  return share(activation, z) + z * slope(activation, z);
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
      // Beside the rounding, half of what rounding z would do; of a derivative, whose parts cancel
      // each other somewhere, of these parts in fp32; and what is 0 for a subnormal share.
      const double s = share(activation, value), exact = value * s;
      const double rest = value * slope(activation, value), exact_slope = s + rest;
      const double u = roundoff<T>.of_type / 2, size = std::abs(value);
      const double lost = 0x1p-126 * std::max(size, size * size * size);
      EXPECT(std::abs(act - exact) <=
             rounding<T>(exact) + u * (std::abs(exact_slope * value) + std::abs(exact)) + lost);
      EXPECT(std::abs(gradient - exact_slope) <= rounding<T>(exact_slope) +
                                                     u * std::abs(exact_slope) +
                                                     2.5e-7 * (s + std::abs(rest)) + lost);
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

TEST(relu) { both<Activation::relu>(); }
TEST(gelu_tanh) { both<Activation::gelu_tanh>(); }
TEST(gelu_erf) { both<Activation::gelu_erf>(); }
TEST(silu) { both<Activation::silu>(); }

// ---- trials ------------------------------------------------------------------------------------

// The hardware's short tanh is off by up to a 2048th of itself.
template <Activation activation>
struct Coarse {
  static float tanh_in_gelu(double z) {
    return static_cast<float>(std::tanh(beta * (z + kappa * z * z * z)) * (1 - 0x1p-11));
  }
  static float value(float z) { return 0.5f * z * (1 + tanh_in_gelu(z)); }
  static float slope(float z) {
    const double t = tanh_in_gelu(z);
    return static_cast<float>(0.5 * (1 + t) +
                              0.5 * z * (1 - t * t) * beta * (1 + 3 * kappa * z * z));
  }
};
template <Activation activation>
struct CutOff {
  static float value(float z) { return z < -2.5f ? 0 : quick::activate<activation>(z); }
  static float slope(float z) { return z < -2.5f ? 0 : quick::gradient<activation>(1, z); }
};
template <Activation activation>
struct Quick {
  static float value(float z) { return quick::activate<activation>(z); }
  static float slope(float z) { return quick::gradient<activation>(1, z); }
};

void add(TrialErrors& errors, double difference, double unit) {
  const double e = difference == 0 ? 0 : std::abs(difference) / unit;
  errors.elements.squares += e * e;
  errors.elements.worst = std::max(errors.elements.worst, e);
  ++errors.elements.count;
}

// Returns whether a trial of a forward, or of a gradient, finds a kernel's function as exact as
// eager.
template <typename T, Activation activation, typename Function>
bool is_taken(unsigned seed, bool forward) {
  constexpr int samples = 4096, inner = 64;
  std::mt19937 random(seed);
  const auto drawn = [&random](double most) -> double {
    return static_cast<float>(
        static_cast<T>(static_cast<float>(std::uniform_real_distribution(-most, most)(random))));
  };
  const auto stored = [](double x) -> double {
    return static_cast<float>(static_cast<T>(static_cast<float>(x)));
  };
  TrialErrors eager, ours;
  for (int i = 0; i < samples; ++i) {
    double sum = 0, magnitude = 0;
    for (int k = 0; k < inner; ++k) {
      const double product = drawn(1) * drawn(3 / std::sqrt(inner));
      sum += product, magnitude += std::abs(product);
    }
    if (forward) {
      const double exact = sum * share(activation, sum);
      const double unit =
          unit_of_value(roundoff<T>, exact, derivative(activation, sum), sum, magnitude);
      const double z = stored(sum);
      add(eager, stored(z * share(activation, z)) - exact, unit);
      add(ours, stored(Function::value(static_cast<float>(sum))) - exact, unit);
    } else {
      const double saved = drawn(3), exact_slope = derivative(activation, saved);
      const double unit = unit_of_gradient(roundoff<T>, exact_slope, sum, magnitude);
      add(eager, stored(stored(sum) * exact_slope) - sum * exact_slope, unit);
      const auto slope = Function::slope(static_cast<float>(saved));
      add(ours, stored(sum * slope) - sum * exact_slope, unit);
    }
  }
  return is_as_exact(ours, eager);
}

template <Activation activation, template <Activation> typename Function>
int times_taken() {
  int taken = 0;
  for (unsigned seed = 0; seed < 25; ++seed) {
    for (const bool forward : {true, false}) {
      taken += is_taken<c10::BFloat16, activation, Function<activation>>(seed, forward);
      taken += is_taken<c10::Half, activation, Function<activation>>(seed, forward);
    }
  }
  return taken;
}

TEST(a_trial_takes_what_is_exact) {
  EXPECT((times_taken<Activation::gelu_tanh, Quick>() == 100));
  EXPECT((times_taken<Activation::gelu_erf, Quick>() == 100));
  EXPECT((times_taken<Activation::silu, Quick>() == 100));
  EXPECT((times_taken<Activation::relu, Quick>() == 100));
}

TEST(a_trial_sees_flat_regions) {
  EXPECT((times_taken<Activation::gelu_tanh, Coarse>() == 0));
  EXPECT((times_taken<Activation::gelu_tanh, CutOff>() == 0));
  EXPECT((times_taken<Activation::gelu_erf, CutOff>() == 0));
}

}  // namespace
