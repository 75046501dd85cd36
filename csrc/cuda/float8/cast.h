#pragma once

// Casts to FP8 with one scale for each tensor (torchao's recipe `tensorwise`), row-major and
// transposed in one sweep over memory: of a tensor, an activation, its gradient, or a gated layer's
// values. This header needs no torch.
//
// A cast is two kernels. The first computes each block's maximum and column sums. The second
// combines these while its loads are under way, and casts. No memory has to be zeroed before, and
// no sum depends on the order of blocks.

#include "core/activation.h"
#include "gemm/problem.h"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fused::cuda::float8 {

// The number of columns must be a multiple of this. If the number of rows is one, too, both layouts
// are written 16 bytes at a time.
inline constexpr int64_t multiple = 16;

// A matrix. Its address and its rows must be aligned to 16 bytes.
struct Values {
  const void* data = nullptr;
  int64_t ld = 0;  // elements; of a bit mask bytes, which need no alignment
};

// The memory that a cast is written to. Several with one scale may be parts of one tensor.
struct Target {
  void* rows = nullptr;  // [rows, cols] of 8 bits, with this row stride
  int64_t ld = 0;
  void* columns = nullptr;         // [cols, rows], contiguous; or nothing
  float* inverse_scale = nullptr;  // a number
  void* sums = nullptr;            // [cols] of the values' type; or nothing
  float* scale = nullptr;          // a number; or nothing
};

// The columns of values that the forward has cast to e4m3 with this scale. The backward computes
// them again while it reads the pre-activations.
struct Hidden {
  const float* scale = nullptr;
  void* columns = nullptr;  // [cols, rows], contiguous; or nothing
};

struct Size {
  gemm::Type type = gemm::Type::bf16;  // not fp64
  int64_t rows = 0, cols = 0;
  int processors = 1;  // the device's multiprocessors
};

// Returns whether the current device converts to FP8, and this build has code for it.
bool have_code();

// Returns the bytes of scratch memory that a cast to this many targets needs.
int64_t scratch_bytes(const Size& size, int targets);

// Casts a tensor to e4m3, or a gradient to e5m2.
void cast(const Size& size, const Values& input, bool gradient, const Target& target, void* scratch,
          cudaStream_t stream);

// Casts act(z) to e4m3, rounded to z's type first.
void cast_activation(const Size& size, Activation activation, const Values& z, const Target& target,
                     void* scratch, cudaStream_t stream);

// Casts act'(z) · grad to e5m2, rounded to z's type first, and act(z) again. With `mask`, z holds
// the bits of relu_mask.cu, from which act(z) cannot be computed.
void cast_activation_backward(const Size& size, Activation activation, const Values& grad,
                              const Values& z, bool mask, const Target& target,
                              const Hidden& hidden, void* scratch, cudaStream_t stream);

// Casts act(gate) · up to e4m3. The factors and the product are rounded to gate's type first.
void cast_gating(const Size& size, Activation activation, const Values& gate, const Values& up,
                 const Target& target, void* scratch, cudaStream_t stream);

// Casts the gradients of gate and up to e5m2, and act(gate) · up again. With `together` both have
// one scale, which is written to both targets' inverse_scale.
void cast_gating_backward(const Size& size, Activation activation, const Values& grad,
                          const Values& gate, const Values& up, const Target& gate_target,
                          const Target& up_target, bool together, const Hidden& hidden,
                          void* scratch, cudaStream_t stream);

}  // namespace fused::cuda::float8
