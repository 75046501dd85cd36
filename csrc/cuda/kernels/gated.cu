#include "cuda/kernels/gating.h"

#include "cuda/kernels/activation_math.cuh"
#include "cuda/kernels/reduce.cuh"

#include <algorithm>

namespace fused::cuda::kernels {
namespace {

// Two rows of three vectors keep as many loads in flight as three rows of two.
constexpr int rows_in_flight = 2;
constexpr int blocks_per_processor = 3;

template <typename T, Activation activation, int width>
__global__ void __launch_bounds__(block_threads) forward_kernel(Gating args) {
  constexpr bool quick = sizeof(T) == 2;
  using V = Vector<T, width>;
  const int64_t col = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * width;
  if (col >= args.cols) return;
  const auto* gates = static_cast<const T*>(args.gate) + col;
  const auto* ups = static_cast<const T*>(args.up) + col;
  auto* hidden = static_cast<T*>(args.hidden) + col;
  const int64_t step = int64_t{gridDim.y} * blockDim.y;
  for (int64_t row = int64_t{blockIdx.y} * blockDim.y + threadIdx.y; row < args.rows; row += step) {
    Accumulator<T> gate[width], up[width];
    widen(*reinterpret_cast<const V*>(gates + row * args.ld_gate), gate);
    widen(*reinterpret_cast<const V*>(ups + row * args.ld_up), up);
#pragma unroll
    for (int j = 0; j < width; ++j) gate[j] = activate<activation, quick>(gate[j]) * up[j];
    *reinterpret_cast<V*>(hidden + row * args.cols) = narrow<T, width>(gate);
  }
}

// Computes `count` rows, blockDim.y apart, of a thread's columns. ReLU's derivative follows from
// its pre-activation.
template <typename T, Activation activation, int width, int count>
__device__ void some_rows(const GatingBackward& args, int64_t row, int64_t col,
                          Accumulator<T> (&gate_sums)[width], Accumulator<T> (&up_sums)[width]) {
  using A = Accumulator<T>;
  using V = Vector<T, width>;
  constexpr bool quick = sizeof(T) == 2;
  const auto load = [col](const void* from, int64_t at) {
    return *reinterpret_cast<const V*>(static_cast<const T*>(from) + at + col);
  };
  const auto store = [col](void* to, int64_t at, const A(&values)[width]) {
    if (to == nullptr) return;
    *reinterpret_cast<V*>(static_cast<T*>(to) + at + col) = narrow<T, width>(values);
  };
  V g[count], z[count], u[count];
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const int64_t r = row + i * blockDim.y;
    g[i] = load(args.grad, r * args.ld_grad);
    z[i] = load(args.gate, r * args.ld_gate);
    u[i] = load(args.up, r * args.ld_up);
  }
#pragma unroll
  for (int i = 0; i < count; ++i) {
    const int64_t r = row + i * blockDim.y;
    A grad[width], gate[width], up[width], hidden[width];
    widen(g[i], grad);
    widen(z[i], gate);
    widen(u[i], up);
#pragma unroll
    for (int j = 0; j < width; ++j) {
      const A active = activate<activation, quick>(gate[j]);
      hidden[j] = active * up[j];
      gate[j] = activation_gradient<activation, quick, A>(grad[j] * up[j], gate[j]);
      up[j] = grad[j] * active;
      gate_sums[j] += gate[j];
      up_sums[j] += up[j];
    }
    store(args.grad_gate, r * args.ld_result, gate);
    store(args.grad_up, r * args.ld_result, up);
    store(args.hidden, r * args.cols, hidden);
  }
}

// Writes the chunks' sums to `partials`, [2, chunks, cols], gate's first.
template <typename T, Activation activation, int width>
__global__ void __launch_bounds__(block_threads, blocks_per_processor)
    backward_kernel(GatingBackward args, int64_t rows_per_chunk, Accumulator<T>* partials) {
  using A = Accumulator<T>;
  const int64_t col = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * width;
  A gate_sums[width] = {}, up_sums[width] = {};
  if (col < args.cols) {
    const int64_t first = blockIdx.y * rows_per_chunk;
    const int64_t last = min(first + rows_per_chunk, args.rows);
    walk_down<rows_in_flight>(first + threadIdx.y, last, blockDim.y, [&](int64_t row, auto count) {
      some_rows<T, activation, width, decltype(count)::value>(args, row, col, gate_sums, up_sums);
    });
  }

  __shared__ A shared[block_threads * width];
  const auto put = [&](A(&sums)[width], void* result, A* chunks) {
    if (result == nullptr) return;
    __syncthreads();  // the values before have been read
    sum_over_y(sums, shared);
    put_sums<T>(sums, shared, col < args.cols, col, args.cols, chunks, {result});
  };
  put(gate_sums, args.gate_sums, partials);
  put(up_sums, args.up_sums, partials == nullptr ? nullptr : partials + gridDim.y * args.cols);
}

bool takes_vectors(const Gating& args) {
  const int64_t full = 16 / gemm::size_of(args.type);
  return args.cols % full == 0 && args.ld_gate % full == 0 && args.ld_up % full == 0 &&
         gemm::is_aligned(args.gate) && gemm::is_aligned(args.up) && gemm::is_aligned(args.hidden);
}

bool takes_vectors(const GatingBackward& args) {
  const int64_t full = 16 / gemm::size_of(args.type);
  return takes_vectors(static_cast<const Gating&>(args)) && args.ld_grad % full == 0 &&
         args.ld_result % full == 0 && gemm::is_aligned(args.grad) &&
         gemm::is_aligned(args.grad_gate) && gemm::is_aligned(args.grad_up);
}

int64_t per_row(const Gating& args, bool vectors) {
  return vectors ? args.cols * gemm::size_of(args.type) / 16 : args.cols;
}

Chunks chunks_of(const GatingBackward& args) {
  const int64_t columns = per_row(args, takes_vectors(args));
  const dim3 block = block_shape(columns);
  const int64_t wave = blocks_in_wave(args.processors * blocks_per_processor, columns, block);
  // More blocks of few rows cost more in adding up their sums than they save here.
  const int64_t passes_in_flight = args.rows / (block.y * rows_in_flight);
  return in_chunks(args.rows, columns, block, std::min(wave, passes_in_flight / 2),
                   /*cluster=*/false);
}

template <typename Fn>
void with_both(const Gating& args, const Fn& fn) {
  with_type(args.type, [&](auto element) {
    with_activation(args.activation, [&](auto constant) {
      if constexpr (decltype(constant)::value != Activation::none) fn(element, constant);
    });
  });
}

}  // namespace

void gating_forward(const Gating& args, cudaStream_t stream) {
  const bool vectors = takes_vectors(args);
  with_both(args, [&](auto element, auto constant) {
    using T = decltype(element);
    constexpr Activation act = decltype(constant)::value;
    auto* kernel = vectors ? forward_kernel<T, act, full_vector<T>> : forward_kernel<T, act, 1>;
    launch_rows(kernel, args.rows, per_row(args, vectors), 1, stream, args);
  });
}

int64_t scratch_bytes(const GatingBackward& args) {
  const bool sums = args.gate_sums != nullptr || args.up_sums != nullptr;
  return sums ? chunks_of(args).partial_bytes(2 * args.cols, args.type) : 0;
}

void gating_backward(const GatingBackward& args, void* scratch, cudaStream_t stream) {
  const auto chunks = chunks_of(args);
  const bool vectors = takes_vectors(args);
  with_both(args, [&](auto element, auto constant) {
    using T = decltype(element);
    constexpr Activation act = decltype(constant)::value;
    auto* partials = static_cast<Accumulator<T>*>(scratch);
    auto* kernel = vectors ? backward_kernel<T, act, full_vector<T>> : backward_kernel<T, act, 1>;
    launch_chunks(kernel, chunks, stream, args, chunks.rows_each, partials);
    if (partials == nullptr) return;
    const auto add_up = [&](const Accumulator<T>* sums, void* result) {
      if (result == nullptr) return;
      sum_partials<T>(sums, chunks.grid.y, args.cols, args.cols, {result}, stream);
    };
    add_up(partials, args.gate_sums);
    add_up(partials + chunks.grid.y * args.cols, args.up_sums);
  });
}

}  // namespace fused::cuda::kernels
