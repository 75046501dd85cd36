#pragma once

// The kernel of ordered_product.h. An element is a sum of partial sums of 64 products each, in the
// order of `inner`. One thread computes it by fused multiply-adds. The tile decides which thread
// that is and not the order, so the fastest tile may be chosen for each number of rows.

#include <cstdint>

namespace fused::cuda::kernels {

template <typename T>
struct Strided {
  const T* data;
  int64_t row, inner;  // strides
};

// A block computes `features` x `tokens` elements, a thread per_thread x per_thread.
template <int features, int tokens, int per_thread>
struct OrderedTile {
  static constexpr int wide = features, high = tokens, each = per_thread;
  static constexpr int across = wide / each, threads = across * (high / each);
};

namespace ordered {

// All tiles have slices of one size. Zeros fill up the last slice of `inner`, and may change the
// sign of a zero.
inline constexpr int slice = 16, slices_in_a_sum = 4;

__device__ inline float multiply_add(float a, float b, float sum) { return fmaf(a, b, sum); }
__device__ inline double multiply_add(double a, double b, double sum) { return fma(a, b, sum); }

// Loads `extent` rows of each slice. Neighbouring threads load neighbours in memory.
template <typename T, int extent, int threads>
class Loader {
  static constexpr int count = extent * slice / threads;
  static_assert(count * threads == extent * slice && threads % extent == 0 && threads % slice == 0);

 public:
  __device__ Loader(const Strided<T>& from, int64_t first_row, int64_t rows, int64_t inner,
                    int thread) {
    const bool along = from.inner == 1;
    row_ = along ? thread / slice : thread % extent;
    k_ = along ? thread % slice : thread / extent;
    rows_apart_ = along ? threads / slice : 0;
    k_apart_ = along ? 0 : threads / extent;
    next_ = from.data + (first_row + row_) * from.row + k_ * from.inner;
    apart_ = rows_apart_ * from.row + k_apart_ * from.inner;
    to_next_slice_ = slice * from.inner;
    constexpr int64_t beyond = int64_t{1} << 30;
    rows_left_ = static_cast<int>(min(rows - first_row, beyond)) - row_;
    inner_left_ = inner - k_;
  }

  __device__ void load() {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const bool exists = i * rows_apart_ < rows_left_ && i * k_apart_ < inner_left_;
      values_[i] = exists ? next_[i * apart_] : T(0);
    }
    next_ += to_next_slice_, inner_left_ -= slice;
  }

  template <int padded>
  __device__ void store(T (&to)[slice][padded]) const {
#pragma unroll
    for (int i = 0; i < count; ++i) to[k_ + i * k_apart_][row_ + i * rows_apart_] = values_[i];
  }

 private:
  T values_[count];
  const T* next_;
  int64_t apart_, to_next_slice_, inner_left_;
  int row_, k_, rows_apart_, k_apart_, rows_left_;
};

}  // namespace ordered

template <typename T, class Tile>
__global__ void __launch_bounds__(Tile::threads)
    ordered_product_kernel(Strided<T> left, Strided<T> right, const T* bias, T* result,
                           int64_t ld_result, int64_t rows, int64_t cols, int64_t inner) {
  using namespace ordered;
  constexpr int padding = 4, each = Tile::each, vector = 4;
  constexpr int parts = each / vector;  // far apart, so that a warp's threads read neighbours
  static_assert(parts * vector == each);
  alignas(16) __shared__ T features[2][slice][Tile::wide + padding];
  alignas(16) __shared__ T tokens[2][slice][Tile::high + padding];
  const int thread = threadIdx.x;
  const int64_t tiles_across = (cols + Tile::wide - 1) / Tile::wide;
  const int64_t first_col = blockIdx.x % tiles_across * Tile::wide;
  const int64_t first_row = blockIdx.x / tiles_across * Tile::high;
  const int col = thread % Tile::across * vector, row = thread / Tile::across * vector;
  constexpr int cols_apart = Tile::wide / parts, rows_apart = Tile::high / parts;

  Loader<T, Tile::wide, Tile::threads> of_features(right, first_col, cols, inner, thread);
  Loader<T, Tile::high, Tile::threads> of_tokens(left, first_row, rows, inner, thread);
  const auto load = [&] { of_features.load(), of_tokens.load(); };
  const auto store = [&](int buffer) {
    of_features.store(features[buffer]), of_tokens.store(tokens[buffer]);
  };

  T total[each][each] = {}, part[each][each] = {};
  const int64_t slices = (inner + slice - 1) / slice;
  load();
  store(0);
  __syncthreads();
  for (int64_t s = 0; s < slices; ++s) {
    const int buffer = static_cast<int>(s % 2);
    if (s + 1 < slices) load();
#pragma unroll 4
    for (int k = 0; k < slice; ++k) {
      T a[each], b[each];
#pragma unroll
      for (int i = 0; i < each; ++i) {
        a[i] = tokens[buffer][k][i / vector * rows_apart + row + i % vector];
        b[i] = features[buffer][k][i / vector * cols_apart + col + i % vector];
      }
#pragma unroll
      for (int i = 0; i < each; ++i) {
#pragma unroll
        for (int j = 0; j < each; ++j) part[i][j] = multiply_add(a[i], b[j], part[i][j]);
      }
    }
    if ((s + 1) % slices_in_a_sum == 0 || s + 1 == slices) {
#pragma unroll
      for (int i = 0; i < each; ++i) {
#pragma unroll
        for (int j = 0; j < each; ++j) {
          total[i][j] += part[i][j];
          part[i][j] = T(0);
        }
      }
    }
    if (s + 1 < slices) store(1 - buffer);
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int64_t r = first_row + i / vector * rows_apart + row + i % vector;
    if (r >= rows) continue;
#pragma unroll
    for (int j = 0; j < each; ++j) {
      const int64_t c = first_col + j / vector * cols_apart + col + j % vector;
      if (c < cols) result[r * ld_result + c] = bias ? total[i][j] + bias[c] : total[i][j];
    }
  }
}

}  // namespace fused::cuda::kernels
