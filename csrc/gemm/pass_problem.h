#pragma once

// A pass of a layer to be done: its matrix product and what is around it.

#include "gemm/problem.h"

#include <array>
#include <bit>

namespace fused::gemm {

// A pass to be done: everything that decides which strategies and algorithms are valid for it.
struct PassProblem {
  Pass pass = Pass::fprop;
  Activation activation = Activation::none;  // input gradient: of the layer before
  bool bias = false;                         // there is one, or its gradient is wanted
  bool aux = false;            // forward: the mask or the pre-activations are to be written
  bool mask = false;           // aux, or what was saved, is ReLU's bit mask; see wants_bits
  bool literal = false;        // the user asked for the library's own epilogues
  bool deterministic = false;  // nothing may depend on timing
  Problem matmul;  // of the bare matrices; alignments of bias and aux where there are any
  std::array<int64_t, 3> further{};  // chain: the features of layers after the first, or 0

  bool operator==(const PassProblem&) const = default;
};

struct PassProblemHash {
  size_t operator()(const PassProblem& p) const {
    size_t key = static_cast<size_t>(p.pass) << 8 | static_cast<size_t>(p.activation);
    for (const bool flag : {p.bias, p.aux, p.mask, p.literal, p.deterministic}) {
      key = key << 1 | static_cast<size_t>(flag);
    }
    for (const auto features : p.further) key = key * 1031 + static_cast<size_t>(features);
    return ProblemHash()(p.matmul) ^ (key * 0x9e3779b97f4a7c15ull);
  }
};

// A forward that makes ReLU's bits by torch's rule, of its output. The library's mask, of the sum
// before it is rounded, is aux.
inline bool wants_bits(const PassProblem& p) { return p.pass == Pass::fprop && p.mask && !p.aux; }

inline int64_t& tokens_of(PassProblem& p) {
  return p.pass == Pass::wgrad ? p.matmul.k : p.matmul.n;
}
inline int64_t tokens_of(const PassProblem& p) {
  return p.pass == Pass::wgrad ? p.matmul.k : p.matmul.n;
}

// The problem under which a measurement is remembered: token counts between two powers of two share
// one, and so do equal devices.
inline PassProblem bucket_of(const PassProblem& p, int first_equal_device) {
  PassProblem bucket = p;
  auto& tokens = tokens_of(bucket);
  tokens = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(tokens)));
  bucket.matmul.device = first_equal_device;
  bucket.deterministic = false;
  return bucket;
}

inline const char* name(Pass pass) {
  switch (pass) {
    case Pass::fprop:
      return "fprop";
    case Pass::dgrad:
      return "dgrad";
    case Pass::wgrad:
      return "wgrad";
    case Pass::gating:
      return "gating";
    case Pass::glu:
      return "glu";
    case Pass::chain:
      return "chain";
  }
  return "?";
}

}  // namespace fused::gemm
