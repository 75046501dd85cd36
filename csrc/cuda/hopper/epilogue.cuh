#pragma once

// The activations as CUTLASS's epilogues call them: on what a thread holds of a tile, in fp32.
// While one half of a block multiplies, the other does this; it must not take longer.

#include "cuda/kernels/quick_math.cuh"

#include <cutlass/array.h>
#include <cutlass/bfloat16.h>
#include <cutlass/cutlass.h>

namespace fused::cuda::hopper {

// The hardware's tanh has 11 bits: enough for bf16, which has 8, and too few for fp16, which
// has 11.
template <Activation activation, typename Element>
inline constexpr bool short_tanh_does =
    activation == Activation::gelu_tanh && std::is_same_v<Element, cutlass::bfloat16_t>;

__device__ inline float tanh_in_gelu(float z) {
  using quick::gelu_beta, quick::gelu_kappa;
  return short_tanh(z * fmaf(z * z, gelu_beta * gelu_kappa, gelu_beta));
}

template <Activation activation, typename Element>
__device__ inline float activate(float z) {
  if constexpr (short_tanh_does<activation, Element>) {
    const float half = 0.5f * z;
    return fmaf(half, tanh_in_gelu(z), half);
  } else {
    return quick::activate<activation>(z);
  }
}

// saved is the output for ReLU, else the pre-activation.
template <Activation activation, typename Element>
__device__ inline float derivative(float grad, float saved) {
  if constexpr (short_tanh_does<activation, Element>) {
    using quick::gelu_beta, quick::gelu_kappa;
    const float t = tanh_in_gelu(saved);
    const float slope = fmaf(saved * saved, 3.0f * gelu_beta * gelu_kappa, gelu_beta);
    return grad * fmaf(0.5f * saved * fmaf(-t, t, 1.0f), slope, fmaf(0.5f, t, 0.5f));
  } else {
    return quick::gradient<activation>(grad, saved);
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
