#pragma once

// The rule of the policy "batch_invariant": how a pass is done depends on everything in a problem
// but the number of rows and their addresses.
//
// An element of a product is a sum over K, and its bits are fixed by the order of that sum. Our
// products for Hopper take K in steps of 64, one instruction of 16 after the other, in tiles of any
// size; the product in fp32 and fp64 adds one number after the other (kernels/ordered_product.cuh).
// Neither splits a sum among blocks. Later kernels treat each element alone.

#include "gemm/hopper.h"
#include "gemm/pass_problem.h"
#include "gemm/strategy.h"

#include <array>

namespace fused::gemm::invariant {

// `whole`: one product does the whole pass. `in_steps`: a product, then the steps of strategy().
enum class Way : uint8_t { whole, in_steps };

// Says why no kernel gives a row the same bits in every batch; nullptr if one does. `hopper`: our
// products for Hopper were built and run on this device.
inline const char* objection(const PassProblem& p, bool hopper) {
  if (p.pass == Pass::wgrad || p.pass == Pass::chain) return "a sum over rows";
  if (size_of(p.matmul.type) > 2) return nullptr;
  if (p.matmul.arch != 90) return "16 bits on another GPU than Hopper's, which was not tried";
  if (!hopper) return "16 bits in a build without the products for Hopper";
  return hopper::fits_coordinates(p.matmul) ? nullptr : "an extent beyond 32 bits";
}

// Only the widths count: rows at other addresses are copied.
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

// Returns the order of tiles, which does not change an element's sum. Order 1 reads operands that
// outgrow the cache less often. It computes whole groups of 16 tiles along the features, empty
// tiles included: with 768 features it took 3.4 times as long.
inline uint64_t order_of_tiles(const PassProblem& problem) {
  constexpr int64_t half_of_cache = int64_t{25} << 20, together = 16;
  const auto& p = problem.matmul;
  if ((p.m + p.n) * p.k * size_of(p.type) <= half_of_cache) return 0;
  const int64_t features = hopper::tile_features / (problem.pass == Pass::glu ? 2 : 1);
  return hopper::tiles(p.m, features) % together == 0 ? 1 : 0;
}

// With few tokens, wide tiles leave most processors idle. Narrow tiles add in the same order.
inline bool is_narrow(const PassProblem& problem, int processors) {
  const auto& p = problem.matmul;
  const int64_t wide =
      hopper::tiles(p.m, hopper::tile_features) * hopper::tiles(p.n, hopper::tile_tokens);
  return problem.pass == Pass::fprop && problem.keeps == Keeps::nothing && 2 * wide < processors;
}

}  // namespace fused::gemm::invariant
