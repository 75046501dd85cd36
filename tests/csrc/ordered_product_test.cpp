// The ordered product on a CPU, thread by thread (cuda_on_cpu/mma.h): every tile gives the bits of
// one sum written down as a loop, for rows of any number, place and stride.

#include "cuda_on_cpu/mma.h"

#undef __global__
#define __global__
#undef __launch_bounds__
#define __launch_bounds__(threads)

#include "cuda/kernels/ordered_product.cuh"
#include "expect.h"

#include <cstring>
#include <random>

using namespace fused::cuda::kernels;

namespace {

template <typename T>
std::vector<T> drawn(int64_t count, std::mt19937& random) {
  std::vector<T> values(count);
  std::normal_distribution<double> normal;
  for (auto& value : values) value = static_cast<T>(normal(random));
  return values;
}

// Sums of 64, one product after the other, and these one after the other.
template <typename T>
T by_hand(const Strided<T>& left, const Strided<T>& right, int r, int c, int inner) {
  T total = 0;
  for (int first = 0; first < inner; first += 64) {
    T part = 0;
    for (int k = first; k < std::min(first + 64, inner); ++k) {
      part = std::fma(left.data[r * left.row + k * left.inner],
                      right.data[c * right.row + k * right.inner], part);
    }
    total += part;
  }
  return total;
}

template <typename T, class Tile>
void compare(int rows, int cols, int inner, bool left_along, bool right_along, bool with_bias) {
  std::mt19937 random(rows * 31 + cols * 7 + inner);
  const auto x = drawn<T>(int64_t{rows + 3} * (inner + 3), random);
  const auto w = drawn<T>(int64_t{cols + 3} * (inner + 3), random), b = drawn<T>(cols, random);
  const Strided<T> left{x.data(), left_along ? inner + 3 : 1, left_along ? 1 : rows + 3};
  const Strided<T> right{w.data(), right_along ? inner + 3 : 1, right_along ? 1 : cols + 3};
  const int ld = cols + 5;
  std::vector<T> result(int64_t{rows} * ld, T(-7));
  const unsigned blocks =
      (cols + Tile::wide - 1) / Tile::wide * ((rows + Tile::high - 1) / Tile::high);
  const T* bias = with_bias ? b.data() : nullptr;
  on_cpu(blocks, Tile::threads, 0, [&](unsigned char*) {
    ordered_product_kernel<T, Tile>(left, right, bias, result.data(), ld, rows, cols, inner);
  });
  for (int r = 0; r < rows; ++r) {
    for (int c = 0; c < ld; ++c) {
      T want = T(-7);  // beside the result
      if (c < cols) want = by_hand(left, right, r, c, inner) + (with_bias ? b[c] : T(0));
      EXPECT(result[int64_t{r} * ld + c] == want);
    }
  }
}

template <typename T, class Tile>
void compare_all() {
  compare<T, Tile>(1, 5, 3, true, true, true);
  compare<T, Tile>(17, 70, 130, true, true, true);
  compare<T, Tile>(17, 70, 130, true, false, false);
  compare<T, Tile>(70, 17, 64, false, true, false);
  compare<T, Tile>(130, 129, 65, false, false, true);
}

TEST(large_tiles_have_the_sums_of_a_loop) { compare_all<float, OrderedTile<128, 128, 8>>(); }
TEST(medium_tiles_have_the_sums_of_a_loop) { compare_all<float, OrderedTile<64, 64, 4>>(); }
TEST(flat_tiles_have_the_sums_of_a_loop) { compare_all<float, OrderedTile<64, 16, 4>>(); }
TEST(tiles_of_fp64_have_the_sums_of_a_loop) {
  compare_all<double, OrderedTile<64, 64, 4>>();
  compare_all<double, OrderedTile<64, 16, 4>>();
}

}  // namespace
