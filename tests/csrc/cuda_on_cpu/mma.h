#pragma once

// The parts of CUDA that kernels use, on a CPU: a block's threads are threads, one block runs at a
// time, and a fragment of wmma's is the whole tile in each thread. Found before CUDA's own header
// of this name.

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <pthread.h>

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#undef __shared__
#define __shared__ static

using std::min;

inline thread_local uint3 threadIdx, blockIdx;

// std::barrier polls before it sleeps: hundreds of threads on two cores would do little else.
class Barrier {
 public:
  explicit Barrier(unsigned threads) { pthread_barrier_init(&barrier_, nullptr, threads); }
  ~Barrier() { pthread_barrier_destroy(&barrier_); }
  void arrive_and_wait() { pthread_barrier_wait(&barrier_); }

 private:
  pthread_barrier_t barrier_;
};
inline thread_local Barrier *warp_barrier, *block_barrier;
inline thread_local unsigned cluster_rank;
inline std::unique_ptr<Barrier> cluster_barrier;

inline void __syncthreads() { block_barrier->arrive_and_wait(); }
inline void __syncwarp() { warp_barrier->arrive_and_wait(); }
inline void cluster_sync() { cluster_barrier->arrive_and_wait(); }

// The blocks of a cluster have their shared memory one behind the other.
inline std::vector<unsigned char> cluster_memory;
inline size_t shared_bytes;
inline unsigned char* shared_memory(unsigned rank = cluster_rank) {
  const auto address = reinterpret_cast<uintptr_t>(cluster_memory.data());
  return cluster_memory.data() + (32 - address % 32) % 32 + rank * shared_bytes;
}
template <typename T>
T* in_block(T* shared, unsigned rank) {
  const auto place = reinterpret_cast<unsigned char*>(shared) - shared_memory();
  return reinterpret_cast<T*>(shared_memory(rank) + place);
}

// kernel(shared) by each thread of each block, `cluster` blocks at a time. Their shared memory, of
// so many bytes, holds NaN at first.
template <typename Kernel>
void on_cpu(unsigned grid, int threads, size_t bytes, const Kernel& kernel, unsigned cluster = 1) {
  shared_bytes = (bytes + 31) / 32 * 32;
  cluster_memory.assign(cluster * shared_bytes + 32, 0xff);
  cluster_barrier = std::make_unique<Barrier>(threads * cluster);
  std::vector<std::unique_ptr<Barrier>> blocks, warps;
  for (unsigned i = 0; i < cluster; ++i) blocks.push_back(std::make_unique<Barrier>(threads));
  for (unsigned i = 0; i < threads / 32 * cluster; ++i) {
    warps.push_back(std::make_unique<Barrier>(32));
  }
  std::vector<std::thread> all;
  for (unsigned i = 0; i < threads * cluster; ++i) {
    all.emplace_back([&, i] {
      threadIdx = {i % threads, 0, 0};
      cluster_rank = i / threads;
      warp_barrier = warps[i / 32].get();
      block_barrier = blocks[cluster_rank].get();
      for (unsigned x = cluster_rank; x < grid; x += cluster) {
        blockIdx = {x, 0, 0};
        kernel(shared_memory());
        cluster_sync();
        if (threadIdx.x == 0) std::fill_n(shared_memory(), shared_bytes, 0xff);
        __syncthreads();
      }
    });
  }
  for (auto& thread : all) thread.join();
}

namespace nvcuda::wmma {

struct row_major {};
struct col_major {};
struct matrix_a {};
struct matrix_b {};
struct accumulator {};
enum layout_t { mem_row_major, mem_col_major };

template <typename Use, int m, int n, int k, typename T, typename Layout = row_major>
struct fragment {
  float values[16][16];  // by row
};

template <typename Use, typename T, typename Layout>
void fill_fragment(fragment<Use, 16, 16, 16, T, Layout>& to, float value) {
  for (auto& row : to.values) std::fill(std::begin(row), std::end(row), value);
}

// As the functions of this name demand it.
inline void check(const void* address, unsigned ld, size_t size) {
  assert(reinterpret_cast<uintptr_t>(address) % 32 == 0 && ld * size % 16 == 0);
}

template <typename Use, typename T, typename Layout>
void load_matrix_sync(fragment<Use, 16, 16, 16, T, Layout>& to, const T* from, unsigned ld) {
  check(from, ld, sizeof(T));
  for (int r = 0; r < 16; ++r) {
    for (int c = 0; c < 16; ++c) {
      constexpr bool by_row = std::is_same_v<Layout, row_major>;
      to.values[r][c] = static_cast<float>(from[by_row ? r * ld + c : c * ld + r]);
    }
  }
}

template <typename A, typename B, typename C>
void mma_sync(C& d, const A& a, const B& b, const C& c) {
  C result = c;
  for (int r = 0; r < 16; ++r) {
    for (int k = 0; k < 16; ++k) {
      for (int n = 0; n < 16; ++n) result.values[r][n] += a.values[r][k] * b.values[k][n];
    }
  }
  d = result;
}

template <typename Fragment>
void store_matrix_sync(float* to, const Fragment& from, unsigned ld, layout_t layout) {
  check(to, ld, sizeof(float));
  assert(layout == mem_row_major);
  if (threadIdx.x % 32 != 0) return;  // a warp stores together
  for (int r = 0; r < 16; ++r) std::copy_n(from.values[r], 16, to + r * ld);
}

}  // namespace nvcuda::wmma
