#pragma once

// By itself as the kernels include no tensors.

namespace fused {

// What follows the matrix product. gelu_tanh is the approximation that cuBLASLt computes, gelu_erf
// the exact form; one is never put in the place of the other. relu2 is the square of ReLU.
enum class Activation { none, relu, gelu_tanh, gelu_erf, silu, relu2 };

}  // namespace fused
