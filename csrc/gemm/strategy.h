#pragma once

// The ways to do a pass, as data: another way is another row, and a step if it brings a new kernel.

#include "gemm/problem.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace fused::gemm {

// Who does the matrix product; our own kernels are for Hopper GPUs, and for small networks.
enum class Provider : uint8_t { cublaslt, own, aten };

enum class Step : uint8_t {
  none,
  matmul,           // the provider's, with the epilogue that the strategy fuses
  matmul_up,        // the same with a gated layer's other weight
  own_small,        // all of the pass by one of our kernels for small networks
  layers,           // of a chain, each by its own plan
  own_activation,   // act, of a pre-activation
  own_one_pass,     // act'(saved) and the column sums in one pass
  own_column_sum,   // of what the bias's gradient is the sum of
  own_glu,          // act(gate) ⊙ up
  own_gating,       // its gradients, and it again, in one pass
  aten_activation,  // the same as eager does them
  aten_gradient,
  aten_column_sum,
  aten_glu,
  aten_gating,
};

enum class Role : uint8_t {
  candidate,
  fallback,        // taken where every other fails
  eager,           // eager's own sequence: what is measured against
  eager_fallback,  // both
};

struct Strategy {
  Pass pass;
  const char* name;  // one word: it stands in files
  Provider provider;
  Role role;
  bool fuses_activation;  // act, or act', is in the product's epilogue, with its aux
  bool fuses_bias;        // the bias is added, or its gradient summed, in the product's epilogue
  std::array<Step, 3> steps;

  bool is_eager() const { return role == Role::eager || role == Role::eager_fallback; }
};

// Of one pass the fullest use of the library comes first.
inline constexpr auto strategies = [] {
  using enum Pass;
  using enum Provider;
  using enum Role;
  using enum Step;
  return std::to_array<Strategy>({
      {fprop, "epilogue", cublaslt, candidate, true, true, {matmul}},
      {fprop, "bias+activation", cublaslt, candidate, false, true, {matmul, own_activation}},
      {fprop, "hopper", own, candidate, true, true, {matmul}},
      {fprop, "small", own, candidate, true, true, {own_small}},
      {fprop, "aten", aten, eager_fallback, false, false, {matmul, aten_activation}},

      {dgrad, "d_bgrad", cublaslt, candidate, true, true, {matmul}},
      {dgrad, "d+sum", cublaslt, candidate, true, false, {matmul, own_column_sum}},
      {dgrad, "product+one_pass", cublaslt, candidate, false, false, {matmul, own_one_pass}},
      {dgrad, "hopper", own, candidate, true, true, {matmul}},
      {dgrad, "small", own, candidate, true, true, {own_small}},
      {dgrad, "mm+one_pass", aten, fallback, false, false, {matmul, own_one_pass}},
      {dgrad, "aten", aten, eager, false, false, {matmul, aten_gradient, aten_column_sum}},

      {wgrad, "bgradb", cublaslt, candidate, false, true, {matmul}},
      {wgrad, "product+sum", cublaslt, candidate, false, false, {matmul, own_column_sum}},
      {wgrad, "small", own, candidate, true, true, {own_small}},
      {wgrad, "mm+sum", aten, fallback, false, false, {matmul, own_column_sum}},
      {wgrad, "aten", aten, eager, false, false, {matmul, aten_column_sum}},

      {glu, "hopper", own, candidate, true, true, {matmul}},
      {glu, "products+gating", cublaslt, candidate, false, true, {matmul, matmul_up, own_glu}},
      {glu, "aten", aten, eager_fallback, false, false, {matmul, matmul_up, aten_glu}},

      {gating, "hopper", own, candidate, true, true, {matmul}},
      {gating, "product+one_pass", cublaslt, candidate, false, false, {matmul, own_gating}},
      {gating, "mm+one_pass", aten, fallback, false, false, {matmul, own_gating}},
      {gating, "aten", aten, eager, false, false, {matmul, aten_gating}},

      {chain, "small", own, candidate, true, true, {own_small}},
      {chain, "layers", aten, eager_fallback, false, false, {layers}},
  });
}();

inline bool has_step(const Strategy& strategy, Step step) {
  return std::ranges::find(strategy.steps, step) != strategy.steps.end();
}

// Such a product writes bits in its epilogue; behind others a kernel of ours makes them.
inline bool is_own_product(const Strategy& s) {
  return s.provider == Provider::own && has_step(s, Step::matmul);
}

inline const Strategy* find_strategy(Pass pass, std::string_view name) {
  for (const auto& strategy : strategies) {
    if (strategy.pass == pass && name == strategy.name) return &strategy;
  }
  return nullptr;
}

inline const Strategy& fallback_of(Pass pass) {
  return *std::ranges::find_if(strategies, [pass](const Strategy& s) {
    return s.pass == pass && (s.role == Role::fallback || s.role == Role::eager_fallback);
  });
}

}  // namespace fused::gemm
