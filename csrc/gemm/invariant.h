#pragma once

// The rule of the policy "batch_invariant": how a pass is done, by everything of a problem but the
// number of rows and where they lie.
//
// An element of a product is a sum over K, and its bits are fixed by the order of that sum. Our
// products for Hopper take K in steps of 64, one instruction of 16 after the other, in tiles of any
// size; the product in fp32 and fp64 adds one number after the other (kernels/ordered_product.cuh).
// Neither parts a sum among blocks. What follows goes element by element.

#include "gemm/hopper.h"
#include "gemm/pass_problem.h"
#include "gemm/strategy.h"

#include <array>

namespace fused::gemm::invariant {

// One product that does all of the pass, or a bare one and then these steps.
enum class Way : uint8_t { whole, in_steps };

// Says why no kernel has these rows' bits whatever the batch, or nullptr. `hopper`: our products
// for Hopper were built, and run here.
inline const char* objection(const PassProblem& p, bool hopper) {
  if (p.pass == Pass::wgrad || p.pass == Pass::chain) return "a sum over rows";
  if (size_of(p.matmul.type) > 2) return nullptr;
  if (p.matmul.arch != 90) return "16 bits on another GPU than Hopper's, which was not tried";
  if (!hopper) return "16 bits in a build without the products for Hopper";
  return hopper::fits_coordinates(p.matmul) ? nullptr : "an extent beyond 32 bits";
}

// Copies make rows fit that begin anywhere, so that only widths count.
inline Way way(const PassProblem& p) {
  const bool narrow = size_of(p.matmul.type) == 2;
  const bool fits = p.matmul.m % hopper::unit == 0 && p.matmul.k % hopper::unit == 0;
  const bool has_bits = p.pass == Pass::dgrad && p.keeps == Keeps::mask;
  const bool gated = p.pass == Pass::gating || p.pass == Pass::glu;
  const bool has_kernel =
      p.activation != Activation::none && !has_bits && !(gated && p.activation == Activation::relu);
  const bool is_plain = p.pass == Pass::fprop && p.activation == Activation::none;
  return narrow && fits && (has_kernel || is_plain) ? Way::whole : Way::in_steps;
}

// The part of a pass that execute() does; the bare product comes before it.
inline Strategy strategy(const PassProblem& p) {
  const bool active = p.activation != Activation::none;
  Strategy s{p.pass, "invariant", Provider::own, Role::candidate, true, true, {Step::matmul}};
  if (way(p) == Way::whole) return s;
  s.fuses_activation = false;
  s.steps = {};
  if (p.pass == Pass::fprop && active) s.steps = {Step::own_activation};
  if (p.pass == Pass::dgrad && active) s.steps = {Step::own_one_pass};
  if (p.pass == Pass::dgrad && !active) s.steps = {Step::own_column_sum};
  if (p.pass == Pass::gating) s.steps = {Step::own_gating};
  return s;
}

// Names the order of tiles: one that reads operands less often where they outgrow the cache. The
// sum of an element does not depend on it. That order computes whole groups of 16 tiles along the
// features, those of nothing too: 768 features took 3.4 times as long.
inline uint64_t order_of_tiles(const PassProblem& problem) {
  constexpr int64_t half_of_cache = int64_t{25} << 20, together = 16;
  const auto& p = problem.matmul;
  if ((p.m + p.n) * p.k * size_of(p.type) <= half_of_cache) return 0;
  const int64_t features = hopper::tile_features / (problem.pass == Pass::glu ? 2 : 1);
  return hopper::tiles(p.m, features) % together == 0 ? 1 : 0;
}

// Few tokens leave most processors idle with our wide tiles. The narrow ones add in the same order.
inline bool is_narrow(const PassProblem& problem, int processors) {
  const auto& p = problem.matmul;
  const int64_t wide =
      hopper::tiles(p.m, hopper::tile_features) * hopper::tiles(p.n, hopper::tile_tokens);
  return problem.pass == Pass::fprop && problem.keeps == Keeps::nothing && 2 * wide < processors;
}

}  // namespace fused::gemm::invariant
