// act'(saved) · grad and its column sums in one pass over memory. Eager needs three passes for the
// same; cuBLASLt's own fused backward is slower still on Hopper.

#include "activation_kernels.h"
#include "activation_math.cuh"

#include <algorithm>

namespace fused {
namespace {

constexpr int rows_in_flight = 4;  // independent loads per thread before the first is used

// A thread owns `width` neighbouring columns and walks down a chunk of the rows; a block covers
// blockDim.x threads of columns and reads blockDim.y rows at a time; blockIdx.y is the chunk.
template <typename T, Activation activation, bool mask, int width>
__global__ void __launch_bounds__(block_threads)
    backward_kernel(ActivationBackward args, int64_t rows_per_chunk, Accumulator<T>* partials) {
  using A = Accumulator<T>;
  using V = Vector<T, width>;
  constexpr bool quick = sizeof(T) == 2;
  constexpr bool reads_vector = activation != Activation::none && !mask;

  const int64_t col = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * width;
  const bool inside = col < args.cols;
  const int64_t first = blockIdx.y * rows_per_chunk;
  const int64_t last = min(first + rows_per_chunk, args.rows);
  const auto* grad = static_cast<const T*>(args.grad) + col;
  const auto* saved = static_cast<const T*>(args.saved) + col;
  const auto* bits = static_cast<const uint8_t*>(args.saved) + col / 8;
  const int shift = col % 8;
  auto* dz = static_cast<T*>(args.dz) + col;

  A sums[width] = {};
  if (inside) {
    for (int64_t row = first + threadIdx.y; row < last; row += rows_in_flight * blockDim.y) {
      V g[rows_in_flight];
      V s[rows_in_flight];
      uint32_t m[rows_in_flight];
#pragma unroll
      for (int i = 0; i < rows_in_flight; ++i) {
        const int64_t r = row + i * blockDim.y;
        if (r >= last) break;
        g[i] = *reinterpret_cast<const V*>(grad + r * args.ld_grad);
        if constexpr (reads_vector) {
          s[i] = *reinterpret_cast<const V*>(saved + r * args.ld_saved);
        }
        if constexpr (mask) m[i] = bits[r * args.ld_saved] >> shift;
      }
#pragma unroll
      for (int i = 0; i < rows_in_flight; ++i) {
        const int64_t r = row + i * blockDim.y;
        if (r >= last) break;
        V out;
#pragma unroll
        for (int j = 0; j < width; ++j) {
          A gradient = widen(g[i].values[j]);
          if constexpr (mask) {
            gradient = m[i] >> j & 1 ? gradient : A(0);
          } else if constexpr (reads_vector) {
            gradient =
                activation_gradient<activation, quick, A>(gradient, widen(s[i].values[j]));
          }
          sums[j] += gradient;
          out.values[j] = narrow<T>(gradient);
        }
        if (args.dz != nullptr) *reinterpret_cast<V*>(dz + r * args.cols) = out;
      }
    }
  }

  if (args.grad_bias == nullptr) return;
  __shared__ A shared[block_threads * width];
#pragma unroll
  for (int j = 0; j < width; ++j) {
    shared[(threadIdx.y * width + j) * blockDim.x + threadIdx.x] = sums[j];
  }
  __syncthreads();
  const int across = blockDim.x * width;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  for (int c = thread; c < across; c += block_threads) {
    A sum = 0;
    for (int y = 0; y < static_cast<int>(blockDim.y); ++y) sum += shared[y * across + c];
    // c runs over (element of the vector, thread), the order in which `shared` was written.
    const int64_t target = (int64_t{blockIdx.x} * blockDim.x + c % blockDim.x) * width +
                           c / blockDim.x;
    if (target >= args.cols) continue;
    if (partials != nullptr) {
      partials[blockIdx.y * args.cols + target] = sum;
    } else {
      static_cast<T*>(args.grad_bias)[target] = narrow<T>(sum);
    }
  }
}

// grad_bias = the sum of the chunks' partial sums, in their order.
template <typename T>
__global__ void __launch_bounds__(block_threads)
    sum_partials_kernel(const Accumulator<T>* partials, int chunks, int64_t cols, T* grad_bias) {
  using A = Accumulator<T>;
  __shared__ A shared[8][32];
  const int64_t col = int64_t{blockIdx.x} * 32 + threadIdx.x;
  A sum = 0;
  if (col < cols) {
    for (int chunk = threadIdx.y; chunk < chunks; chunk += 8) sum += partials[chunk * cols + col];
  }
  shared[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || col >= cols) return;
  for (int y = 1; y < 8; ++y) sum += shared[y][threadIdx.x];
  grad_bias[col] = narrow<T>(sum);
}

struct Launch {
  bool vectors;
  dim3 block;
  dim3 grid;
  int64_t rows_per_chunk;
};

// One wave of blocks: every block that fits on the card at once gets an equal share of the rows.
Launch shape_of(const ActivationBackward& args) {
  const int64_t full = 16 / gemm::size_of(args.type);
  Launch launch;
  launch.vectors = args.cols % full == 0 && args.ld_grad % full == 0 && aligned16(args.grad) &&
                   (args.mask || args.ld_saved % full == 0) &&
                   (args.mask || aligned16(args.saved)) && aligned16(args.dz);
  const int64_t per_row = launch.vectors ? args.cols / full : args.cols;
  launch.block = block_shape(per_row);
  const int64_t across = (per_row + launch.block.x - 1) / launch.block.x;

  int device = 0, processors = 0;
  C10_CUDA_CHECK(cudaGetDevice(&device));
  C10_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  constexpr int blocks_per_processor = 4;
  const int64_t room = std::max<int64_t>(1, processors * blocks_per_processor / across);
  const int64_t useful = (args.rows + launch.block.y - 1) / launch.block.y;
  const int64_t chunks = std::clamp<int64_t>(std::min(room, useful), 1, 65535);
  // Whole passes of the block, so that no chunk ends in a ragged one but the last.
  const int64_t passes = (args.rows + chunks * launch.block.y - 1) / (chunks * launch.block.y);
  launch.rows_per_chunk = std::max<int64_t>(passes, 1) * launch.block.y;
  launch.grid = dim3(across, (args.rows + launch.rows_per_chunk - 1) / launch.rows_per_chunk);
  return launch;
}

template <typename T, Activation activation, bool mask = false>
auto* kernel_for(bool vectors) {
  return vectors ? backward_kernel<T, activation, mask, full_vector<T>>
                 : backward_kernel<T, activation, mask, 1>;
}

}  // namespace

int64_t scratch_bytes(const ActivationBackward& args) {
  const auto chunks = shape_of(args).grid.y;
  if (args.grad_bias == nullptr || chunks == 1) return 0;
  return chunks * args.cols * (args.type == gemm::Type::f64 ? 8 : 4);
}

void activation_backward(const ActivationBackward& args, void* scratch, cudaStream_t stream) {
  const auto shape = shape_of(args);
  with_type(args.type, [&](auto element) {
    using T = decltype(element);
    auto* partials = static_cast<Accumulator<T>*>(scratch);
    const auto launch = [&](auto* kernel) {
      kernel<<<shape.grid, shape.block, 0, stream>>>(args, shape.rows_per_chunk, partials);
      C10_CUDA_KERNEL_LAUNCH_CHECK();
    };
    switch (args.activation) {
      case Activation::none:
        launch(kernel_for<T, Activation::none>(shape.vectors));
        break;
      case Activation::relu:
        launch(args.mask ? kernel_for<T, Activation::relu, true>(shape.vectors)
                         : kernel_for<T, Activation::relu>(shape.vectors));
        break;
      case Activation::gelu_tanh:
        launch(kernel_for<T, Activation::gelu_tanh>(shape.vectors));
        break;
      case Activation::gelu_erf:
        launch(kernel_for<T, Activation::gelu_erf>(shape.vectors));
        break;
    }
    if (partials == nullptr) return;
    const dim3 grid((args.cols + 31) / 32);
    sum_partials_kernel<T><<<grid, dim3(32, 8), 0, stream>>>(
        partials, shape.grid.y, args.cols, static_cast<T*>(args.grad_bias));
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

}  // namespace fused
