#pragma once

// Says which problems our kernels for small networks take.

#include "gemm/problem.h"

#include <algorithm>

namespace fused::gemm::small {

// A block sums a bias's gradient over all tokens, which takes too long beyond these sizes.
inline constexpr int64_t most_tokens = 512, most_features = 1024;

// Says why these kernels cannot do the pass; nullptr if they can. They read the weight as torch
// stores it, with rows of unit stride.
inline const char* objection(Pass pass, const Problem& p) {
  const bool of_weight = pass == Pass::wgrad;
  if (p.type == Type::f64) return "in fp64";
  if (p.adds || p.to_f32) return "a sum with what is there";
  if (p.transpose_b != of_weight || p.transpose_a != is_forward(pass))
    return "a transposed operand";
  if (p.m == 0 || p.n == 0 || p.k == 0) return "an extent is 0";
  const auto [tokens, features] = of_weight ? std::pair(p.k, p.n) : std::pair(p.n, p.k);
  if (tokens > most_tokens || std::max(features, p.m) > most_features) return "not small";
  return nullptr;
}

}  // namespace fused::gemm::small
