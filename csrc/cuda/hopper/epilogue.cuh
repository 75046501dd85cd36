#pragma once

// The activations as CUTLASS's epilogues call them: on what a thread holds of a tile, in fp32.
// While one half of a block multiplies, the other does this; it must not take longer.

#include "cuda/kernels/quick_math.cuh"

#include <cutlass/array.h>
#include <cutlass/cutlass.h>

namespace fused::cuda::hopper {

template <Activation activation>
struct Activate {
  CUTLASS_DEVICE static float of(float z) { return quick::activate<activation>(z); }
};

// saved is the output for ReLU, else the pre-activation.
template <Activation activation>
struct Derivative {
  CUTLASS_DEVICE static float of(float grad, float saved) {
    return quick::gradient<activation>(grad, saved);
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
