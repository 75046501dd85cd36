// Computes y = act(z) for activations that no epilogue computes as exactly and as fast.

#include "cuda/kernels/activation.h"
#include "cuda/kernels/launch.cuh"

namespace fused::cuda::kernels {
namespace {

template <typename T, Activation activation, int width>
__global__ void __launch_bounds__(block_threads)
    forward_kernel(int64_t rows, int64_t cols, const T* z, int64_t ld_z, T* y, int64_t ld_y) {
  constexpr bool quick = sizeof(T) == 2;
  const int64_t col = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * width;
  if (col >= cols) return;
  const int64_t step = int64_t{gridDim.y} * blockDim.y;
  for (int64_t row = int64_t{blockIdx.y} * blockDim.y + threadIdx.y; row < rows; row += step) {
    Accumulator<T> values[width];
    widen(*reinterpret_cast<const Vector<T, width>*>(z + row * ld_z + col), values);
#pragma unroll
    for (auto& value : values) value = activate<activation, quick>(value);
    *reinterpret_cast<Vector<T, width>*>(y + row * ld_y + col) = narrow<T, width>(values);
  }
}

}  // namespace

bool have_code() { return compiled_arch(forward_kernel<float, Activation::relu, 1>) != 0; }

void activation_forward(Activation activation, gemm::Type type, int64_t rows, int64_t cols,
                        const void* z, int64_t ld_z, void* y, int64_t ld_y, cudaStream_t stream) {
  with_type(type, [&](auto element) {
    using T = decltype(element);
    constexpr int full = full_vector<T>;
    const bool vectors = cols % full == 0 && ld_z % full == 0 && ld_y % full == 0 &&
                         gemm::is_aligned(z) && gemm::is_aligned(y);
    with_activation(activation, [&](auto constant) {
      constexpr Activation act = decltype(constant)::value;
      if constexpr (act != Activation::none) {
        launch_rows(vectors ? forward_kernel<T, act, full> : forward_kernel<T, act, 1>, rows,
                    vectors ? cols / full : cols, 1, stream, rows, cols, static_cast<const T*>(z),
                    ld_z, static_cast<T*>(y), ld_y);
      }
    });
  });
}

}  // namespace fused::cuda::kernels
