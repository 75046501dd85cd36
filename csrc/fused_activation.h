#pragma once

// By itself as the kernels include no tensors.

#include <cstdint>

namespace fused {

// What follows the matrix product. gelu_tanh is the approximation that cuBLASLt computes, gelu_erf
// the exact form; one is never put in the place of the other. relu2 is the square of ReLU.
// Private operators and the nodes of compiled graphs know them by these numbers.
// A byte, as a layer's node would else pass glibc's limit for quick memory, 1032 bytes.
enum class Activation : uint8_t { none, relu, gelu_tanh, gelu_erf, silu, relu2 };

}  // namespace fused
