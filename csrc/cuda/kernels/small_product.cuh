#pragma once

// The kernels of small_product.h. A block makes 16 columns of the result, each of its warps 16 rows
// at a time, with the tensor cores as CUDA's wmma functions have them; sums over tokens are made by
// one block in a fixed order.

#include "cuda/kernels/activation_math.cuh"
#include "cuda/kernels/small_product.h"

#include <cuda_pipeline.h>
#include <mma.h>

namespace fused::cuda::kernels {
namespace {  // each file's kernels are its own

// Sides of wmma's tiles, elements in a vector of 16 bytes, and what is added to a row in shared
// memory, so that neighbouring rows lie in other banks and at multiples of 32 bytes.
constexpr int tile = 16, unit = 8;
constexpr int pad = 16;

template <gemm::Pass pass>
struct SmallShape {
  static constexpr int warps = pass == gemm::Pass::dgrad ? 16 : 4;
  static constexpr int threads = 32 * warps, rows = tile * warps;
  static constexpr int inner = 64;  // of the sums at a time
  // In shared memory the operands lie as they are stored.
  static constexpr bool left_by_inner = pass == gemm::Pass::wgrad;
  static constexpr bool right_by_inner = pass != gemm::Pass::fprop;
  static constexpr int ld_left = (left_by_inner ? rows : inner) + pad;
  static constexpr int ld_right = (right_by_inner ? tile : inner) + pad;
  static constexpr int left = (left_by_inner ? inner : rows) * ld_left;
  static constexpr int right = (right_by_inner ? inner : tile) * ld_right;
  static constexpr int ld_products = tile + 4;
  static constexpr int products = rows * ld_products;
  // Which part of a sum a thread adds up.
  static constexpr int summed = pass == gemm::Pass::wgrad ? rows : tile;
  static constexpr int parts = threads / summed;
};

// Column sums are of all rows, which one block has then.
template <gemm::Pass pass>
dim3 small_grid(const SmallProduct& p) {
  using Shape = SmallShape<pass>;
  const bool together = pass == gemm::Pass::dgrad && p.sums != nullptr;
  return dim3((p.cols + tile - 1) / tile, together ? 1 : (p.rows + Shape::rows - 1) / Shape::rows);
}

__device__ inline bool in_vectors(const void* data, int64_t ld, int extent) {
  return ld % unit == 0 && extent % unit == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

// Starts to copy a part of a matrix of rows x cols elements, from (row, col) on; zeros where the
// matrix has ended.
template <int height, int width, int ld_to, int threads, typename T>
__device__ void start_copy(T* to, const void* matrix, int64_t ld, int row, int col, int rows,
                           int cols) {
  const auto* from = static_cast<const T*>(matrix);
  if (in_vectors(matrix, ld, cols)) {
    for (int i = threadIdx.x; i < height * width / unit; i += threads) {
      const int down = i / (width / unit), across = i % (width / unit) * unit;
      const bool inside = row + down < rows && col + across < cols;
      const T* source = inside ? from + (row + down) * ld + col + across : from;
      __pipeline_memcpy_async(to + down * ld_to + across, source, 16, inside ? 0 : 16);
    }
  } else {
    for (int i = threadIdx.x; i < height * width; i += threads) {
      const int down = i / width, across = i % width;
      const bool inside = row + down < rows && col + across < cols;
      to[down * ld_to + across] = inside ? from[(row + down) * ld + col + across] : narrow<T>(0.0f);
    }
  }
  __pipeline_commit();
}

template <typename T>
__device__ void load_row(const T* from, int count, bool in_vector, float (&to)[unit]) {
  if (in_vector) return widen(*reinterpret_cast<const Vector<T, unit>*>(from), to);
#pragma unroll
  for (int j = 0; j < unit; ++j) to[j] = j < count ? widen(from[j]) : 0.0f;
}

template <typename T>
__device__ void store_row(T* to, int count, bool in_vector, const float (&from)[unit]) {
  if (in_vector) {
    *reinterpret_cast<Vector<T, unit>*>(to) = narrow<T, unit>(from);
  } else {
#pragma unroll
    for (int j = 0; j < unit; ++j) {
      if (j < count) to[j] = narrow<T>(from[j]);
    }
  }
}

template <typename T, gemm::Pass pass, Activation activation>
__device__ void small_product_block(const SmallProduct& p) {
  namespace wmma = nvcuda::wmma;
  using Shape = SmallShape<pass>;
  using RowMajor = wmma::row_major;
  using ColumnMajor = wmma::col_major;
  using LeftLayout = std::conditional_t<Shape::left_by_inner, ColumnMajor, RowMajor>;
  using RightLayout = std::conditional_t<Shape::right_by_inner, RowMajor, ColumnMajor>;
  constexpr bool sums_result = pass == gemm::Pass::dgrad, sums_left = pass == gemm::Pass::wgrad;

  // The products lie where the left operand was.
  constexpr size_t left_bytes = std::max(Shape::left * sizeof(T), Shape::products * sizeof(float));
  alignas(32) __shared__ unsigned char shared[left_bytes + Shape::right * sizeof(T)];
  __shared__ float partial_sums[Shape::parts * Shape::summed];
  auto* left = reinterpret_cast<T*>(shared);
  auto* products = reinterpret_cast<float*>(shared);
  auto* right = reinterpret_cast<T*>(shared + left_bytes);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first_col = blockIdx.x * tile;
  const int summed = threadIdx.x % Shape::summed, part = threadIdx.x / Shape::summed;
  const bool sums = p.sums != nullptr && (sums_result || (sums_left && blockIdx.x == 0));
  float sum = 0.0f;

  for (int first_row = blockIdx.y * Shape::rows; first_row < p.rows;
       first_row += gridDim.y * Shape::rows) {
    const bool has_rows = first_row + warp * tile < p.rows;
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
      for (int k = 0; has_rows && k < Shape::inner && begin + k < p.inner; k += tile) {
        wmma::fragment<wmma::matrix_a, tile, tile, tile, T, LeftLayout> a;
        wmma::fragment<wmma::matrix_b, tile, tile, tile, T, RightLayout> b;
        wmma::load_matrix_sync(a,
                               Shape::left_by_inner ? left + k * Shape::ld_left + warp * tile
                                                    : left + warp * tile * Shape::ld_left + k,
                               Shape::ld_left);
        wmma::load_matrix_sync(b, Shape::right_by_inner ? right + k * Shape::ld_right : right + k,
                               Shape::ld_right);
        wmma::mma_sync(product, a, b, product);
      }
      if constexpr (sums_left) {
        for (int k = part; sums && k < Shape::inner; k += Shape::parts) {
          sum += widen(left[k * Shape::ld_left + summed]);
        }
      }
      __syncthreads();
    }

    auto* own = products + warp * tile * Shape::ld_products;
    wmma::store_matrix_sync(own, product, Shape::ld_products, wmma::mem_row_major);
    __syncwarp();
    const int row = first_row + warp * tile + lane / 2, col = first_col + lane % 2 * unit;
    auto* values = own + lane / 2 * Shape::ld_products + lane % 2 * unit;
    const int count = row < p.rows ? min(unit, p.cols - col) : 0;
    if (count > 0) {
      auto* aux = static_cast<T*>(p.aux) + row * p.ld_aux + col;
      const bool aux_in_vectors = in_vectors(p.aux, p.ld_aux, p.cols);
      float value[unit];
      [[maybe_unused]] float saved[unit];
      if constexpr (pass == gemm::Pass::dgrad && activation != Activation::none) {
        load_row(aux, count, aux_in_vectors, saved);
      }
#pragma unroll
      for (int j = 0; j < unit; ++j) {
        value[j] = values[j];
        if constexpr (pass == gemm::Pass::fprop) {
          const bool biased = p.bias != nullptr && j < count;
          if (biased) value[j] += widen(static_cast<const T*>(p.bias)[col + j]);
        }
        if constexpr (pass == gemm::Pass::dgrad && activation != Activation::none) {
          value[j] = activation_gradient<activation, true>(value[j], saved[j]);
        }
      }
      if constexpr (pass == gemm::Pass::fprop && activation != Activation::none) {
        if (p.aux != nullptr) store_row(aux, count, aux_in_vectors, value);
#pragma unroll
        for (int j = 0; j < unit; ++j) value[j] = activate<activation, true>(value[j]);
      }
      store_row(static_cast<T*>(p.result) + row * p.ld_result + col, count,
                in_vectors(p.result, p.ld_result, p.cols), value);
      if constexpr (sums_result) {
#pragma unroll
        for (int j = 0; j < unit; ++j) values[j] = value[j];
      }
    }
    __syncthreads();
    if constexpr (sums_result) {
      for (int r = part; sums && r < Shape::rows && first_row + r < p.rows; r += Shape::parts) {
        sum += products[r * Shape::ld_products + summed];
      }
      __syncthreads();
    }
  }

  if (!sums) return;
  partial_sums[part * Shape::summed + summed] = sum;
  __syncthreads();
  const int at = (sums_left ? blockIdx.y * Shape::rows : first_col) + summed;
  if (part != 0 || at >= (sums_left ? p.rows : p.cols)) return;
  for (int other = 1; other < Shape::parts; ++other) {
    sum += partial_sums[other * Shape::summed + summed];
  }
  static_cast<T*>(p.sums)[at] = narrow<T>(sum);
}

}  // namespace
}  // namespace fused::cuda::kernels
