#pragma once

// The strategies for each pass, as a table. A new strategy is a row, and a step if it brings a new
// kernel.

#include "gemm/problem.h"

#include <algorithm>
#include <array>
#include <string_view>

namespace fused::gemm {

// The library that does the matrix product. `own` are our kernels for Hopper GPUs and for small
// networks.
enum class Provider : uint8_t { cublaslt, own, aten };

enum class Step : uint8_t {
  none,
  matmul,           // the provider's product, with the epilogue that the strategy fuses
  matmul_up,        // the product with a gated layer's other weight
  own_small,        // one of our kernels for small networks does the whole pass
  layers,           // each layer of a chain by its own plan
  own_activation,   // act(z)
  own_one_pass,     // act'(saved) · grad and its column sums in one sweep over memory
  own_column_sum,   // the bias's gradient
  own_glu,          // act(gate) ⊙ up
  own_gating,       // the gradients of gate and up, and act(gate) ⊙ up, in one sweep over memory
  aten_activation,  // as above, by the operators that eager uses
  aten_gradient,
  aten_column_sum,
  aten_glu,
  aten_gating,
};

enum class Role : uint8_t {
  candidate,
  fallback,        // taken if all others fail
  eager,           // eager's own sequence, which the others are compared with
  eager_fallback,  // both
};

struct Strategy {
  Pass pass;
  const char* name;  // one word; plan files hold it
  Provider provider;
  Role role;
  bool fuses_activation;  // the product's epilogue applies act or act'
  bool fuses_bias;        // the product's epilogue adds the bias or sums its gradient
  std::array<Step, 3> steps;

  bool is_eager() const { return role == Role::eager || role == Role::eager_fallback; }
};

// For each pass, the row that uses most of the library's epilogue comes first.
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

// Our own products write ReLU's bits in their epilogue; after others a kernel makes them.
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
