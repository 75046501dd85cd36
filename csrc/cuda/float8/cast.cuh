#pragma once

// The two kernels of a cast, for any source.

#include "cuda/float8/sources.cuh"
#include "cuda/float8/transpose.cuh"
#include "cuda/kernels/launch.cuh"
#include "cuda/kernels/reduce.cuh"

#include <cuda_fp8.h>

#include <algorithm>

// True for architectures with instructions that convert to FP8. Kernels for older GPUs are empty,
// and are never launched.
#define FUSED_FLOAT8_ARCH 890

namespace fused::cuda::float8 {
namespace {  // each file's kernels are its own

// --- shapes --------------------------------------------------------------------------------------

// The first kernel's blocks: a thread owns a vector of columns and walks down the rows.
struct Walk {
  dim3 block, grid;  // grid.y is the number of chunks of rows
};

constexpr int maximum_threads = 256;
constexpr int maximum_blocks = 4;  // a multiprocessor

// Rows that a thread loads before it uses the first.
template <typename Source>
constexpr int rows_in_flight =
    (Source::operands == 3 ? 2 : 4) / (int{sizeof(typename Source::T)} / 2);

// Narrow matrices get narrow blocks, so that there are fewer chunks whose sums must be added up.
inline Walk walk_of(const Size& size) {
  const int64_t vectors = (size.cols + width - 1) / width;
  const int wide = vectors <= 256 ? 8 : vectors <= 1024 ? 16 : 32;
  Walk walk;
  walk.block = dim3(wide, maximum_threads / wide);
  const int64_t across = std::max<int64_t>(1, (vectors + wide - 1) / wide);
  const int64_t passes = (size.rows + walk.block.y - 1) / walk.block.y;
  const int64_t wave = std::max<int64_t>(1, size.processors * maximum_blocks / across);
  walk.grid = dim3(across, std::max<int64_t>(1, std::min(wave, passes)));
  return walk;
}

// The first kernel writes it, the second reads it.
struct Scratch {
  float* maxima;    // [results, blocks]
  float* partials;  // [results, chunks, cols]
  int blocks, chunks;

  Scratch(const Size& size, int results, void* data) : maxima(static_cast<float*>(data)) {
    const Walk walk = walk_of(size);
    chunks = static_cast<int>(walk.grid.y);
    blocks = static_cast<int>(walk.grid.x) * chunks;
    partials = maxima + results * blocks;
  }
  int64_t bytes(const Size& size, int results) const {
    return results * (blocks + chunks * size.cols) * static_cast<int64_t>(sizeof(float));
  }
};

// --- the maximum, and sums -----------------------------------------------------------------------

// Lets NaN through, as torch's maximum does.
__device__ inline float larger(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

__device__ inline float largest_in_warp(float value) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) {
    value = larger(value, __shfl_xor_sync(~0u, value, lane));
  }
  return value;
}

// Returns the largest of all threads' values to all threads. `shared` holds a number for each warp.
template <int warps>
__device__ float largest_in_block(float value, float* shared, int thread) {
  value = largest_in_warp(value);
  if (thread % 32 == 0) shared[thread / 32] = value;
  __syncthreads();
  value = shared[0];
#pragma unroll
  for (int warp = 1; warp < warps; ++warp) value = larger(value, shared[warp]);
  return value;
}

// All chunks walk down the rows side by side, so that the second kernel, which goes up, finds the
// last rows in the cache.
template <typename Source, bool sums>
__global__ void __launch_bounds__(maximum_threads, Source::operands == 1 ? maximum_blocks : 3)
    maximum_kernel(Source source, int64_t rows, int64_t cols, Scratch scratch) {
#if __CUDA_ARCH__ >= FUSED_FLOAT8_ARCH
  constexpr int results = Source::results;
  constexpr int count = rows_in_flight<Source>;
  float most[results] = {};
  [[maybe_unused]] float sum[results][width] = {};
  const int64_t col = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) * width;
  wait_for_previous_kernel();
  if (col < cols) {
    const int64_t step = int64_t{gridDim.y} * blockDim.y;
    for (int64_t row = int64_t{blockIdx.y} * blockDim.y + threadIdx.y; row < rows;
         row += count * step) {
      typename Source::Raw raw[count];
#pragma unroll
      for (int i = 0; i < count; ++i) {
        raw[i] = typename Source::Raw{};
        if (row + i * step < rows) raw[i] = source.load(row + i * step, col);
      }
#pragma unroll
      for (int i = 0; i < count; ++i) {
        float values[results][width];
        source.values(raw[i], values);
#pragma unroll
        for (int r = 0; r < results; ++r) {
#pragma unroll
          for (int j = 0; j < width; ++j) {
            most[r] = larger(most[r], fabsf(values[r][j]));
            if constexpr (sums) sum[r][j] += values[r][j];
          }
        }
      }
    }
  }

  __shared__ float shared[maximum_threads * width];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
#pragma unroll
  for (int r = 0; r < results; ++r) {
    const float largest = largest_in_block<maximum_threads / 32>(most[r], shared, thread);
    if (thread == 0) {
      scratch.maxima[r * scratch.blocks + blockIdx.y * gridDim.x + blockIdx.x] = largest;
    }
    __syncthreads();  // the numbers have been read
    if constexpr (sums) {
      kernels::sum_over_y(sum[r], shared);
      if (threadIdx.y == 0 && col < cols) {
        float* to = scratch.partials + (int64_t{r} * scratch.chunks + blockIdx.y) * cols + col;
#pragma unroll
        for (int j = 0; j < width; ++j) to[j] = sum[r][j];
      }
      __syncthreads();
    }
  }
#endif
}

// --- the cast ------------------------------------------------------------------------------------

constexpr int cast_threads = 128;

// Rows that a thread of the second kernel loads before it uses the first: many, but within its
// registers.
template <typename Source>
constexpr int rows_of_a_load = std::max(4, (Source::operands == 1   ? 16
                                            : Source::operands == 2 ? 8
                                                                    : 4) /
                                               (int{sizeof(typename Source::T)} / 2));

// Without a bound the compiler converts all loaded values at once, which takes more registers.
// `made` is the number of results, values computed again included.
template <typename Source, int made>
constexpr int cast_blocks = made == 1                         ? 5
                            : sizeof(typename Source::T) == 2 ? 6 - made
                            : made == 2                       ? 3
                                                              : 2;

template <__nv_fp8_interpretation_t kind>
constexpr double top = kind == __NV_E4M3 ? 448.0 : 57344.0;

// Returns the scale as torchao computes it: in fp64, as a number times a reciprocal, which is how
// torch divides a number by a tensor.
template <__nv_fp8_interpretation_t kind>
__device__ float scale_of(float amax) {
  constexpr double least = 1e-12;
  const double bounded = amax < least ? least : static_cast<double>(amax);  // NaN stays
  return static_cast<float>(__dmul_rn(__drcp_rn(bounded), top<kind>));
}

// Converts four numbers to four bytes: to nearest even, saturating, and NaN to NaN.
template <__nv_fp8_interpretation_t kind>
__device__ uint32_t to_bytes(const float* values, float scale) {
  const auto low = make_float2(values[0] * scale, values[1] * scale);
  const auto high = make_float2(values[2] * scale, values[3] * scale);
  const uint32_t second = __nv_cvt_float2_to_fp8x2(high, __NV_SATFINITE, kind);
  return __nv_cvt_float2_to_fp8x2(low, __NV_SATFINITE, kind) | second << 16;
}

// Adds up the chunks of a tile's columns.
template <typename T>
__device__ void add_up(const float* partials, int chunks, int64_t cols, int64_t first, void* sums) {
  const int64_t col = first + threadIdx.x;
  if (threadIdx.x >= Tile::cols || col >= cols) return;
  float sum = 0;
#pragma unroll 8
  for (int chunk = 0; chunk < chunks; ++chunk) sum += partials[chunk * cols + col];
  static_cast<T*>(sums)[col] = kernels::narrow<T>(sum);
}

template <int results>
struct Targets {
  Target of[results];
};

// A thread casts 16 rows of eight columns, and transposes them in its registers; with `again` the
// hidden values, too.
template <typename Source, __nv_fp8_interpretation_t kind, bool again = false>
__global__ void __launch_bounds__(cast_threads, cast_blocks<Source, Source::results + again>)
    cast_kernel(Source source, int64_t rows, int64_t cols, int tiles_across, bool together,
                Scratch scratch, Targets<Source::results> targets, Hidden hidden) {
#if __CUDA_ARCH__ >= FUSED_FLOAT8_ARCH
  using T = typename Source::T;
  constexpr int results = Source::results;
  constexpr int made = results + again;
  constexpr int count = rows_of_a_load<Source>;
  const Place place = place_of(threadIdx.x);
  const int64_t tile = gridDim.x - 1 - blockIdx.x;
  const int64_t first_col = tile % tiles_across * Tile::cols;
  const int64_t row = tile / tiles_across * Tile::rows + place.row, col = first_col + place.col;
  const int present = static_cast<int>(min(rows - row, int64_t{16}));  // of the thread's rows
  const bool inside = present > 0 && col < cols;
  wait_for_previous_kernel();

  typename Source::Raw raw[count] = {};
  if (inside) {
#pragma unroll
    for (int i = 0; i < count; ++i) {
      if (i < present) raw[i] = source.load(row + i, col);
    }
  }

  __shared__ float shared[results][cast_threads / 32];
  float scale[results];
#pragma unroll
  for (int r = 0; r < results; ++r) {
    const float* maxima = scratch.maxima + r * scratch.blocks;
    float most = 0;
    for (int i = threadIdx.x; i < scratch.blocks; i += cast_threads) most = larger(most, maxima[i]);
    scale[r] = largest_in_block<cast_threads / 32>(most, shared[r], threadIdx.x);
  }
  if constexpr (results == 2) {
    if (together) scale[0] = scale[1] = larger(scale[0], scale[1]);
  }
#pragma unroll
  for (int r = 0; r < results; ++r) {
    scale[r] = scale_of<kind>(scale[r]);
    if (blockIdx.x == 0 && threadIdx.x == 0) {
      *targets.of[r].inverse_scale = __frcp_rn(scale[r]);
      if (targets.of[r].scale != nullptr) *targets.of[r].scale = scale[r];
    }
    // Each column has one of the last tiles, which run first.
    if (blockIdx.x < tiles_across && targets.of[r].sums != nullptr) {
      add_up<T>(scratch.partials + int64_t{r} * scratch.chunks * cols, scratch.chunks, cols,
                first_col, targets.of[r].sums);
    }
  }
  if (!inside) return;

  [[maybe_unused]] float hidden_scale;
  if constexpr (again) hidden_scale = *hidden.scale;
  uint32_t columns[made][width][4];
#pragma unroll
  for (int begin = 0; begin < 16; begin += count) {
    if (begin > 0) {
#pragma unroll
      for (int i = 0; i < count; ++i) {
        if (begin + i < present) raw[i] = source.load(row + begin + i, col);
      }
    }
#pragma unroll
    for (int quad = 0; quad < count; quad += 4) {
      uint32_t lines[made][2][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float values[results][width];
        source.values(raw[quad + i], values);
#pragma unroll
        for (int r = 0; r < results; ++r) {
          lines[r][0][i] = to_bytes<kind>(values[r], scale[r]);
          lines[r][1][i] = to_bytes<kind>(values[r] + 4, scale[r]);
          if (begin + quad + i >= present) continue;
          auto* to = static_cast<uint8_t*>(targets.of[r].rows) +
                     (row + begin + quad + i) * targets.of[r].ld + col;
          *reinterpret_cast<uint2*>(to) = make_uint2(lines[r][0][i], lines[r][1][i]);
        }
        if constexpr (again) {
          float others[width];
          source.hidden(raw[quad + i], others);
          lines[results][0][i] = to_bytes<__NV_E4M3>(others, hidden_scale);
          lines[results][1][i] = to_bytes<__NV_E4M3>(others + 4, hidden_scale);
        }
      }
#pragma unroll
      for (int r = 0; r < made; ++r) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          transpose_bytes(lines[r][half]);
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            columns[r][half * 4 + j][(begin + quad) / 4] = lines[r][half][j];
          }
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < made; ++r) {
    auto* first = static_cast<uint8_t*>(r < results ? targets.of[r].columns : hidden.columns);
    if (first == nullptr) continue;
#pragma unroll
    for (int j = 0; j < width; ++j) {
      auto* to = first + (col + j) * rows + row;
      const uint32_t(&c)[4] = columns[r][j];
      if (rows % 16 == 0) {
        *reinterpret_cast<uint4*>(to) = make_uint4(c[0], c[1], c[2], c[3]);
        continue;
      }
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        if (i < present) to[i] = static_cast<uint8_t>(c[i / 4] >> 8 * (i % 4));
      }
    }
  }
#endif
}

// --- both ----------------------------------------------------------------------------------------

template <__nv_fp8_interpretation_t kind, bool sums, typename Source>
void run(const Size& size, const Source& source, const Targets<Source::results>& targets,
         bool together, void* data, cudaStream_t stream, const Hidden& hidden = {}) {
  const Scratch scratch(size, Source::results, data);
  const Walk walk = walk_of(size);
  kernels::launch_early(maximum_kernel<Source, sums>, walk.grid, walk.block, 1, stream, source,
                        size.rows, size.cols, scratch);
  const int64_t across = std::max<int64_t>(1, (size.cols + Tile::cols - 1) / Tile::cols);
  const int64_t down = std::max<int64_t>(1, (size.rows + Tile::rows - 1) / Tile::rows);
  const auto launch = [&](auto* kernel) {
    kernels::launch_early(kernel, dim3(across * down), dim3(cast_threads), 1, stream, source,
                          size.rows, size.cols, static_cast<int>(across), together, scratch,
                          targets, hidden);
  };
  if constexpr (requires { &Source::hidden; }) {
    if (hidden.columns != nullptr) return launch(cast_kernel<Source, kind, true>);
  }
  launch(cast_kernel<Source, kind>);
}

template <typename Fn>
void with_type(gemm::Type type, const Fn& fn) {
  kernels::with_type(type, [&](auto element) {
    if constexpr (!std::is_same_v<decltype(element), double>) fn(element);
  });
}

}  // namespace
}  // namespace fused::cuda::float8
