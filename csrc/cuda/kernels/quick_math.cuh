#pragma once

// The activations and their derivatives for results that are rounded to 16 bits, where the
// hardware's exponential and reciprocal (relative error about 1e-6) do as well as exact functions.

#include "core/activation.h"
#include "cuda/kernels/instructions.cuh"

#include <type_traits>

namespace fused::cuda::quick {

inline constexpr float log2e = 1.4426950408889634f;
inline constexpr float gelu_beta = 0.7978845608028654f, gelu_kappa = 0.044715f;

// 1 / (1 + 2^-x)
__device__ inline float sigmoid2(float x) { return reciprocal(1.0f + exp2_of(-x)); }

// GELU by tanh is z times this: (1 + tanh u) / 2 = 1 / (1 + exp(-2 u)).
__device__ inline float gelu_gate(float z) {
  constexpr float scale = 2.0f * log2e * gelu_beta;
  return sigmoid2(z * fmaf(z * z, scale * gelu_kappa, scale));
}

// Returns the normal distribution at z by Abramowitz and Stegun, 7.1.26: erfc as a polynomial times
// the exponential of the density. The absolute error is 2.7e-7 in fp32.
struct Normal {
  float density, below;
  __device__ explicit Normal(float z) {
    constexpr float density_at_0 = 0.3989422804014327f;
    const float e = exp2_of(-0.5f * log2e * z * z);
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

// Is true for activations whose exact forms differ from these.
template <Activation activation>
inline constexpr bool is_smooth =
    activation == Activation::gelu_tanh || activation == Activation::gelu_erf ||
    activation == Activation::silu;

template <Activation activation, typename A>
__device__ inline A activate(A z) {
  if constexpr (activation == Activation::relu) {
    return z < A(0) ? A(0) : z;  // NaN stays
  } else if constexpr (activation == Activation::gelu_tanh) {
    return z * gelu_gate(z);
  } else if constexpr (activation == Activation::gelu_erf) {
    return z * Normal(z).below;
  } else if constexpr (activation == Activation::silu) {
    return z * sigmoid2(log2e * z);
  } else if constexpr (activation == Activation::relu2) {
    return z < A(0) ? A(0) : z * z;
  } else {
    static_assert(activation == Activation::none);
    return z;
  }
}

// Returns dL/dz for dL/dy. `saved` is ReLU's output, or the pre-activation of the others.
template <Activation activation, typename A>
__device__ inline A gradient(std::type_identity_t<A> grad, A saved) {
  if constexpr (activation == Activation::relu) {
    return saved <= A(0) ? A(0) : grad;  // torch's rule: 0 at 0, and NaN lets the gradient pass
  } else if constexpr (activation == Activation::gelu_tanh) {
    // Far from 0 the other factors are infinite and the first is 0.
    const float gate = gelu_gate(saved);
    const float slope = fmaf(saved * saved, 6.0f * gelu_beta * gelu_kappa, 2.0f * gelu_beta);
    return grad * fmaf(fmaf(-gate, gate, gate) * saved, slope, gate);
  } else if constexpr (activation == Activation::gelu_erf) {
    const Normal normal(saved);
    return grad * fmaf(saved, normal.density, normal.below);
  } else if constexpr (activation == Activation::silu) {
    const float gate = sigmoid2(log2e * saved);
    return grad * gate * fmaf(saved, 1.0f - gate, 1.0f);
  } else if constexpr (activation == Activation::relu2) {
    return saved <= A(0) ? A(0) : grad * (A(2) * saved);
  } else {
    static_assert(activation == Activation::none);
    return grad;
  }
}

}  // namespace fused::cuda::quick
