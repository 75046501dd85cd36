#pragma once

// Casts to FP8 with one scale a tensor (torchao's recipe `tensorwise`), row-major and transposed in
// one pass: of a tensor, of an activation, of its gradient, of a gated layer's. No torch.
//
// A cast is two kernels. The first takes the maximum and the bias's sums, a block at a time; the
// second adds those up while its loads are under way, and casts. Nothing has to be zeroed before,
// and no sum depends on an order of blocks.

#include "core/activation.h"
#include "gemm/problem.h"

#include <cuda_runtime_api.h>

#include <cstdint>

namespace fused::cuda::float8 {

// Columns must be a multiple of this; rows had better be, for 16 bytes at a time in both layouts.
inline constexpr int64_t multiple = 16;

// Aligned to 16 bytes, as must be its rows.
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

// The columns of what the forward has cast to e4m3 with this scale, made again in the pass over
// what it was made of.
struct Hidden {
  const float* scale = nullptr;
  void* columns = nullptr;  // [cols, rows], contiguous; or nothing
};

struct Size {
  gemm::Type type = gemm::Type::bf16;  // fp64 is none of them
  int64_t rows = 0, cols = 0;
  int processors = 1;  // of the device: how many blocks to make
};

// Tells whether the current device converts to FP8, and has been compiled for.
bool have_code();

// Bytes of scratch that a cast to so many targets needs.
int64_t scratch_bytes(const Size& size, int targets);

// input to e4m3, or as a gradient to e5m2.
void cast(const Size& size, const Values& input, bool gradient, const Target& target, void* scratch,
          cudaStream_t stream);

// act(z) to e4m3, rounded to z's type before.
void cast_activation(const Size& size, Activation activation, const Values& z, const Target& target,
                     void* scratch, cudaStream_t stream);

// act'(z) · grad to e5m2, rounded to z's type before, and act(z) again; `mask`: z is the bits of
// relu_mask.cu, which do not give act(z).
void cast_activation_backward(const Size& size, Activation activation, const Values& grad,
                              const Values& z, bool mask, const Target& target,
                              const Hidden& hidden, void* scratch, cudaStream_t stream);

// act(gate) · up to e4m3, each factor and the product rounded to z's type before.
void cast_gating(const Size& size, Activation activation, const Values& gate, const Values& up,
                 const Target& target, void* scratch, cudaStream_t stream);

// The gradients of gate and up to e5m2, and act(gate) · up again; `together`: with one scale for
// both, which stands at both targets' inverse_scale.
void cast_gating_backward(const Size& size, Activation activation, const Values& grad,
                          const Values& gate, const Values& up, const Target& gate_target,
                          const Target& up_target, bool together, const Hidden& hidden,
                          void* scratch, cudaStream_t stream);

}  // namespace fused::cuda::float8
