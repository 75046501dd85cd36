#pragma once

// The kernels of small_product.h. A block makes 16 columns of the result with the tensor cores, as
// CUDA's wmma functions have them. Its warps share the sums, so that all that a block reads is on
// its way at once; what they add up, they add in a fixed order.

#include "cuda/kernels/activation_math.cuh"
#include "cuda/kernels/small_product.h"

#include <cuda_pipeline.h>
#include <mma.h>

#include <algorithm>

namespace fused::cuda::kernels {
namespace {  // each file's kernels are its own

// Sides of wmma's tiles, elements in a vector of 16 bytes, and what is added to a row in shared
// memory, so that neighbouring rows lie in other banks.
constexpr int tile = 16, unit = 8;
constexpr int pad = 8;

// How a block divides its part of a product: `down` tiles, the sums of each among `split` warps.
// Column sums of a gradient of the input are of all rows, so a block has many of them then.
template <gemm::Pass pass, bool sums>
struct SmallShape {
  static constexpr bool forward = pass == gemm::Pass::fprop, of_weight = pass == gemm::Pass::wgrad;
  static constexpr bool all_rows = pass == gemm::Pass::dgrad && sums;
  static constexpr int down = all_rows ? 16 : pass == gemm::Pass::dgrad ? 4 : 1;
  static constexpr int split = of_weight ? 16 : all_rows ? 1 : 4;
  static constexpr int threads = 32 * down * split, rows = tile * down;
  static constexpr int inner = all_rows ? 64 : pass == gemm::Pass::dgrad ? 128 : 256;  // at a time
  // In shared memory the operands lie as they are stored.
  static constexpr bool left_by_inner = of_weight, right_by_inner = !forward;
  static constexpr int ld_left = (left_by_inner ? rows : inner) + pad;
  static constexpr int ld_right = (right_by_inner ? tile : inner) + pad;
  static constexpr int left = (left_by_inner ? inner : rows) * ld_left;
  static constexpr int right = (right_by_inner ? inner : tile) * ld_right;
  static constexpr int ld_products = tile + 4;
  static constexpr int products = split * rows * ld_products;
  // Neighbours in a row that a thread finishes, and which part of a column's sum it adds up.
  static constexpr int width = std::max(2, rows* tile / threads);
  static constexpr int parts = threads / tile;
  // The products lie where the operands were.
  static constexpr size_t operand_bytes = std::max((left + right) * size_t{2}, products* size_t{4});
  static constexpr size_t bytes = operand_bytes + (forward ? 0 : threads * sizeof(float));
};

constexpr int small_forward_threads = SmallShape<gemm::Pass::fprop, false>::threads;
constexpr int small_backward_threads = SmallShape<gemm::Pass::wgrad, true>::threads;

template <gemm::Pass pass, bool sums>
int small_blocks(const SmallProduct& p) {
  using Shape = SmallShape<pass, sums>;
  const int down = Shape::all_rows ? std::min(p.rows, 1) : (p.rows + Shape::rows - 1) / Shape::rows;
  return down * ((p.cols + tile - 1) / tile);
}

__device__ inline bool in_vectors(const void* data, int64_t ld, int extent, int width) {
  return ld % width == 0 && extent % width == 0 &&
         reinterpret_cast<uintptr_t>(data) % (2 * width) == 0;
}

// Starts to copy a part of a matrix of rows x cols elements, from (row, col) on; zeros where the
// matrix has ended, up to the next tile.
template <int height, int width, int ld_to, int threads, typename T>
__device__ void start_copy(T* to, const void* matrix, int64_t ld, int row, int col, int rows,
                           int cols) {
  const auto* from = static_cast<const T*>(matrix);
  const auto with = [=](int down, int across) {
    return row + down < (rows + tile - 1) / tile * tile &&
           col + across < (cols + tile - 1) / tile * tile;
  };
  if (in_vectors(matrix, ld, cols, unit)) {
#pragma unroll
    for (int turn = 0; turn < height * width / unit; turn += threads) {
      const int i = turn + threadIdx.x;
      const int down = i / (width / unit), across = i % (width / unit) * unit;
      if (down >= height || !with(down, across)) continue;
      const bool inside = row + down < rows && col + across < cols;
      const T* source = inside ? from + (row + down) * ld + col + across : from;
      __pipeline_memcpy_async(to + down * ld_to + across, source, 16, inside ? 0 : 16);
    }
  } else {
    for (int i = threadIdx.x; i < height * width; i += threads) {
      const int down = i / width, across = i % width;
      if (!with(down, across)) continue;
      const bool inside = row + down < rows && col + across < cols;
      to[down * ld_to + across] = inside ? from[(row + down) * ld + col + across] : narrow<T>(0.0f);
    }
  }
  __pipeline_commit();
}

template <typename T, int width>
__device__ void load_row(const T* from, int count, bool in_vector, float (&to)[width]) {
  if (in_vector) return widen(*reinterpret_cast<const Vector<T, width>*>(from), to);
#pragma unroll
  for (int j = 0; j < width; ++j) to[j] = j < count ? widen(from[j]) : 0.0f;
}

template <typename T, int width>
__device__ void store_row(T* to, int count, bool in_vector, const float (&from)[width]) {
  if (in_vector) {
    *reinterpret_cast<Vector<T, width>*>(to) = narrow<T, width>(from);
  } else {
#pragma unroll
    for (int j = 0; j < width; ++j) {
      if (j < count) to[j] = narrow<T>(from[j]);
    }
  }
}

// sums: of a gradient of the input, its columns; that of the weight has those of its left operand
// where p.sums is there.
template <typename T, gemm::Pass pass, Activation activation, bool sums>
__device__ void small_product_block(const SmallProduct& p, int block, unsigned char* shared) {
  namespace wmma = nvcuda::wmma;
  using Shape = SmallShape<pass, sums>;
  using RowMajor = wmma::row_major;
  using ColumnMajor = wmma::col_major;
  using LeftLayout = std::conditional_t<Shape::left_by_inner, ColumnMajor, RowMajor>;
  using RightLayout = std::conditional_t<Shape::right_by_inner, RowMajor, ColumnMajor>;
  constexpr bool reads_aux = pass == gemm::Pass::dgrad && activation != Activation::none;
  constexpr int width = Shape::width;

  auto* left = reinterpret_cast<T*>(shared);
  auto* right = left + Shape::left;
  auto* products = reinterpret_cast<float*>(shared);
  auto* partial_sums = reinterpret_cast<float*>(shared + Shape::operand_bytes);

  const int blocks_across = (p.cols + tile - 1) / tile;
  const int first_col = block % blocks_across * tile, first = block / blocks_across * Shape::rows;
  const int last = Shape::all_rows ? p.rows : min(p.rows, first + Shape::rows);
  const int warp = threadIdx.x / 32, part = warp % Shape::split;
  const int warp_row = warp / Shape::split * tile;
  // What is this thread's once the product is there.
  const int down = threadIdx.x * width / tile, across = threadIdx.x * width % tile;
  const int col = first_col + across;
  const int summed = threadIdx.x % tile, share = threadIdx.x / tile;
  const bool sums_left = Shape::of_weight && p.sums != nullptr && first_col == 0;
  float sum = 0.0f;

  for (int first_row = first; first_row < last; first_row += Shape::rows) {
    const int row = first_row + down;
    const int count = down < Shape::rows && row < p.rows ? min(width, p.cols - col) : 0;
    auto* aux = static_cast<T*>(p.aux) + row * p.ld_aux + col;
    const bool aux_in_vectors = in_vectors(p.aux, p.ld_aux, p.cols, width);
    [[maybe_unused]] float saved[width] = {}, bias[width] = {};
    if constexpr (reads_aux) {
      if (count > 0) load_row(aux, count, aux_in_vectors, saved);
    }
    if constexpr (Shape::forward) {
      if (count > 0 && p.bias != nullptr) {
        load_row(static_cast<const T*>(p.bias) + col, count, false, bias);
      }
    }

    wmma::fragment<wmma::accumulator, tile, tile, tile, float> product;
    wmma::fill_fragment(product, 0.0f);
    for (int begin = 0; begin < p.inner; begin += Shape::inner) {
      if constexpr (Shape::left_by_inner) {
        start_copy<Shape::inner, Shape::rows, Shape::ld_left, Shape::threads>(
            left, p.left, p.ld_left, begin, first_row, p.inner, p.rows);
      } else {
        start_copy<Shape::rows, Shape::inner, Shape::ld_left, Shape::threads>(
            left, p.left, p.ld_left, first_row, begin, p.rows, p.inner);
      }
      if constexpr (Shape::right_by_inner) {
        start_copy<Shape::inner, tile, Shape::ld_right, Shape::threads>(
            right, p.right, p.ld_right, begin, first_col, p.inner, p.cols);
      } else {
        start_copy<tile, Shape::inner, Shape::ld_right, Shape::threads>(
            right, p.right, p.ld_right, first_col, begin, p.cols, p.inner);
      }
      __pipeline_wait_prior(0);
      __syncthreads();
      if (first_row + warp_row < p.rows) {
#pragma unroll
        for (int i = 0; i < Shape::inner / (Shape::split * tile); ++i) {
          const int k = (i * Shape::split + part) * tile;
          if (begin + k >= p.inner) break;
          wmma::fragment<wmma::matrix_a, tile, tile, tile, T, LeftLayout> a;
          wmma::fragment<wmma::matrix_b, tile, tile, tile, T, RightLayout> b;
          wmma::load_matrix_sync(a,
                                 Shape::left_by_inner ? left + k * Shape::ld_left + warp_row
                                                      : left + warp_row * Shape::ld_left + k,
                                 Shape::ld_left);
          wmma::load_matrix_sync(b, Shape::right_by_inner ? right + k * Shape::ld_right : right + k,
                                 Shape::ld_right);
          wmma::mma_sync(product, a, b, product);
        }
      }
      if (sums_left) {
#pragma unroll
        for (int turn = 0; turn < Shape::inner; turn += Shape::parts) {
          const int k = turn + share;
          if (begin + k < p.inner) sum += widen(left[k * Shape::ld_left + summed]);
        }
      }
      __syncthreads();
    }

    wmma::store_matrix_sync(products + (part * Shape::rows + warp_row) * Shape::ld_products,
                            product, Shape::ld_products, wmma::mem_row_major);
    __syncthreads();
    if (count > 0) {
      auto* values = products + down * Shape::ld_products + across;
      float value[width];
#pragma unroll
      for (int j = 0; j < width; ++j) {
        value[j] = values[j];
#pragma unroll
        for (int other = 1; other < Shape::split; ++other) {
          value[j] += values[other * Shape::rows * Shape::ld_products + j];
        }
        if constexpr (Shape::forward) value[j] += bias[j];
        if constexpr (reads_aux)
          value[j] = activation_gradient<activation, true>(value[j], saved[j]);
      }
      if constexpr (Shape::forward && activation != Activation::none) {
        if (p.aux != nullptr) store_row(aux, count, aux_in_vectors, value);
#pragma unroll
        for (int j = 0; j < width; ++j) value[j] = activate<activation, true>(value[j]);
      }
      store_row(static_cast<T*>(p.result) + row * p.ld_result + col, count,
                in_vectors(p.result, p.ld_result, p.cols, width), value);
      if constexpr (Shape::all_rows) {
#pragma unroll
        for (int j = 0; j < width; ++j) values[j] = value[j];
      }
    }
    if constexpr (Shape::all_rows) {
      __syncthreads();
#pragma unroll
      for (int turn = 0; turn < Shape::rows; turn += Shape::parts) {
        const int r = turn + share;
        if (first_row + r < p.rows) sum += products[r * Shape::ld_products + summed];
      }
      __syncthreads();
    }
  }

  if constexpr (Shape::all_rows || Shape::of_weight) {
    if (!Shape::all_rows && !sums_left) return;
    partial_sums[share * tile + summed] = sum;
    __syncthreads();
    const int at = (Shape::of_weight ? first : first_col) + summed;
    if (share != 0 || at >= (Shape::of_weight ? p.rows : p.cols)) return;
#pragma unroll
    for (int other = 1; other < Shape::parts; ++other) sum += partial_sums[other * tile + summed];
    static_cast<T*>(p.sums)[at] = narrow<T>(sum);
  }
}

}  // namespace
}  // namespace fused::cuda::kernels
