#pragma once

// A thread's part of a tile, and the transposition in its registers. It is host code as well, so
// that a test can try it.

#include <cuda_runtime.h>

#include <cstdint>

namespace fused::cuda::float8 {

// A block's tile: two by two warps, each of 64 rows and columns. A warp's loads and stores are
// pieces of 64 bytes and more in each layout.
struct Tile {
  static constexpr int rows = 128, cols = 128;
};

struct Place {
  int row, col;  // in the tile: the first of 16 rows, the first of 8 columns
};

__host__ __device__ inline Place place_of(unsigned thread) {
  const int warp = thread / 32, lane = thread % 32;
  return {warp / 2 * 64 + lane / 8 * 16, warp % 2 * 64 + lane % 8 * 8};
}

__host__ __device__ inline uint32_t permute(uint32_t low, uint32_t high, uint32_t selector) {
#ifdef __CUDA_ARCH__
  return __byte_perm(low, high, selector);
#else
  const uint64_t bytes = uint64_t{high} << 32 | low;
  uint32_t result = 0;
  for (int i = 0; i < 4; ++i) {
    result |= static_cast<uint32_t>(bytes >> (selector >> 4 * i & 7) * 8 & 255) << 8 * i;
  }
  return result;
#endif
}

// Transposes rows of four bytes.
__host__ __device__ inline void transpose_bytes(uint32_t (&words)[4]) {
  const uint32_t first = permute(words[0], words[1], 0x5140);
  const uint32_t second = permute(words[0], words[1], 0x7362);
  const uint32_t third = permute(words[2], words[3], 0x5140);
  const uint32_t fourth = permute(words[2], words[3], 0x7362);
  words[0] = permute(first, third, 0x5410);
  words[1] = permute(first, third, 0x7632);
  words[2] = permute(second, fourth, 0x5410);
  words[3] = permute(second, fourth, 0x7632);
}

}  // namespace fused::cuda::float8
