// Computes act'(saved) · grad and its column sums in one sweep over memory. Eager takes three.

#include "cuda/kernels/activation.h"
#include "cuda/kernels/activation_math.cuh"
#include "cuda/kernels/reduce.cuh"

#include <algorithm>

namespace fused::cuda::kernels {
namespace {

// The fastest values on an H200.
constexpr int rows_in_flight = 4;
constexpr int blocks_per_processor = 3;

// Computes `count` rows, blockDim.y apart, of a thread's columns. Their first bit in a mask is
// `shift`.
template <Activation activation, bool mask, int width, int count, typename T>
__device__ void some_rows(const ActivationBackward& args, int64_t row, const T* grad,
                          const T* saved, const uint8_t* bits, int shift, T* dz,
                          Accumulator<T> (&sums)[width]) {
  using A = Accumulator<T>;
  using V = Vector<T, width>;
  constexpr bool quick = sizeof(T) == 2;
  constexpr bool reads_vector = activation != Activation::none && !mask;
  V g[count];
  [[maybe_unused]] V s[count];
  [[maybe_unused]] uint32_t m[count];
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const int64_t r = row + i * blockDim.y;
    g[i] = *reinterpret_cast<const V*>(grad + r * args.ld_grad);
    if constexpr (reads_vector) s[i] = *reinterpret_cast<const V*>(saved + r * args.ld_saved);
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
      *reinterpret_cast<V*>(dz + (row + i * blockDim.y) * args.cols) = narrow<T, width>(gradient);
    }
  }
}

// A thread owns `width` neighbouring columns and walks down a chunk of the rows.
template <typename T, Activation activation, bool mask, int width>
__global__ void __launch_bounds__(block_threads, blocks_per_processor)
    backward_kernel(ActivationBackward args, int64_t rows_per_chunk, Accumulator<T>* partials) {
  using A = Accumulator<T>;
  const int64_t col = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * width;
  A sums[width] = {};
  wait_for_previous_kernel();  // and lets sum_partials start
  if (col < args.cols) {
    const int64_t first = blockIdx.y * rows_per_chunk;
    const int64_t last = min(first + rows_per_chunk, args.rows);
    const auto* grad = static_cast<const T*>(args.grad) + col;
    const auto* saved = static_cast<const T*>(args.saved) + col;
    const auto* bits = static_cast<const uint8_t*>(args.saved) + col / 8;
    const int shift = col % 8;
    auto* dz = args.dz == nullptr ? nullptr : static_cast<T*>(args.dz) + col;
    walk_down<rows_in_flight>(first + threadIdx.y, last, blockDim.y, [&](int64_t row, auto count) {
      constexpr int n = decltype(count)::value;
      some_rows<activation, mask, width, n>(args, row, grad, saved, bits, shift, dz, sums);
    });
  }
  if (args.sums.data == nullptr) return;
  __shared__ A shared[block_threads * width];
  sum_over_y(sums, shared);
  put_sums<T>(sums, shared, col < args.cols, col, args.cols, partials, args.sums);
}

bool takes_vectors(const ActivationBackward& args) {
  const int64_t full = 16 / gemm::size_of(args.type);
  return args.cols % full == 0 && args.ld_grad % full == 0 && gemm::is_aligned(args.grad) &&
         (args.mask || (args.ld_saved % full == 0 && gemm::is_aligned(args.saved))) &&
         gemm::is_aligned(args.dz);
}

// Launches one wave of blocks, or two if each block has many rows, so that others make up for a
// slow one.
Chunks chunks_of(const ActivationBackward& args) {
  const int64_t size = gemm::size_of(args.type);
  const int64_t per_row = takes_vectors(args) ? args.cols * size / 16 : args.cols;
  const dim3 block = block_shape(per_row);
  const int64_t wave = blocks_in_wave(args.processors * blocks_per_processor, per_row, block);
  constexpr int64_t few_passes = 2, many_passes = 16;
  const int64_t passes_in_flight = args.rows / (block.y * rows_in_flight);
  const int64_t chunks = passes_in_flight >= many_passes * wave ? 2 * wave : wave;
  // More blocks of few rows cost more in adding up their sums than they save. A cluster adds up
  // its blocks' sums itself.
  const int64_t worth = passes_in_flight / few_passes;
  const bool cluster =
      args.sums.data != nullptr && has_clusters(args.arch) && worth <= most_blocks_in_cluster;
  const int64_t most =
      cluster ? std::min<int64_t>(passes_in_flight, most_blocks_in_cluster) : worth;
  return in_chunks(args.rows, per_row, block, std::min(chunks, most), cluster);
}

template <typename T, Activation activation, bool mask = false>
auto* kernel_for(bool vectors) {
  return vectors ? backward_kernel<T, activation, mask, full_vector<T>>
                 : backward_kernel<T, activation, mask, 1>;
}

}  // namespace

int64_t scratch_bytes(const ActivationBackward& args) {
  return args.sums.data == nullptr ? 0 : chunks_of(args).partial_bytes(args.cols, args.type);
}

void activation_backward(const ActivationBackward& args, void* scratch, cudaStream_t stream) {
  const auto chunks = chunks_of(args);
  const bool vectors = takes_vectors(args);
  with_type(args.type, [&](auto element) {
    using T = decltype(element);
    auto* partials = static_cast<Accumulator<T>*>(scratch);
    const auto launch = [&](auto* kernel) {
      launch_chunks(kernel, chunks, stream, args, chunks.rows_each, partials);
    };
    with_activation(args.activation, [&](auto constant) {
      constexpr Activation act = decltype(constant)::value;
      if constexpr (act == Activation::relu) {
        if (args.mask) return launch(kernel_for<T, act, true>(vectors));
      }
      launch(kernel_for<T, act>(vectors));
    });
    if (partials == nullptr) return;
    sum_partials<T>(partials, chunks.grid.y, args.cols, args.cols, args.sums, stream);
  });
}

void sum_rows(gemm::Type type, const float* partials, int64_t rows, int64_t cols, int64_t ld,
              void* sums, cudaStream_t stream) {
  with_type(type, [&](auto element) {
    using T = decltype(element);
    if constexpr (!std::is_same_v<T, double>) {
      sum_partials<T>(partials, rows, cols, ld, {sums}, stream);
    }
  });
}

}  // namespace fused::cuda::kernels
