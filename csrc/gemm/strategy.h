#pragma once

// The ways to do a pass of a layer, as data. A strategy is a matrix product and the short steps
// after it; which strategy is taken, and with which algorithm, is a plan (plans/).
// Another way is another row here, and a step of its own if it brings a new kernel.

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
  own_column_sum,   //
  own_glu,          // act(gate) ⊙ up
  own_gating,       // its gradients, and it again, in one pass
  aten_activation,  //
  aten_gradient,    // threshold_backward, gelu_backward
  aten_column_sum,  //
  aten_glu,         //
  aten_gating,      //
};

// What the strategy is to its pass, beside a candidate.
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
};

// Of one pass: the fullest use of the library first. What is saved is what the call asks for.
inline constexpr Strategy strategies[] = {
    {Pass::fprop, "epilogue", Provider::cublaslt, Role::candidate, true, true, {Step::matmul}},
    {Pass::fprop,
     "bias+activation",
     Provider::cublaslt,
     Role::candidate,
     false,
     true,
     {Step::matmul, Step::own_activation}},
    {Pass::fprop, "hopper", Provider::own, Role::candidate, true, true, {Step::matmul}},
    {Pass::fprop, "small", Provider::own, Role::candidate, true, true, {Step::own_small}},
    {Pass::fprop,
     "aten",
     Provider::aten,
     Role::eager_fallback,
     false,
     false,
     {Step::matmul, Step::aten_activation}},

    {Pass::dgrad, "d_bgrad", Provider::cublaslt, Role::candidate, true, true, {Step::matmul}},
    {Pass::dgrad,
     "d+sum",
     Provider::cublaslt,
     Role::candidate,
     true,
     false,
     {Step::matmul, Step::own_column_sum}},
    {Pass::dgrad,
     "product+one_pass",
     Provider::cublaslt,
     Role::candidate,
     false,
     false,
     {Step::matmul, Step::own_one_pass}},
    {Pass::dgrad, "hopper", Provider::own, Role::candidate, true, true, {Step::matmul}},
    {Pass::dgrad, "small", Provider::own, Role::candidate, true, true, {Step::own_small}},
    {Pass::dgrad,
     "mm+one_pass",
     Provider::aten,
     Role::fallback,
     false,
     false,
     {Step::matmul, Step::own_one_pass}},
    {Pass::dgrad,
     "aten",
     Provider::aten,
     Role::eager,
     false,
     false,
     {Step::matmul, Step::aten_gradient, Step::aten_column_sum}},

    {Pass::wgrad, "bgradb", Provider::cublaslt, Role::candidate, false, true, {Step::matmul}},
    {Pass::wgrad,
     "product+sum",
     Provider::cublaslt,
     Role::candidate,
     false,
     false,
     {Step::matmul, Step::own_column_sum}},
    {Pass::wgrad, "small", Provider::own, Role::candidate, true, true, {Step::own_small}},
    {Pass::wgrad,
     "mm+sum",
     Provider::aten,
     Role::fallback,
     false,
     false,
     {Step::matmul, Step::own_column_sum}},
    {Pass::wgrad,
     "aten",
     Provider::aten,
     Role::eager,
     false,
     false,
     {Step::matmul, Step::aten_column_sum}},

    {Pass::glu, "hopper", Provider::own, Role::candidate, true, true, {Step::matmul}},
    {Pass::glu,
     "products+gating",
     Provider::cublaslt,
     Role::candidate,
     false,
     true,
     {Step::matmul, Step::matmul_up, Step::own_glu}},
    {Pass::glu,
     "aten",
     Provider::aten,
     Role::eager_fallback,
     false,
     false,
     {Step::matmul, Step::matmul_up, Step::aten_glu}},

    {Pass::gating, "hopper", Provider::own, Role::candidate, true, true, {Step::matmul}},
    {Pass::gating,
     "product+one_pass",
     Provider::cublaslt,
     Role::candidate,
     false,
     false,
     {Step::matmul, Step::own_gating}},
    {Pass::gating,
     "mm+one_pass",
     Provider::aten,
     Role::fallback,
     false,
     false,
     {Step::matmul, Step::own_gating}},
    {Pass::gating,
     "aten",
     Provider::aten,
     Role::eager,
     false,
     false,
     {Step::matmul, Step::aten_gating}},

    {Pass::chain, "small", Provider::own, Role::candidate, true, true, {Step::own_small}},
    {Pass::chain, "layers", Provider::aten, Role::eager_fallback, false, false, {Step::layers}},
};

inline bool has_step(const Strategy& strategy, Step step) {
  return std::ranges::find(strategy.steps, step) != strategy.steps.end();
}

// Whether it makes the bits in its own product's epilogue; behind others a kernel of ours does.
inline bool writes_bits(const Strategy& s) {
  return s.provider == Provider::own && has_step(s, Step::matmul);
}

inline const Strategy* find_strategy(Pass pass, std::string_view name) {
  for (const auto& strategy : strategies) {
    if (strategy.pass == pass && name == strategy.name) return &strategy;
  }
  return nullptr;
}

// The strategy that is taken where every other fails.
inline const Strategy& fallback_of(Pass pass) {
  return *std::ranges::find_if(strategies, [pass](const Strategy& s) {
    return s.pass == pass && (s.role == Role::fallback || s.role == Role::eager_fallback);
  });
}

}  // namespace fused::gemm
