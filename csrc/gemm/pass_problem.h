#pragma once

#include "gemm/problem.h"

#include <array>
#include <bit>

namespace fused::gemm {

// The tensor that a forward writes for its backward beside the result.
enum class Keeps : uint8_t {
  nothing,
  values,  // the pre-activation, or ReLU's output
  mask,    // ReLU's bits: the sign of the sum before it is rounded, by the library's epilogue
  bits,    // ReLU's bits: the sign of the output, by torch's rule; a backward reads them as `mask`
};

// Describes a pass, as the key of its strategies and algorithms.
struct PassProblem {
  Pass pass = Pass::fprop;
  Activation activation = Activation::none;  // dgrad: the activation of the layer before
  bool bias = false;                         // there is a bias, or its gradient is wanted
  Keeps keeps = Keeps::nothing;
  bool library_only = false;         // the user asked for the library's own epilogues
  bool deterministic = false;        // nothing may depend on timing
  Problem matmul;                    // without an epilogue, but with the alignments of bias and aux
  std::array<int64_t, 3> further{};  // chain: the features of the layers after the first, or 0

  bool operator==(const PassProblem&) const = default;
};

struct PassProblemHash {
  size_t operator()(const PassProblem& p) const {
    size_t key = static_cast<size_t>(p.pass) << 16 | static_cast<size_t>(p.activation) << 8 |
                 static_cast<size_t>(p.keeps);
    for (const bool flag : {p.bias, p.library_only, p.deterministic}) {
      key = key << 1 | static_cast<size_t>(flag);
    }
    for (const auto features : p.further) key = key * 1031 + static_cast<size_t>(features);
    return ProblemHash()(p.matmul) ^ (key * 0x9e3779b97f4a7c15ull);
  }
};

inline constexpr bool wants_bits(const PassProblem& p) { return p.keeps == Keeps::bits; }

// Returns whether a forward keeps a tensor that its product or the product's epilogue writes.
inline constexpr bool writes_aux(const PassProblem& p) {
  return is_forward(p.pass) && (p.keeps == Keeps::values || p.keeps == Keeps::mask);
}

inline auto& tokens_of(auto&& p) { return p.pass == Pass::wgrad ? p.matmul.k : p.matmul.n; }

// Returns the key of a measurement. Token counts between two powers of two share one measurement,
// and so do devices of one model.
inline PassProblem bucket_of(const PassProblem& p, int first_equal_device) {
  PassProblem bucket = p;
  auto& tokens = tokens_of(bucket);
  tokens = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(tokens)));
  bucket.matmul.device = first_equal_device;
  bucket.deterministic = false;
  return bucket;
}

inline const char* name(Pass pass) {
  constexpr const char* names[] = {"fprop", "dgrad", "wgrad", "gating", "glu", "chain"};
  return names[static_cast<int>(pass)];
}

}  // namespace fused::gemm
