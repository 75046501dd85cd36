#pragma once

// The kernels of small_product.h. A block computes 16 columns of the result, by tensor cores in 16
// bits, by single multiplications in fp32. Its warps split each sum, so that all reads are under
// way at once, and add up their parts in a fixed order.

#include "cuda/kernels/activation_math.cuh"
#include "cuda/small/kernels/small_product.h"

#include <cuda_pipeline.h>
#include <mma.h>

#include <algorithm>

namespace fused::cuda::kernels {
namespace {  // each file's kernels are its own

namespace wmma = nvcuda::wmma;

constexpr int tile = 16;

// A block has `down` tiles. `split` warps share the sums of each.
template <typename T, gemm::Pass pass>
struct SmallShape {
  static constexpr bool forward = pass == gemm::Pass::fprop, of_weight = pass == gemm::Pass::wgrad;
  static constexpr int down = pass == gemm::Pass::dgrad ? 4 : 1;
  static constexpr int split = of_weight ? 16 : forward && sizeof(T) == 4 ? 8 : 4;
  static constexpr int threads = 32 * down * split, rows = tile * down;
  static constexpr int inner = pass == gemm::Pass::dgrad ? 128 : 256;  // at a time
  // Shared memory holds the operands as global memory does, with neighbouring rows in other banks.
  static constexpr bool left_by_inner = of_weight, right_by_inner = !forward;
  static constexpr int pad = full_vector<T>;
  static constexpr int ld_left = (left_by_inner ? rows : inner) + pad;
  static constexpr int ld_right = (right_by_inner ? tile : inner) + pad;
  static constexpr int left = (left_by_inner ? inner : rows) * ld_left;
  static constexpr int right = (right_by_inner ? inner : tile) * ld_right;
  static constexpr int ld_products = tile + 4;
  static constexpr int products = split * rows * ld_products;
  // A thread finishes neighbours in a row, and adds up one of the parts of a column's sum.
  static constexpr int width = std::max(sizeof(T) == 4 ? 1 : 2, rows* tile / threads);
  static constexpr int parts = threads / tile;
  // The products overwrite the operands.
  static constexpr size_t operand_bytes =
      std::max((left + right) * sizeof(T), products * sizeof(float));
  static constexpr size_t bytes = operand_bytes + (forward ? 0 : threads * sizeof(float));
};

template <typename T>
constexpr int small_forward_threads = SmallShape<T, gemm::Pass::fprop>::threads;
constexpr int small_backward_threads = SmallShape<float, gemm::Pass::wgrad>::threads;

__host__ __device__ constexpr int tiles(int extent) { return (extent + tile - 1) / tile; }

// Returns the number of blocks for all rows of a column of tiles, and the number of all blocks.
template <typename T, gemm::Pass pass>
__host__ __device__ int small_blocks_down(const SmallProduct& p) {
  constexpr int rows = SmallShape<T, pass>::rows;
  return p.cluster > 0 ? p.cluster : (p.rows + rows - 1) / rows;
}
template <typename T, gemm::Pass pass>
int small_blocks(const SmallProduct& p) {
  return tiles(p.cols) * small_blocks_down<T, pass>(p);
}

template <typename T>
__device__ bool in_vectors(const void* data, int64_t ld, int extent, int width) {
  return ld % width == 0 && extent % width == 0 &&
         reinterpret_cast<uintptr_t>(data) % (sizeof(T) * width) == 0;
}

// Starts to copy rows x cols elements from (row, col) on, with zeros behind the matrix up to the
// next tile.
template <int height, int width, int ld_to, int threads, typename T>
__device__ void start_copy(T* to, const void* matrix, int64_t ld, int row, int col, int rows,
                           int cols) {
  constexpr int unit = full_vector<T>;
  const auto* from = static_cast<const T*>(matrix) + row * ld + col;
  const int down_end = min(height, tiles(rows) * tile - row);
  const int across_end = min(width, tiles(cols) * tile - col);
  const auto is_inside = [=](int down, int across) {
    return row + down < rows && col + across < cols;
  };
  if (in_vectors<T>(matrix, ld, cols, unit)) {
#pragma unroll
    for (int turn = 0; turn < height * width / unit; turn += threads) {
      const int i = turn + threadIdx.x;
      const int down = i / (width / unit), across = i % (width / unit) * unit;
      if (down >= down_end || across >= across_end) continue;
      const bool inside = is_inside(down, across);
      __pipeline_memcpy_async(to + down * ld_to + across,
                              inside ? from + down * ld + across : static_cast<const T*>(matrix),
                              16, inside ? 0 : 16);
    }
  } else {
    // A warp a row: here rows of a few elements are common.
#pragma unroll 1
    for (int across = threadIdx.x % 32; across < across_end; across += 32) {
#pragma unroll 4
      for (int down = threadIdx.x / 32; down < down_end; down += threads / 32) {
        const bool inside = is_inside(down, across);
        T* const place = to + down * ld_to + across;
        const T* const source = from + down * ld + across;
        if constexpr (sizeof(T) == 4) {
          __pipeline_memcpy_async(place, inside ? source : static_cast<const T*>(matrix), 4,
                                  inside ? 0 : 4);
        } else {
          *place = inside ? *source : narrow<T>(0.0f);
        }
      }
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

template <typename T, typename Shape>
class WarpProduct {
 public:
  __device__ WarpProduct() { wmma::fill_fragment(sums_, 0.0f); }

  __device__ void add(const T* left, const T* right) {
    Fragment<wmma::matrix_a, Shape::left_by_inner> a;
    Fragment<wmma::matrix_b, !Shape::right_by_inner> b;
    wmma::load_matrix_sync(a, left, Shape::ld_left);
    wmma::load_matrix_sync(b, right, Shape::ld_right);
    wmma::mma_sync(sums_, a, b, sums_);
  }

  __device__ void store(float* to) const {
    wmma::store_matrix_sync(to, sums_, Shape::ld_products, wmma::mem_row_major);
  }

 private:
  template <typename Use, bool by_columns>
  using Fragment = wmma::fragment<Use, tile, tile, tile, T,
                                  std::conditional_t<by_columns, wmma::col_major, wmma::row_major>>;
  wmma::fragment<wmma::accumulator, tile, tile, tile, float> sums_;
};

// With single multiplications a thread computes two rows and four columns of the tile.
template <typename Shape>
class WarpProduct<float, Shape> {
 public:
  // Short sums are added up, because a long sum loses more to rounding.
  __device__ void add(const float* left, const float* right) {
    float of_tile[down][across] = {};
#pragma unroll
    for (int k = 0; k < tile; k += width) {
      float a[width][down], b[width][across];
      load<Shape::left_by_inner, Shape::ld_left>(left, lane() / groups, k, a);
      load<Shape::right_by_inner, Shape::ld_right>(right, lane() % groups, k, b);
#pragma unroll
      for (int r = 0; r < down; ++r) {
#pragma unroll
        for (int c = 0; c < across; ++c) {
          float part = 0.0f;
#pragma unroll
          for (int inner = 0; inner < width; ++inner) part += a[inner][r] * b[inner][c];
          of_tile[r][c] += part;
        }
      }
    }
#pragma unroll
    for (int r = 0; r < down; ++r) {
#pragma unroll
      for (int c = 0; c < across; ++c) sums_[r][c] += of_tile[r][c];
    }
  }

  __device__ void store(float* to) const {
#pragma unroll
    for (int r = 0; r < down; ++r) {
#pragma unroll
      for (int c = 0; c < across; ++c) {
        to[place<Shape::left_by_inner, down>(lane() / groups, r) * Shape::ld_products +
           place<Shape::right_by_inner, across>(lane() % groups, c)] = sums_[r][c];
      }
    }
  }

 private:
  static constexpr int down = 2, across = 4, groups = tile / across, width = 4;

  __device__ static int lane() { return threadIdx.x % 32; }

  // A thread has neighbours where they lie next to each other in memory, else a load's threads
  // have.
  template <bool by_inner, int count>
  __device__ static int place(int group, int i) {
    return by_inner ? group * count + i : group + tile / count * i;
  }

  template <bool by_inner, int ld, int count>
  __device__ static void load(const float* from, int group, int k, float (&to)[width][count]) {
    if constexpr (by_inner) {
#pragma unroll
      for (int inner = 0; inner < width; ++inner) {
        const auto* row = from + (k + inner) * ld + place<by_inner, count>(group, 0);
        widen(*reinterpret_cast<const Vector<float, count>*>(row), to[inner]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        float row[width];
        widen(*reinterpret_cast<const Vector<float, width>*>(
                  from + place<by_inner, count>(group, i) * ld + k),
              row);
#pragma unroll
        for (int inner = 0; inner < width; ++inner) to[inner][i] = row[inner];
      }
    }
  }

  float sums_[down][across] = {};
};

template <int count>
__device__ float pairwise(const float* numbers, int apart) {
  if constexpr (count == 1) {
    return *numbers;
  } else {
    return pairwise<count / 2>(numbers, apart) +
           pairwise<count / 2>(numbers + count / 2 * apart, apart);
  }
}

// One block of a product. The summed columns of an input's gradient belong to a cluster of blocks,
// which have all of their rows.
template <typename T, gemm::Pass pass, Activation activation>
class SmallBlock {
 public:
  // `waits`: other blocks of the cluster are writing the left operand.
  __device__ SmallBlock(const SmallProduct& product, int block, unsigned char* shared,
                        bool waits = false)
      : p(product),
        waits(waits),
        left(reinterpret_cast<T*>(shared)),
        right(left + Shape::left),
        products(reinterpret_cast<float*>(shared)),
        partial_sums(reinterpret_cast<float*>(shared + Shape::operand_bytes)) {
    const int blocks_down = small_blocks_down<T, pass>(p);
    block_row = block % blocks_down;
    first_col = block / blocks_down * tile;
    col = first_col + across();
  }

  __device__ void run() {
    const int step = p.cluster > 0 ? p.cluster * Shape::rows : p.rows;
    for (int first_row = block_row * Shape::rows; first_row < p.rows; first_row += step) {
      row = first_row + down();
      count = down() < Shape::rows && row < p.rows ? min(width, p.cols - col) : 0;
      Row around;
      load_around(around);
      multiply(first_row);
      finish(around);
      if (sums_results()) add_up(products, Shape::ld_products, p.rows - first_row, Shape::rows);
      __syncthreads();
    }
    if (sums_results() || sums_left()) write_sums();
  }

 private:
  using Shape = SmallShape<T, pass>;
  static constexpr bool reads_aux = pass == gemm::Pass::dgrad && activation != Activation::none;
  static constexpr bool quick = sizeof(T) == 2;
  static constexpr int width = Shape::width;
  using Row = float[width];

  __device__ static int down() { return threadIdx.x * width / tile; }
  __device__ static int across() { return threadIdx.x * width % tile; }
  __device__ static int summed() { return threadIdx.x % tile; }
  __device__ static int share() { return threadIdx.x / tile; }

  __device__ bool sums_results() const { return pass == gemm::Pass::dgrad && p.sums != nullptr; }
  __device__ bool sums_left() const {
    return pass == gemm::Pass::wgrad && p.sums != nullptr && first_col == 0;
  }
  __device__ T* aux() const { return static_cast<T*>(p.aux) + row * p.ld_aux + col; }
  __device__ bool aux_in_vectors() const { return in_vectors<T>(p.aux, p.ld_aux, p.cols, width); }

  __device__ void load_around(Row& to) const {
#pragma unroll
    for (int j = 0; j < width; ++j) to[j] = 0.0f;
    if (count <= 0) return;
    if constexpr (reads_aux) load_row(aux(), count, aux_in_vectors(), to);
    if constexpr (Shape::forward) {
      if (p.bias != nullptr) load_row(static_cast<const T*>(p.bias) + col, count, false, to);
    }
  }

  __device__ void multiply(int first_row) {
    const int warp = threadIdx.x / 32, part = warp % Shape::split;
    const int warp_row = warp / Shape::split * tile;
    WarpProduct<T, Shape> product;
    for (int begin = 0; begin < p.inner; begin += Shape::inner) {
      copy_operands(first_row, begin);
      __syncthreads();
      if (first_row + warp_row < p.rows) {
#pragma unroll
        for (int i = 0; i < Shape::inner / (Shape::split * tile); ++i) {
          const int k = (i * Shape::split + part) * tile;
          if (begin + k >= p.inner) break;
          product.add(Shape::left_by_inner ? left + k * Shape::ld_left + warp_row
                                           : left + warp_row * Shape::ld_left + k,
                      Shape::right_by_inner ? right + k * Shape::ld_right : right + k);
        }
      }
      if (sums_left()) add_up(left, Shape::ld_left, p.inner - begin, Shape::inner);
      __syncthreads();
    }
    product.store(products + (part * Shape::rows + warp_row) * Shape::ld_products);
    __syncthreads();
  }

  __device__ void copy_operands(int first_row, int begin) {
    if constexpr (Shape::right_by_inner) {
      start_copy<Shape::inner, tile, Shape::ld_right, Shape::threads>(
          right, p.right, p.ld_right, begin, first_col, p.inner, p.cols);
    } else {
      start_copy<tile, Shape::inner, Shape::ld_right, Shape::threads>(
          right, p.right, p.ld_right, first_col, begin, p.cols, p.inner);
    }
    if (waits) cluster_sync();
    waits = false;
    if constexpr (Shape::left_by_inner) {
      start_copy<Shape::inner, Shape::rows, Shape::ld_left, Shape::threads>(
          left, p.left, p.ld_left, begin, first_row, p.inner, p.rows);
    } else {
      start_copy<Shape::rows, Shape::inner, Shape::ld_left, Shape::threads>(
          left, p.left, p.ld_left, first_row, begin, p.rows, p.inner);
    }
    __pipeline_wait_prior(0);
  }

  // Adds up the parts of this thread's results, and writes them; summed ones stay in shared memory.
  __device__ void finish(const Row& around) {
    if (count > 0) {
      auto* values = products + down() * Shape::ld_products + across();
      Row value;
#pragma unroll
      for (int j = 0; j < width; ++j) {
        value[j] = pairwise<Shape::split>(values + j, Shape::rows * Shape::ld_products);
        if constexpr (Shape::forward) value[j] += around[j];
        if constexpr (reads_aux) {
          value[j] = activation_gradient<activation, quick>(value[j], around[j]);
        }
      }
      if constexpr (Shape::forward && activation != Activation::none) {
        if (p.aux != nullptr) store_row(aux(), count, aux_in_vectors(), value);
#pragma unroll
        for (int j = 0; j < width; ++j) value[j] = activate<activation, quick>(value[j]);
      }
      store_row(static_cast<T*>(p.result) + row * p.ld_result + col, count,
                in_vectors<T>(p.result, p.ld_result, p.cols, width), value);
      if (sums_results()) {
#pragma unroll
        for (int j = 0; j < width; ++j) values[j] = value[j];
      }
    }
    __syncthreads();
  }

  // Adds this thread's share of `count` rows, of which the first `there` exist.
  template <typename From>
  __device__ void add_up(const From* from, int ld, int there, int count) {
    for (int r = share(); r < min(there, count); r += Shape::parts) {
      sum += widen(from[r * ld + summed()]);
    }
  }

  __device__ void write_sums() {
    partial_sums[threadIdx.x] = sum;
    __syncthreads();
    if (share() == 0) {
      sum = pairwise<Shape::parts>(partial_sums + summed(), tile);
      partial_sums[summed()] = sum;
    }
    const bool is_shared = sums_results() && p.cluster > 1;
    if (is_shared) cluster_sync();
    const int at = (sums_left() ? block_row * Shape::rows : first_col) + summed();
    const bool writes = share() == 0 && at < (sums_left() ? p.rows : p.cols);
    if (writes && (block_row == 0 || !is_shared)) {
      for (int other = 1; is_shared && other < p.cluster; ++other) {
        sum += *in_block(partial_sums + summed(), other);
      }
      static_cast<T*>(p.sums)[at] = narrow<T>(sum);
    }
    if (is_shared) cluster_sync();  // shared memory lives no longer than its block
  }

  const SmallProduct& p;
  bool waits;
  T *const left, *const right;
  float *const products, *const partial_sums;
  int block_row, first_col, row = 0, col, count = 0;
  float sum = 0.0f;
};

// In a network, a block computes some rows and columns of one layer after the other.
template <typename T, Activation activation>
__device__ void small_network_block(const SmallNetwork& network, int block, int cluster,
                                    unsigned char* shared) {
  for (int i = 0; i < network.count; ++i) {
    const auto& layer = network.layers[i];
    bool waits = i > 0;
    for (int col = block % cluster; col < tiles(layer.cols); col += cluster) {
      const int part = block / cluster + col * tiles(layer.rows);
      if (layer.activation == Activation::none) {
        SmallBlock<T, gemm::Pass::fprop, Activation::none>(layer, part, shared, waits).run();
      } else {
        SmallBlock<T, gemm::Pass::fprop, activation>(layer, part, shared, waits).run();
      }
      waits = false;
    }
    if (waits) cluster_sync();
  }
}

template <typename T>
__device__ SmallProduct of_member(SmallProduct p, int64_t member) {
  const auto move = [member](auto*& data, int64_t apart) {
    if (data != nullptr) data = const_cast<T*>(static_cast<const T*>(data)) + member * apart;
  };
  move(p.left, p.apart.left), move(p.right, p.apart.right), move(p.result, p.apart.result);
  move(p.bias, p.apart.bias), move(p.aux, p.apart.aux), move(p.sums, p.apart.sums);
  return p;
}

}  // namespace
}  // namespace fused::cuda::kernels
