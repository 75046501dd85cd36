#pragma once

#include "core/activation.h"
#include "cuda/kernels/check.h"
#include "cuda/kernels/quick_math.cuh"
#include "gemm/problem.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace fused::cuda::kernels {

template <typename T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T, int n>
struct alignas(sizeof(T) * n) Vector {
  T values[n];
};

__device__ inline float widen(__half x) { return __half2float(x); }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float2 widen(__half2 x) { return __half22float2(x); }
__device__ inline float2 widen(__nv_bfloat162 x) { return __bfloat1622float2(x); }
__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }

template <typename T>
__device__ inline T narrow(Accumulator<T> x) {
  if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(x);
  } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    return __float2bfloat16_rn(x);
  } else {
    return x;
  }
}

template <typename T>
using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;

// Types of 16 bits are converted in pairs, with one instruction for each pair. Vectors are passed
// by value, because the compiler loads a vector behind a reference in pieces.
template <typename T, int n>
__device__ inline void widen(Vector<T, n> from, Accumulator<T> (&to)[n]) {
  if constexpr (sizeof(T) == 2 && n % 2 == 0) {
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      const float2 wide = widen(Pair<T>(from.values[2 * i], from.values[2 * i + 1]));
      to[2 * i] = wide.x;
      to[2 * i + 1] = wide.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) to[i] = widen(from.values[i]);
  }
}

template <typename T, int n>
__device__ inline Vector<T, n> narrow(const Accumulator<T> (&from)[n]) {
  Vector<T, n> to;
  if constexpr (sizeof(T) == 2 && n % 2 == 0) {
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      const auto wide = make_float2(from[2 * i], from[2 * i + 1]);
      Pair<T> pair;
      if constexpr (std::is_same_v<T, __half>) {
        pair = __float22half2_rn(wide);
      } else {
        pair = __float22bfloat162_rn(wide);
      }
      to.values[2 * i] = pair.x;
      to.values[2 * i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i) to.values[i] = narrow<T>(from[i]);
  }
  return to;
}

// Memory is fastest with 16 bytes for each thread.
template <typename T>
inline constexpr int full_vector = 16 / static_cast<int>(sizeof(T));

// `quick` says that the result is rounded to 16 bits afterwards. ReLU and its square are exact in
// both forms.
template <Activation activation, bool quick, typename A>
__device__ inline A activate(A z) {
  if constexpr (quick || !quick::is_smooth<activation>) {
    return quick::activate<activation>(z);
  } else if constexpr (activation == Activation::gelu_tanh) {
    const A inner = A(0.7978845608028654) * (z + A(0.044715) * z * z * z);
    return A(0.5) * z * (A(1) + tanh(inner));
  } else if constexpr (activation == Activation::gelu_erf) {
    return z * A(0.5) * (A(1) + erf(z * A(0.7071067811865476)));
  } else {
    static_assert(activation == Activation::silu);
    return z / (A(1) + exp(-z));  // rounded once, as torch's
  }
}

// Returns dL/dz for dL/dy. `saved` is ReLU's output, or the pre-activation of the others.
template <Activation activation, bool quick, typename A>
__device__ inline A activation_gradient(A grad, A saved) {
  if constexpr (quick || !quick::is_smooth<activation>) {
    return quick::gradient<activation>(grad, saved);
  } else if constexpr (activation == Activation::gelu_tanh) {
    constexpr A beta = 0.7978845608028654, kappa = 0.044715;
    const A square = saved * saved;
    const A t = tanh(beta * (saved + kappa * square * saved));
    const A slope = beta * (A(1) + A(3) * kappa * square);
    return grad * (A(0.5) * (A(1) + t) + A(0.5) * saved * (A(1) - t * t) * slope);
  } else if constexpr (activation == Activation::gelu_erf) {
    constexpr A density_at_0 = 0.3989422804014327;
    const A density = density_at_0 * exp(A(-0.5) * saved * saved);
    const A below = A(0.5) * (A(1) + erf(saved * A(0.7071067811865476)));
    return grad * (below + saved * density);
  } else {
    static_assert(activation == Activation::silu);
    const A s = A(1) / (A(1) + exp(-saved));
    return grad * s * (A(1) + saved * (A(1) - s));
  }
}

// Blocks have 256 threads, and are as wide as the rows allow, but at least a warp wide.
constexpr int block_threads = 256;

inline dim3 block_shape(int64_t vectors_per_row) {
  int width = 1;
  while (width < 32 && width < vectors_per_row) width *= 2;
  return dim3(width, block_threads / width);
}

constexpr int64_t most_blocks_down = 65535;

// A block computes some rows, then moves on by the number of rows that all blocks compute at once.
inline dim3 grid_shape(int64_t rows, int64_t vectors_per_row, dim3 block, int rows_at_once) {
  const int64_t down = int64_t{block.y} * rows_at_once;
  return dim3((vectors_per_row + block.x - 1) / block.x,
              std::min((rows + down - 1) / down, most_blocks_down));
}

// Calls fn(row, n) for rows `stride` apart, with n = `at_once` and at the end 1, so that many loads
// are under way before the first value is used.
template <int at_once, typename Fn>
__device__ void walk_down(int64_t row, int64_t rows, int64_t stride, const Fn& fn) {
  for (; row + (at_once - 1) * stride < rows; row += at_once * stride) {
    fn(row, std::integral_constant<int, at_once>());
  }
  for (; row < rows; row += stride) fn(row, std::integral_constant<int, 1>());
}

template <typename Fn>
void with_type(gemm::Type type, const Fn& fn) {
  switch (type) {
    case gemm::Type::f64:
      return fn(double{});
    case gemm::Type::f32:
      return fn(float{});
    case gemm::Type::f16:
      return fn(__half{});
    case gemm::Type::bf16:
      return fn(__nv_bfloat16{});
  }
}

}  // namespace fused::cuda::kernels
