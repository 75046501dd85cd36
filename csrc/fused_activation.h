#pragma once

// A header of its own, because the kernels include no tensors.

#include <cstdint>

namespace fused {

// The function applied after the matrix product. gelu_tanh is the approximation that cuBLASLt
// computes, gelu_erf the exact form; neither stands in for the other. relu2 is the square of ReLU.
// Private operators and the nodes of compiled graphs know them by these numbers. One byte keeps a
// layer's node below 1032 bytes, up to which glibc allocates fast.
enum class Activation : uint8_t { none, relu, gelu_tanh, gelu_erf, silu, relu2 };

}  // namespace fused
