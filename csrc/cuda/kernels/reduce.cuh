#pragma once

// Sums over a block and over blocks, in an order fixed by the sizes: the same input gives the same
// bits.

#include "cuda/kernels/activation.h"
#include "cuda/kernels/activation_math.cuh"
#include "cuda/kernels/launch.cuh"

#include <cooperative_groups.h>

#include <algorithm>
#include <type_traits>

namespace fused::cuda::kernels {
namespace {  // each file's kernels are its own

// Adds up the values of threads with the same threadIdx.x in pairs, which is faster and more exact
// than one after the other. Threads with threadIdx.y == 0 hold the sum.
template <typename A, int width>
__device__ void sum_over_y(A (&sums)[width], A* shared) {
  const int threads = blockDim.x * blockDim.y;
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  for (int half = blockDim.y / 2; half > 0; half /= 2) {
    if (threadIdx.y >= half && threadIdx.y < 2 * half) {
#pragma unroll
      for (int j = 0; j < width; ++j) shared[j * threads + thread] = sums[j];
    }
    __syncthreads();
    if (threadIdx.y < half) {
#pragma unroll
      for (int j = 0; j < width; ++j) sums[j] += shared[j * threads + thread + half * blockDim.x];
    }
  }
}

template <typename A>
__device__ A sum_over_block(A sum, A* shared) {
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  shared[thread] = sum;
  for (int half = blockDim.x * blockDim.y / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) shared[thread] += shared[thread + half];
  }
  return shared[0];
}

template <typename T>
__device__ void put_sum(Accumulator<T> sum, const Sums& sums, int64_t col) {
  const auto put = [&](auto& to) {
    if (sums.adds) sum += widen(to);
    to = narrow<std::remove_reference_t<decltype(to)>>(sum);
  };
  if (sizeof(T) == 2 && sums.to_f32) {
    put(static_cast<float*>(sums.data)[col]);
  } else {
    put(static_cast<T*>(sums.data)[col]);
  }
}

template <typename T>
__global__ void __launch_bounds__(block_threads)
    sum_partials_kernel(const Accumulator<T>* partials, int64_t chunks, int64_t cols, int64_t ld,
                        Sums sums) {
  using A = Accumulator<T>;
  __shared__ A shared[block_threads];
  wait_for_previous_kernel();
  const int64_t col = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  A sum[1] = {};
  if (col < cols) {
    for (int64_t chunk = threadIdx.y; chunk < chunks; chunk += blockDim.y) {
      sum[0] += partials[chunk * ld + col];
    }
  }
  sum_over_y(sum, shared);
  if (threadIdx.y == 0 && col < cols) put_sum<T>(sum[0], sums, col);
}

// A cluster's blocks read each other's shared memory, so one kernel can add up a few chunks.
constexpr int cluster_arch = 90;
constexpr int most_blocks_in_cluster = 8;  // on every device that has clusters

// Returns whether the current device has room for the largest cluster, and our code was compiled
// for clusters.
inline bool has_clusters(int device_arch) {
  if (device_arch < cluster_arch) return false;
  static PerDevice has;
  return has([] {
    cudaLaunchAttribute shape;
    shape.id = cudaLaunchAttributeClusterDimension;
    shape.val.clusterDim = {1, most_blocks_in_cluster, 1};
    const cudaLaunchConfig_t config{
        dim3(1, most_blocks_in_cluster), dim3(block_threads), 0, nullptr, &shape, 1};
    if (compiled_arch(sum_partials_kernel<float>) < cluster_arch) return false;
    int clusters = 0;
    if (cudaOccupancyMaxActiveClusters(&clusters, sum_partials_kernel<float>, &config) ==
        cudaSuccess) {
      return clusters > 0;
    }
    static_cast<void>(cudaGetLastError());  // a refusal is an answer
    return false;
  });
}

// Adds up the values of the cluster's blocks, which threads with threadIdx.y == 0 hold. The first
// block holds the sum. All threads must call this.
template <typename A, int width>
__device__ void sum_over_cluster(A (&sums)[width], A* shared, bool holds_column) {
#if __CUDA_ARCH__ >= 900
  namespace groups = cooperative_groups;
  const auto cluster = groups::this_cluster();
  const int threads = blockDim.x * blockDim.y;
  const bool adds = holds_column && threadIdx.y == 0;
  if (adds && cluster.block_rank() > 0) {
#pragma unroll
    for (int j = 0; j < width; ++j) shared[j * threads + threadIdx.x] = sums[j];
  }
  cluster.sync();
  if (adds && cluster.block_rank() == 0) {
    for (unsigned rank = 1; rank < cluster.num_blocks(); ++rank) {
      const A* theirs = cluster.map_shared_rank(shared, rank);
#pragma unroll
      for (int j = 0; j < width; ++j) sums[j] += theirs[j * threads + threadIdx.x];
    }
  }
  cluster.sync();  // shared memory lives no longer than its block
#endif
}

// Splits the rows into chunks, one for each blockIdx.y.
struct Chunks {
  dim3 block, grid;
  int64_t rows_each;
  bool cluster;  // a cluster adds up a column's chunks, and no second kernel is needed

  // Bytes of partial sums, [chunks, cols]; 0 if one block or cluster sums a column.
  int64_t partial_bytes(int64_t cols, gemm::Type type) const {
    return cluster || grid.y == 1 ? 0 : grid.y * cols * (type == gemm::Type::f64 ? 8 : 4);
  }
};

inline int64_t blocks_in_wave(int64_t blocks, int64_t vectors_per_row, dim3 block) {
  return std::max<int64_t>(1, blocks / ((vectors_per_row + block.x - 1) / block.x));
}

// Makes at most `chunks` chunks. Each is a multiple of the rows that a block computes at once.
inline Chunks in_chunks(int64_t rows, int64_t vectors_per_row, dim3 block, int64_t chunks,
                        bool cluster) {
  chunks = std::clamp(chunks, int64_t{1}, most_blocks_down);
  const int64_t passes = (rows + chunks * block.y - 1) / (chunks * block.y);
  const int64_t rows_each = std::max<int64_t>(passes, 1) * block.y;
  const dim3 grid((vectors_per_row + block.x - 1) / block.x, (rows + rows_each - 1) / rows_each);
  return {block, grid, rows_each, cluster && grid.y > 1};
}

template <typename... Parameters, typename... Arguments>
void launch_chunks(void (*kernel)(Parameters...), const Chunks& chunks, cudaStream_t stream,
                   Arguments... arguments) {
  cudaLaunchAttribute shape;
  shape.id = cudaLaunchAttributeClusterDimension;
  shape.val.clusterDim = {1, chunks.grid.y, 1};
  const cudaLaunchConfig_t config{chunks.grid, chunks.block, 0, stream, &shape, chunks.cluster};
  check(cudaLaunchKernelEx(&config, kernel, arguments...));
}

// Writes the sums of `width` columns from `col` on. They go into the result if a cluster adds up
// the chunks or there is one chunk, else into `partials`, [chunks, cols].
template <typename T, int width>
__device__ void put_sums(Accumulator<T> (&sums)[width], Accumulator<T>* shared, bool holds_column,
                         int64_t col, int64_t cols, Accumulator<T>* partials, const Sums& result) {
  const bool is_cluster = partials == nullptr && gridDim.y > 1;
  if (is_cluster) sum_over_cluster(sums, shared, holds_column);
  if (threadIdx.y != 0 || !holds_column || (is_cluster && blockIdx.y > 0)) return;
#pragma unroll
  for (int j = 0; j < width; ++j) {
    if (partials != nullptr) {
      partials[blockIdx.y * cols + col + j] = sums[j];
    } else {
      put_sum<T>(sums[j], result, col + j);
    }
  }
}

template <typename T>
void sum_partials(const Accumulator<T>* partials, int64_t chunks, int64_t cols, int64_t ld,
                  const Sums& sums, cudaStream_t stream) {
  launch_early(sum_partials_kernel<T>, dim3((cols + 31) / 32), dim3(32, 8), 1, stream, partials,
               chunks, cols, ld, sums);
}

}  // namespace
}  // namespace fused::cuda::kernels
