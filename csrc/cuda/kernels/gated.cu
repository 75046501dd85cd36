#include "cuda/kernels/gated.h"

#include "cuda/kernels/activation_math.cuh"
#include "cuda/kernels/reduce.cuh"

#include <algorithm>

namespace fused::cuda::kernels {
namespace {

// Three vectors are read for each row: two rows keep as many loads in flight as a pass that reads
// two vectors has with three rows.
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

// A thread owns `width` neighbouring columns and walks down a chunk of the rows, as in
// activation_backward.cu. ReLU's derivative is read from the pre-activation, which is positive
// where the output is. The chunks' sums are left in `partials`, [2, chunks, cols], gate's first.
template <typename T, Activation activation, int width>
__global__ void __launch_bounds__(block_threads, blocks_per_processor)
    backward_kernel(GatingBackward args, int64_t rows_per_chunk, Accumulator<T>* partials) {
  using A = Accumulator<T>;
  using V = Vector<T, width>;
  constexpr bool quick = sizeof(T) == 2;

  const int64_t col = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * width;
  A gate_sums[width] = {}, up_sums[width] = {};
  if (col < args.cols) {
    const int64_t first = blockIdx.y * rows_per_chunk;
    const int64_t last = min(first + rows_per_chunk, args.rows);
    const auto* grads = static_cast<const T*>(args.grad) + col;
    const auto* gates = static_cast<const T*>(args.gate) + col;
    const auto* ups = static_cast<const T*>(args.up) + col;
    const auto at = [col](void* data) {
      return data == nullptr ? nullptr : static_cast<T*>(data) + col;
    };
    auto *grad_gates = at(args.grad_gate), *grad_ups = at(args.grad_up), *hiddens = at(args.hidden);

    const auto rows = [&](int64_t row, auto rows_at_once) {
      constexpr int count = decltype(rows_at_once)::value;
      V g[count], z[count], u[count];
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const int64_t r = row + i * blockDim.y;
        g[i] = *reinterpret_cast<const V*>(grads + r * args.ld_grad);
        z[i] = *reinterpret_cast<const V*>(gates + r * args.ld_gate);
        u[i] = *reinterpret_cast<const V*>(ups + r * args.ld_up);
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
        if (grad_gates != nullptr) {
          *reinterpret_cast<V*>(grad_gates + r * args.ld_result) = narrow<T, width>(gate);
        }
        if (grad_ups != nullptr) {
          *reinterpret_cast<V*>(grad_ups + r * args.ld_result) = narrow<T, width>(up);
        }
        if (hiddens != nullptr) {
          *reinterpret_cast<V*>(hiddens + r * args.cols) = narrow<T, width>(hidden);
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

  if (args.gate_sums == nullptr && args.up_sums == nullptr) return;
  __shared__ A shared[block_threads * width];
  const auto put = [&](A(&sums)[width], void* result, int64_t index) {
    if (result == nullptr) return;
    __syncthreads();  // the one before has been read
    sum_over_y(sums, shared);
    if (threadIdx.y != 0 || col >= args.cols) return;
#pragma unroll
    for (int j = 0; j < width; ++j) {
      if (partials != nullptr) {
        partials[(index * int64_t{gridDim.y} + blockIdx.y) * args.cols + col + j] = sums[j];
      } else {
        static_cast<T*>(result)[col + j] = narrow<T>(sums[j]);
      }
    }
  };
  put(gate_sums, args.gate_sums, 0);
  put(up_sums, args.up_sums, 1);
}

struct Launch {
  bool vectors;
  dim3 block;
  dim3 grid;
  int64_t rows_per_chunk;
};

bool takes_vectors(const Gating& args) {
  const int64_t full = 16 / gemm::size_of(args.type);
  return args.cols % full == 0 && args.ld_gate % full == 0 && args.ld_up % full == 0 &&
         aligned16(args.gate) && aligned16(args.up) && aligned16(args.hidden);
}

int64_t per_row(const Gating& args, bool vectors) {
  return vectors ? args.cols * gemm::size_of(args.type) / 16 : args.cols;
}

// One wave of blocks, with an equal share of the rows each.
Launch shape_of(const GatingBackward& args) {
  const int64_t full = 16 / gemm::size_of(args.type);
  Launch launch;
  launch.vectors = takes_vectors(args) && args.ld_grad % full == 0 && args.ld_result % full == 0 &&
                   aligned16(args.grad) && aligned16(args.grad_gate) && aligned16(args.grad_up);
  const int64_t columns = per_row(args, launch.vectors);
  launch.block = block_shape(columns);
  const int64_t across = (columns + launch.block.x - 1) / launch.block.x;
  const int64_t room =
      std::max<int64_t>(1, int64_t{args.processors} * blocks_per_processor / across);
  // A block that reads only a few rows costs more where the chunks are added up than it saves here.
  const int64_t passes_in_flight = args.rows / (launch.block.y * rows_in_flight);
  const int64_t chunks = std::clamp<int64_t>(std::min(room, passes_in_flight / 2), 1, 65535);
  const int64_t passes = (args.rows + chunks * launch.block.y - 1) / (chunks * launch.block.y);
  launch.rows_per_chunk = std::max<int64_t>(passes, 1) * launch.block.y;
  launch.grid = dim3(across, (args.rows + launch.rows_per_chunk - 1) / launch.rows_per_chunk);
  return launch;
}

// fn(type, activation) with an element and the activation as a constant; there is always one.
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
  const int64_t columns = per_row(args, vectors);
  const dim3 block = block_shape(columns);
  const dim3 grid((columns + block.x - 1) / block.x,
                  std::min<int64_t>((args.rows + block.y - 1) / block.y, 65535));
  with_both(args, [&](auto element, auto constant) {
    using T = decltype(element);
    constexpr Activation act = decltype(constant)::value;
    auto* kernel = vectors ? forward_kernel<T, act, full_vector<T>> : forward_kernel<T, act, 1>;
    kernel<<<grid, block, 0, stream>>>(args);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  });
}

int64_t scratch_bytes(const GatingBackward& args) {
  const auto shape = shape_of(args);
  const bool sums = args.gate_sums != nullptr || args.up_sums != nullptr;
  if (!sums || shape.grid.y == 1) return 0;
  return shape.grid.y * 2 * args.cols * (args.type == gemm::Type::f64 ? 8 : 4);
}

void gating_backward(const GatingBackward& args, void* scratch, cudaStream_t stream) {
  const auto shape = shape_of(args);
  with_both(args, [&](auto element, auto constant) {
    using T = decltype(element);
    constexpr Activation act = decltype(constant)::value;
    auto* partials = static_cast<Accumulator<T>*>(scratch);
    auto* kernel =
        shape.vectors ? backward_kernel<T, act, full_vector<T>> : backward_kernel<T, act, 1>;
    kernel<<<shape.grid, shape.block, 0, stream>>>(args, shape.rows_per_chunk, partials);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
    if (partials == nullptr) return;
    const auto add_up = [&](const Accumulator<T>* chunks, void* sums) {
      if (sums == nullptr) return;
      sum_partials(chunks, shape.grid.y, args.cols, args.cols, static_cast<T*>(sums), stream);
    };
    add_up(partials, args.gate_sums);
    add_up(partials + shape.grid.y * args.cols, args.up_sums);
  });
}

}  // namespace fused::cuda::kernels
