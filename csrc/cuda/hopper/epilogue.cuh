#pragma once

// The activations as CUTLASS's epilogues call them: on what a thread holds of a tile, in fp32.
// While one half of a block multiplies, the other does this; it must not take longer.

#include "core/activation.h"

#include <cutlass/array.h>
#include <cutlass/bfloat16.h>
#include <cutlass/cutlass.h>

namespace fused::cuda::hopper {

__device__ inline float exp2_of(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The hardware's tanh has 11 bits: enough for bf16, which has 8, and too few for fp16, which
// has 11.
template <typename Element>
__device__ inline float tanh_of(float x) {
  if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
  } else {
    constexpr float two_log2e = 2.885390081777927f;
    return fmaf(-2.0f, reciprocal(1.0f + exp2_of(two_log2e * x)), 1.0f);
  }
}

// The normal distribution at z; Abramowitz and Stegun, 7.1.26, with its halves folded in.
struct Normal {
  float density, below;
  __device__ explicit Normal(float z) {
    constexpr float half_log2e = 0.7213475204444817f, density_at_0 = 0.3989422804014327f;
    const float e = exp2_of(-half_log2e * z * z);
    const float t = reciprocal(fmaf(fabsf(z), 0.23164189f, 1.0f));
    const float tail =
        e * t *
        fmaf(t,
             fmaf(t, fmaf(t, fmaf(t, 0.5307027145f, -0.7265760135f), 0.7107068705f), -0.142248368f),
             0.127414796f);
    density = density_at_0 * e;
    below = z > 0.0f ? 1.0f - tail : tail;
  }
};

__device__ inline float sigmoid_of(float x) {
  constexpr float log2e = 1.4426950408889634f;
  return reciprocal(1.0f + exp2_of(-log2e * x));
}

inline constexpr float gelu_beta = 0.7978845608028654f, gelu_kappa = 0.044715f;

template <Activation activation, typename Element>
__device__ inline float activate(float z) {
  if constexpr (activation == Activation::relu) {
    return z < 0.0f ? 0.0f : z;  // NaN stays
  } else if constexpr (activation == Activation::gelu_tanh) {
    const float inner = z * fmaf(z * z, gelu_beta * gelu_kappa, gelu_beta), half = 0.5f * z;
    return fmaf(half, tanh_of<Element>(inner), half);
  } else if constexpr (activation == Activation::gelu_erf) {
    return z * Normal(z).below;
  } else {
    static_assert(activation == Activation::silu);
    return z * sigmoid_of(z);
  }
}

// saved is the output for ReLU, else the pre-activation.
template <Activation activation, typename Element>
__device__ inline float derivative(float grad, float saved) {
  if constexpr (activation == Activation::relu) {
    return saved <= 0.0f ? 0.0f : grad;  // torch's rule: 0 at 0, and NaN lets the gradient pass
  } else if constexpr (activation == Activation::gelu_tanh) {
    const float square = saved * saved;
    const float t = tanh_of<Element>(saved * fmaf(square, gelu_beta * gelu_kappa, gelu_beta));
    const float slope = fmaf(square, 3.0f * gelu_beta * gelu_kappa, gelu_beta);
    return grad * fmaf(0.5f * saved * fmaf(-t, t, 1.0f), slope, fmaf(0.5f, t, 0.5f));
  } else if constexpr (activation == Activation::gelu_erf) {
    const Normal normal(saved);
    return grad * fmaf(saved, normal.density, normal.below);
  } else {
    static_assert(activation == Activation::silu);
    const float s = sigmoid_of(saved);
    return grad * s * fmaf(saved, 1.0f - s, 1.0f);
  }
}

template <Activation activation, typename Element>
struct Activate {
  CUTLASS_DEVICE static float of(float z) { return activate<activation, Element>(z); }
};

template <Activation activation, typename Element>
struct Derivative {
  CUTLASS_DEVICE static float of(float grad, float saved) {
    return derivative<activation, Element>(grad, saved);
  }
};

// Function::of, of one element of each operand, for Sm90Compute, which takes a template of one
// parameter, the array.
template <typename Function>
struct Each {
  template <typename T>
  struct Of {};  // of one element: asked for its arguments, of which there are none
  template <int n>
  struct Of<cutlass::Array<float, n>> {
    using Values = cutlass::Array<float, n>;
    template <typename... Operands>
    CUTLASS_DEVICE Values operator()(const Operands&... operands) const {
      Values result;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < n; ++i) result[i] = Function::of(operands[i]...);
      return result;
    }
  };
};

}  // namespace fused::cuda::hopper
