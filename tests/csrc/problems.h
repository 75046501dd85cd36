#pragma once

// Stage problems for the tests of plans, and which strategies apply to them.

#include "plans/decisions.h"

#include <vector>

using namespace fused;
using namespace fused::gemm;

inline constexpr size_t library = 130100;

inline StageProblem problem_of(Stage stage, Activation activation = Activation::none,
                               bool bias = true, bool mask = false) {
  StageProblem p;
  p.stage = stage;
  p.activation = activation;
  p.bias = bias;
  p.mask = mask;
  auto& g = p.product;
  g.arch = 90, g.type = Type::bf16;
  g.transpose_a = stage == Stage::forward;
  g.transpose_b = stage == Stage::weight_gradient;
  g.m = 256, g.n = 8192, g.k = 128;
  if (stage == Stage::weight_gradient) g.n = 256, g.m = 128, g.k = 8192;
  g.lda = g.transpose_a ? g.k : g.m, g.ldb = g.transpose_b ? g.n : g.k, g.ldd = g.m;
  if (mask || stage == Stage::input_gradient) g.ld_aux = g.m;
  g.workspace_limit = 32 << 20;
  return p;
}

inline std::vector<StageProblem> every_problem() {
  std::vector<StageProblem> all;
  for (auto stage : {Stage::forward, Stage::input_gradient, Stage::weight_gradient}) {
    for (auto activation :
         {Activation::none, Activation::relu, Activation::gelu_tanh, Activation::gelu_erf}) {
      for (auto type : {Type::f64, Type::f32, Type::f16, Type::bf16}) {
        for (int flags = 0; flags < 16; ++flags) {
          const bool mask = flags & 2 && activation == Activation::relu;
          auto p = problem_of(stage, activation, flags & 1, mask);
          p.product.type = type;
          p.literal = flags & 4;
          p.aux = stage == Stage::forward && activation != Activation::none && flags & 8;
          if (p.aux) p.product.ld_aux = p.product.m;
          if (p.mask && stage == Stage::forward && !p.aux) continue;
          if (p.aux && activation == Activation::relu && !p.mask) continue;
          if (stage == Stage::weight_gradient && activation != Activation::none) continue;
          all.push_back(p);
        }
      }
    }
  }
  return all;
}

inline bool applies(const StageProblem& p, const Strategy& s) { return !objection(p, s, library); }
inline bool applies(const StageProblem& p, const char* name) {
  return applies(p, *find_strategy(p.stage, name));
}
