// act'(saved) · grad and its column sums in one pass over memory. Eager needs three passes for the
// same; cuBLASLt's own fused backward is slower still on Hopper.

#include "cuda/kernels/activation.h"
#include "cuda/kernels/activation_math.cuh"
#include "cuda/kernels/reduce.cuh"

#include <algorithm>

namespace fused::cuda::kernels {
namespace {

// Independent loads per thread before the first is used, and blocks that share a multiprocessor:
// found by trying, on an H200.
constexpr int rows_in_flight = 4;
constexpr int blocks_per_processor = 3;

// A thread owns `width` neighbouring columns and walks down a chunk of the rows; a block covers
// blockDim.x threads of columns and reads blockDim.y rows at a time; blockIdx.y is the chunk.
// The chunks' sums are added up within a cluster, or left in `partials`.
template <typename T, Activation activation, bool mask, int width>
__global__ void __launch_bounds__(block_threads, blocks_per_processor)
    backward_kernel(ActivationBackward args, int64_t rows_per_chunk, Accumulator<T>* partials) {
  using A = Accumulator<T>;
  using V = Vector<T, width>;
  constexpr bool quick = sizeof(T) == 2;
  constexpr bool reads_vector = activation != Activation::none && !mask;

  const int64_t col = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * width;
  A sums[width] = {};
  wait_for_previous_kernel();  // and lets sum_partials be launched
  if (col < args.cols) {
    const int64_t first = blockIdx.y * rows_per_chunk;
    const int64_t last = min(first + rows_per_chunk, args.rows);
    const auto* grad = static_cast<const T*>(args.grad) + col;
    const auto* saved = static_cast<const T*>(args.saved) + col;
    const auto* bits = static_cast<const uint8_t*>(args.saved) + col / 8;
    const int shift = col % 8;
    auto* dz = args.dz == nullptr ? nullptr : static_cast<T*>(args.dz) + col;

    const auto rows = [&](int64_t row, auto rows_at_once) {
      constexpr int count = decltype(rows_at_once)::value;
      V g[count];
      [[maybe_unused]] V s[count];
      [[maybe_unused]] uint32_t m[count];
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const int64_t r = row + i * blockDim.y;
        g[i] = *reinterpret_cast<const V*>(grad + r * args.ld_grad);
        if constexpr (reads_vector) {
          s[i] = *reinterpret_cast<const V*>(saved + r * args.ld_saved);
        }
        if constexpr (mask) m[i] = bits[r * args.ld_saved] >> shift;
      }
#pragma unroll
      for (int i = 0; i < count; ++i) {
        A gradient[width];
        [[maybe_unused]] A at[width];
        widen(g[i], gradient);
        if constexpr (reads_vector) widen(s[i], at);
#pragma unroll
        for (int j = 0; j < width; ++j) {
          if constexpr (mask) {
            gradient[j] = m[i] >> j & 1 ? gradient[j] : A(0);
          } else if constexpr (reads_vector) {
            gradient[j] = activation_gradient<activation, quick, A>(gradient[j], at[j]);
          }
          sums[j] += gradient[j];
        }
        if (dz != nullptr) {
          *reinterpret_cast<V*>(dz + (row + i * blockDim.y) * args.cols) =
              narrow<T, width>(gradient);
        }
      }
    };
    int64_t row = first + threadIdx.y;
    const int64_t step = int64_t{rows_in_flight} * blockDim.y;
    for (; row + step - blockDim.y < last; row += step) {
      rows(row, std::integral_constant<int, rows_in_flight>());
    }
    for (; row < last; row += blockDim.y) rows(row, std::integral_constant<int, 1>());
  }

  if (args.grad_bias == nullptr) return;
  __shared__ A shared[block_threads * width];
  sum_over_y(sums, shared);
  const bool chunks_join = partials == nullptr && gridDim.y > 1;
  if (chunks_join) sum_over_cluster(sums, shared, col < args.cols);
  if (threadIdx.y != 0 || col >= args.cols || (chunks_join && blockIdx.y > 0)) return;
#pragma unroll
  for (int j = 0; j < width; ++j) {
    if (partials != nullptr) {
      partials[blockIdx.y * args.cols + col + j] = sums[j];
    } else {
      static_cast<T*>(args.grad_bias)[col + j] = narrow<T>(sums[j]);
    }
  }
}

struct Launch {
  bool vectors;
  dim3 block;
  dim3 grid;
  int64_t rows_per_chunk;
  bool cluster;  // of a column's chunks, which need no second kernel then
};

// Blocks with an equal share of the rows each, in one wave, or in two where each has many: other
// blocks of the second make up for a slow one of the first.
Launch shape_of(const ActivationBackward& args) {
  const int64_t full = 16 / gemm::size_of(args.type);
  Launch launch;
  launch.vectors = args.cols % full == 0 && args.ld_grad % full == 0 && aligned16(args.grad) &&
                   (args.mask || (args.ld_saved % full == 0 && aligned16(args.saved))) &&
                   aligned16(args.dz);
  const int64_t per_row = launch.vectors ? args.cols / full : args.cols;
  launch.block = block_shape(per_row);
  const int64_t across = (per_row + launch.block.x - 1) / launch.block.x;

  const int64_t wave =
      std::max<int64_t>(1, int64_t{args.processors} * blocks_per_processor / across);
  constexpr int64_t few_passes = 2, many_passes = 16;
  const int64_t passes_in_flight = args.rows / (launch.block.y * rows_in_flight);
  int64_t chunks = passes_in_flight >= many_passes * wave ? 2 * wave : wave;
  // A block that reads only a few rows costs more in the second kernel, which adds up the chunks,
  // than it saves in this one. Few rows fit into a cluster, which needs no such kernel.
  const int64_t worth = passes_in_flight / few_passes;
  launch.cluster =
      args.grad_bias != nullptr && has_clusters(args.arch) && worth <= most_blocks_in_cluster;
  chunks = std::min(
      chunks, launch.cluster ? std::min<int64_t>(passes_in_flight, most_blocks_in_cluster) : worth);
  chunks = std::clamp<int64_t>(chunks, 1, 65535);
  // Whole passes of the block, so that no chunk ends in a ragged one but the last.
  const int64_t passes = (args.rows + chunks * launch.block.y - 1) / (chunks * launch.block.y);
  launch.rows_per_chunk = std::max<int64_t>(passes, 1) * launch.block.y;
  launch.grid = dim3(across, (args.rows + launch.rows_per_chunk - 1) / launch.rows_per_chunk);
  launch.cluster = launch.cluster && launch.grid.y > 1;
  return launch;
}

template <typename T, Activation activation, bool mask = false>
auto* kernel_for(bool vectors) {
  return vectors ? backward_kernel<T, activation, mask, full_vector<T>>
                 : backward_kernel<T, activation, mask, 1>;
}

}  // namespace

int64_t scratch_bytes(const ActivationBackward& args) {
  const auto shape = shape_of(args);
  if (args.grad_bias == nullptr || shape.cluster || shape.grid.y == 1) return 0;
  return shape.grid.y * args.cols * (args.type == gemm::Type::f64 ? 8 : 4);
}

void activation_backward(const ActivationBackward& args, void* scratch, cudaStream_t stream) {
  const auto shape = shape_of(args);
  with_type(args.type, [&](auto element) {
    using T = decltype(element);
    auto* partials = static_cast<Accumulator<T>*>(scratch);
    const auto launch = [&](auto* kernel) {
      launch_chunks(kernel, shape.grid, shape.block, shape.cluster, stream, args,
                    shape.rows_per_chunk, partials);
    };
    with_activation(args.activation, [&](auto constant) {
      constexpr Activation act = decltype(constant)::value;
      if constexpr (act == Activation::relu) {
        if (args.mask) return launch(kernel_for<T, act, true>(shape.vectors));
      }
      launch(kernel_for<T, act>(shape.vectors));
    });
    if (partials == nullptr) return;
    sum_partials(partials, shape.grid.y, args.cols, args.cols, static_cast<T*>(args.grad_bias),
                 stream);
  });
}

void sum_rows(gemm::Type type, const float* partials, int64_t rows, int64_t cols, int64_t ld,
              void* sums, cudaStream_t stream) {
  with_type(type, [&](auto element) {
    using T = decltype(element);
    if constexpr (!std::is_same_v<T, double>) {
      sum_partials(partials, rows, cols, ld, static_cast<T*>(sums), stream);
    }
  });
}

}  // namespace fused::cuda::kernels
