#pragma once

#include <array>
#include <cstdint>

namespace fused::gemm {

// How a product is done. cuBLASLt's description of an algorithm: plain bytes, valid for one version
// of the library, on any device of the architecture that it was found for. Of our own products: the
// place of a configuration in their table (gemm/hopper.h).
struct Algorithm {
  std::array<uint64_t, 8> bytes{};
  int64_t workspace = 0;

  bool operator==(const Algorithm&) const = default;
};

}  // namespace fused::gemm
