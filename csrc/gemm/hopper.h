#pragma once

// Says which problems our own products for Hopper (cuda/hopper) take, and lists their
// configurations.

#include "gemm/problem.h"

#include <limits>

namespace fused::gemm::hopper {

inline constexpr int64_t tile_features = 128, tile_tokens = 128;
// The tiles of a forward product of few tokens.
inline constexpr int64_t narrow_features = 64, narrow_tokens = 64;

// With fewer tokens, one product of a stacked weight and a kernel after it are as fast.
inline constexpr int64_t least_tokens_of_glu = 4 * tile_tokens;

// Tiles that are computed at the same time share what the L2 cache holds of the operands.
struct Order {
  enum class Along : uint8_t { either, features, tokens };  // CUTLASS's RasterOrderOptions
  Along along;
  int swizzle;  // the number of neighbouring tiles in the other direction that run together
};
// The first is the fastest if all operands fit the cache, the second if none does.
inline constexpr Order orders[] = {{Order::Along::either, 1}, {Order::Along::tokens, 8}};

// An algorithm is the place of an order in the table.
inline std::optional<Order> order_of(const Algorithm& algorithm) {
  if (algorithm.bytes[0] >= std::size(orders)) return std::nullopt;
  return orders[algorithm.bytes[0]];
}

inline constexpr int64_t tiles(int64_t extent, int64_t tile) { return (extent + tile - 1) / tile; }

// The partial sums of the bias gradient: one row of fp32 for each tile of tokens, padded to whole
// tiles.
inline constexpr int64_t partial_rows(const Problem& p) { return tiles(p.n, tile_tokens); }
inline constexpr int64_t partial_columns(const Problem& p) {
  return tiles(p.m, tile_features) * tile_features;
}

constexpr int64_t unit = 8;  // elements: 16 bytes, which the hardware copies at once

// Coordinates of 32 bits need room for a last tile.
inline bool fits_coordinates(const Problem& p) {
  constexpr int64_t most = std::numeric_limits<int32_t>::max() - 1024;
  return std::max({p.m, p.n, p.k}) <= most;
}

// Says why our product cannot do the pass; nullptr if it can.
inline const char* objection(Pass pass, const Problem& p, bool bias, bool aux) {
  if (p.arch != 90) return "not a Hopper GPU";
  if (size_of(p.type) != 2) return "not of 16 bits";
  if (p.transpose_b) return "an operand that lies by columns";
  if (pass == Pass::glu && p.n < least_tokens_of_glu) return "few tokens";
  const auto fits = [](int64_t extent) { return extent % unit == 0; };
  if (!fits(p.m) || !fits(p.k)) return "features that are no multiple of 8";
  if (!fits(p.lda) || !fits(p.ldb) || !fits(p.ldd) || (aux && !fits(p.ld_aux)) || !p.aligned_a ||
      !p.aligned_b || !p.aligned_d || (aux && !p.aligned_aux) ||
      (pass == Pass::fprop && bias && !p.aligned_bias)) {
    return "rows that do not begin at multiples of 16 bytes";
  }
  if (!fits_coordinates(p)) return "an extent beyond 32 bits";
  // The library's larger tiles read less memory: 65536 x 4096 x 16384 was 5 % slower with ours.
  constexpr double most_multiplications = 1e12;
  if (static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k) >
      most_multiplications) {
    return "too large for our tiles";
  }
  return nullptr;
}

}  // namespace fused::gemm::hopper
