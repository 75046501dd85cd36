#include "cuda/kernels/ordered_product.h"

#include "cuda/kernels/launch.cuh"
#include "cuda/kernels/ordered_product.cuh"

namespace fused::cuda::kernels {
namespace {

template <typename T, class Tile>
void launch(const OrderedProduct& p, cudaStream_t stream) {
  const auto tiles = [](int64_t extent, int64_t tile) { return (extent + tile - 1) / tile; };
  const int64_t blocks = tiles(p.cols, Tile::wide) * tiles(p.rows, Tile::high);
  ordered_product_kernel<T, Tile>
      <<<dim3(static_cast<unsigned>(blocks)), Tile::threads, 0, stream>>>(
          {static_cast<const T*>(p.left), p.left_row, p.left_inner},
          {static_cast<const T*>(p.right), p.right_col, p.right_inner},
          static_cast<const T*>(p.bias), static_cast<T*>(p.result), p.ld_result, p.rows, p.cols,
          p.inner);
  check_launch();
}

}  // namespace

void ordered_product(const OrderedProduct& p, cudaStream_t stream) {
  using Large = OrderedTile<128, 128, 8>;
  using Medium = OrderedTile<64, 64, 4>;
  using Flat = OrderedTile<64, 16, 4>;
  constexpr int64_t few_tokens = 32, enough_elements = int64_t{128} * 128 * 128;
  if (p.type == gemm::Type::f64) {
    p.rows <= few_tokens ? launch<double, Flat>(p, stream) : launch<double, Medium>(p, stream);
  } else if (p.rows <= few_tokens) {
    launch<float, Flat>(p, stream);
  } else if (p.rows * p.cols < enough_elements) {
    launch<float, Medium>(p, stream);
  } else {
    launch<float, Large>(p, stream);
  }
}

}  // namespace fused::cuda::kernels
