// Makes ReLU's bit mask from its output, for memory="low", and for cuBLASLt's backward if the
// output was saved.

#include "cuda/kernels/activation.h"
#include "cuda/kernels/launch.cuh"

namespace fused::cuda::kernels {
namespace {

constexpr int rows_in_flight = 4;

// The 8 columns of a byte of the mask.
template <typename T, int width>
struct Columns {
  Vector<T, width> vectors[8 / width];
};

template <typename T, int width>
__device__ Columns<T, width> load(const T* from) {
  Columns<T, width> columns;
#pragma unroll
  for (int i = 0; i < 8 / width; ++i) {
    columns.vectors[i] = reinterpret_cast<const Vector<T, width>*>(from)[i];
  }
  return columns;
}

template <typename T>
__device__ uint32_t passes(Accumulator<T> output) {
  return output <= Accumulator<T>(0) ? 0 : 1;  // torch's rule: not at 0, but at NaN
}

template <typename T, int width>
__device__ uint8_t bits_of(const Columns<T, width>& columns) {
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 8 / width; ++i) {
    Accumulator<T> values[width];
    widen(columns.vectors[i], values);
#pragma unroll
    for (int j = 0; j < width; ++j) bits |= passes<T>(values[j]) << (i * width + j);
  }
  return static_cast<uint8_t>(bits);
}

// A thread makes the bytes of 8 columns, or fewer at a row's end, one row after the other.
template <typename T, int width>
__global__ void __launch_bounds__(block_threads)
    relu_mask_kernel(int64_t rows, int64_t cols, const T* __restrict__ output, int64_t ld,
                     uint8_t* __restrict__ mask, int64_t bytes_per_row) {
  const int64_t byte = int64_t{blockIdx.x} * blockDim.x + threadIdx.x, col = byte * 8;
  if (byte >= bytes_per_row) return;
  const int64_t step = int64_t{gridDim.y} * blockDim.y;
  int64_t row = int64_t{blockIdx.y} * blockDim.y + threadIdx.y;
  if (col + 8 > cols) {
    for (; row < rows; row += step) {
      uint32_t bits = 0;
      for (int64_t c = col; c < cols; ++c) {
        bits |= passes<T>(widen(output[row * ld + c])) << (c - col);
      }
      mask[row * bytes_per_row + byte] = static_cast<uint8_t>(bits);
    }
    return;
  }
  walk_down<rows_in_flight>(row, rows, step, [&](int64_t first, auto rows_at_once) {
    constexpr int count = decltype(rows_at_once)::value;
    Columns<T, width> columns[count];
#pragma unroll
    for (int i = 0; i < count; ++i) {
      columns[i] = load<T, width>(output + (first + i * step) * ld + col);
    }
#pragma unroll
    for (int i = 0; i < count; ++i) {
      mask[(first + i * step) * bytes_per_row + byte] = bits_of(columns[i]);
    }
  });
}

}  // namespace

void write_relu_mask(gemm::Type type, int64_t rows, int64_t cols, const void* output, int64_t ld,
                     void* mask, cudaStream_t stream) {
  with_type(type, [&](auto element) {
    using T = decltype(element);
    constexpr int full = full_vector<T>;
    const int64_t bytes_per_row = mask_bytes(cols);
    const bool vectors = ld % full == 0 && gemm::is_aligned(output);
    auto* kernel = vectors ? relu_mask_kernel<T, full> : relu_mask_kernel<T, 1>;
    launch_rows(kernel, rows, bytes_per_row, rows_in_flight, stream, rows, cols,
                static_cast<const T*>(output), ld, static_cast<uint8_t*>(mask), bytes_per_row);
  });
}

}  // namespace fused::cuda::kernels
