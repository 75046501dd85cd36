#pragma once

// How wide the rows of an aux buffer are. cuBLASLt counts a ReLU mask's leading dimension in bits
// and wants multiples of 128, a pre-activation's in elements and wants multiples of 8. Padding
// makes every width work.

#include <cstdint>

namespace fused {

template <typename Int>  // int64_t, or torch's symbolic integer
constexpr Int mask_bits(const Int& features) {
  return (features + 127) / 128 * 128;
}

template <typename Int>
constexpr Int mask_bytes(const Int& features) {
  return mask_bits(features) / 8;
}

template <typename Int>
constexpr Int padded_features(const Int& features) {
  return (features + 7) / 8 * 8;
}

}  // namespace fused
