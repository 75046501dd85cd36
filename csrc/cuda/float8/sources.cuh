#pragma once

// The values that are cast. A source loads eight neighbouring columns of a row and gives their
// values, rounded to the tensor's type as a tensor in between would be. Columns of zeros give
// zeros.

#include "cuda/float8/cast.h"
#include "cuda/kernels/activation_math.cuh"

#include <cstdint>

namespace fused::cuda::float8 {
namespace {  // each file's kernels are its own

constexpr int width = 8;  // columns of a thread

template <typename T>
struct Eight {
  uint4 words[sizeof(T) / 2];
};

template <typename T>
struct Matrix {
  const T* data;
  int64_t ld;

  explicit Matrix(const Values& values) : data(static_cast<const T*>(values.data)), ld(values.ld) {}

  __device__ Eight<T> at(int64_t row, int64_t col) const {
    Eight<T> eight;
    const auto* from = reinterpret_cast<const uint4*>(data + row * ld + col);
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(T) / 2); ++i) eight.words[i] = __ldg(from + i);
    return eight;
  }
};

template <typename T>
__device__ float2 widen_pair(uint32_t pair) {
  if constexpr (std::is_same_v<T, __half>) {
    return __half22float2(*reinterpret_cast<const __half2*>(&pair));
  } else {
    // Loads words, because the compiler would keep each 16-bit half in a register of its own.
    return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000));
  }
}

template <typename T>
__device__ void widen(const Eight<T>& from, float (&to)[width]) {
  if constexpr (sizeof(T) == 4) {
    const float values[] = {__uint_as_float(from.words[0].x), __uint_as_float(from.words[0].y),
                            __uint_as_float(from.words[0].z), __uint_as_float(from.words[0].w),
                            __uint_as_float(from.words[1].x), __uint_as_float(from.words[1].y),
                            __uint_as_float(from.words[1].z), __uint_as_float(from.words[1].w)};
#pragma unroll
    for (int j = 0; j < width; ++j) to[j] = values[j];
  } else {
    const uint32_t pairs[] = {from.words[0].x, from.words[0].y, from.words[0].z, from.words[0].w};
#pragma unroll
    for (int j = 0; j < width / 2; ++j) {
      const float2 wide = widen_pair<T>(pairs[j]);
      to[2 * j] = wide.x;
      to[2 * j + 1] = wide.y;
    }
  }
}

template <typename T>
__device__ void round_to(float (&values)[width]) {
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int j = 0; j < width; j += 2) {
      const auto wide = make_float2(values[j], values[j + 1]);
      kernels::Pair<T> pair;
      if constexpr (std::is_same_v<T, __half>) {
        pair = __float22half2_rn(wide);
      } else {
        pair = __float22bfloat162_rn(wide);
      }
      const float2 rounded = kernels::widen(pair);
      values[j] = rounded.x;
      values[j + 1] = rounded.y;
    }
  }
}

template <typename T>
inline constexpr bool is_quick = sizeof(T) == 2;

template <typename Element>
struct Plain {
  using T = Element;
  static constexpr int results = 1, operands = 1;
  Matrix<T> input;

  using Raw = Eight<T>;
  __device__ Raw load(int64_t row, int64_t col) const { return input.at(row, col); }
  __device__ static void values(const Raw& raw, float (&to)[1][width]) { widen<T>(raw, to[0]); }
};

// act(z), rounded to the tensor's type.
template <typename T, Activation activation>
__device__ void activated(const Eight<T>& z, float (&to)[width]) {
  widen<T>(z, to);
#pragma unroll
  for (int j = 0; j < width; ++j) to[j] = kernels::activate<activation, is_quick<T>>(to[j]);
  if constexpr (activation != Activation::relu) round_to<T>(to);
}

// act(gate) · up
template <typename T, Activation activation>
__device__ void gated(const Eight<T>& gate, const Eight<T>& up, float (&to)[width]) {
  float other[width];
  activated<T, activation>(gate, to);
  widen<T>(up, other);
#pragma unroll
  for (int j = 0; j < width; ++j) to[j] *= other[j];
  round_to<T>(to);
}

template <typename Element, Activation activation>
struct Activated {
  using T = Element;
  static constexpr int results = 1, operands = 1;
  Matrix<T> z;

  using Raw = Eight<T>;
  __device__ Raw load(int64_t row, int64_t col) const { return z.at(row, col); }
  __device__ static void values(const Raw& raw, float (&to)[1][width]) {
    activated<T, activation>(raw, to[0]);
  }
};

template <typename Element, Activation activation>
struct Gradient {
  using T = Element;
  static constexpr int results = 1, operands = 2;
  Matrix<T> grad, z;

  struct Raw {
    Eight<T> grad, z;
  };
  __device__ Raw load(int64_t row, int64_t col) const {
    return {grad.at(row, col), z.at(row, col)};
  }
  __device__ static void values(const Raw& raw, float (&to)[1][width]) {
    float z[width];
    widen<T>(raw.grad, to[0]);
    widen<T>(raw.z, z);
#pragma unroll
    for (int j = 0; j < width; ++j) {
      to[0][j] = kernels::activation_gradient<activation, is_quick<T>, float>(to[0][j], z[j]);
    }
    round_to<T>(to[0]);
  }
  __device__ static void hidden(const Raw& raw, float (&to)[width]) {
    activated<T, activation>(raw.z, to);
  }
};

// ReLU's gradient from the bits of its output.
template <typename Element>
struct Masked {
  using T = Element;
  static constexpr int results = 1, operands = 2;
  Matrix<T> grad;
  Matrix<uint8_t> bits;

  struct Raw {
    Eight<T> grad;
    uint32_t bits;
  };
  __device__ Raw load(int64_t row, int64_t col) const {
    return {grad.at(row, col), __ldg(bits.data + row * bits.ld + col / 8)};
  }
  __device__ static void values(const Raw& raw, float (&to)[1][width]) {
    widen<T>(raw.grad, to[0]);
#pragma unroll
    for (int j = 0; j < width; ++j) to[0][j] = raw.bits >> j & 1 ? to[0][j] : 0.0f;
  }
};

template <typename Element, Activation activation>
struct Gated {
  using T = Element;
  static constexpr int results = 1, operands = 2;
  Matrix<T> gate, up;

  struct Raw {
    Eight<T> gate, up;
  };
  __device__ Raw load(int64_t row, int64_t col) const {
    return {gate.at(row, col), up.at(row, col)};
  }
  __device__ static void values(const Raw& raw, float (&to)[1][width]) {
    gated<T, activation>(raw.gate, raw.up, to[0]);
  }
};

// The gradients of gate and up, in this order.
template <typename Element, Activation activation>
struct GatedGradient {
  using T = Element;
  static constexpr int results = 2, operands = 3;
  Matrix<T> grad, gate, up;

  struct Raw {
    Eight<T> grad, gate, up;
  };
  __device__ Raw load(int64_t row, int64_t col) const {
    return {grad.at(row, col), gate.at(row, col), up.at(row, col)};
  }
  __device__ static void values(const Raw& raw, float (&to)[2][width]) {
    float grad[width], gate[width];
    widen<T>(raw.grad, grad);
    widen<T>(raw.gate, gate);
    widen<T>(raw.up, to[0]);
#pragma unroll
    for (int j = 0; j < width; ++j) {
      to[0][j] *= grad[j];
      to[1][j] = kernels::activate<activation, is_quick<T>>(gate[j]);
    }
    round_to<T>(to[0]);
    round_to<T>(to[1]);
#pragma unroll
    for (int j = 0; j < width; ++j) {
      to[0][j] = kernels::activation_gradient<activation, is_quick<T>, float>(to[0][j], gate[j]);
      to[1][j] *= grad[j];
    }
    round_to<T>(to[0]);
    round_to<T>(to[1]);
  }
  __device__ static void hidden(const Raw& raw, float (&to)[width]) {
    gated<T, activation>(raw.gate, raw.up, to);
  }
};

}  // namespace
}  // namespace fused::cuda::float8
