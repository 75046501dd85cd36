#pragma once

// Says which strategies are valid for a pass, and which one the rule takes without measuring.

#include "gemm/hopper.h"
#include "gemm/pass_problem.h"
#include "gemm/small.h"
#include "gemm/strategy.h"

namespace fused::gemm {

struct Available {
  size_t cublaslt = 0;  // cublasLtGetVersion()
  bool hopper = false;
  bool small = false;
};

// Finds the epilogue of the strategy's product; nullopt if the library has none.
inline std::optional<Epilogue> epilogue_of(const PassProblem& p, const Strategy& s) {
  const auto activation = s.fuses_activation ? p.activation : Activation::none;
  const bool reads_saved = p.pass == Pass::dgrad;
  const auto pass = p.pass == Pass::gating ? Pass::dgrad
                    : p.pass == Pass::glu  ? Pass::fprop
                                           : p.pass;
  return find_epilogue(pass, activation, s.fuses_bias && p.bias,
                       activation != Activation::none && (writes_aux(p) || reads_saved));
}

inline Problem matmul_of(const PassProblem& p, const Strategy& s) {
  Problem matmul = p.matmul;
  matmul.epilogue = *epilogue_of(p, s);
  // The activation makes the result of the kept pre-activation.
  if (writes_aux(p) && !s.fuses_activation) {
    matmul.ldd = p.matmul.ld_aux;
    matmul.aligned_d = p.matmul.aligned_aux;
  }
  if (!uses_bias(matmul.epilogue)) matmul.aligned_bias = true;
  if (!uses_aux(matmul.epilogue)) {
    matmul.aligned_aux = true;
    matmul.ld_aux = 0;
  }
  return matmul;
}

inline constexpr const char* approximate_gelu = "approximate";

// Says why our own product cannot do this pass; nullptr if it can.
inline const char* own_objection(const PassProblem& p) {
  if (p.activation == Activation::none) return "no activation";
  if (p.keeps == Keeps::mask) return "a bit mask";
  if (p.library_only) return "the library's own epilogues are asked for";
  const bool gated = p.pass == Pass::gating || p.pass == Pass::glu;
  if (gated && p.activation == Activation::relu) return "ReLU as a gate";
  return hopper::objection(p.pass, p.matmul, p.bias, p.keeps != Keeps::nothing);
}

inline const char* small_objection(const PassProblem& p) {
  if (p.keeps == Keeps::mask) return "a bit mask";
  if (p.library_only) return "the library's own epilogues are asked for";
  return small::objection(p.pass, p.matmul);
}

// Says why the strategy is not valid for this pass; nullptr if it is.
inline const char* objection(const PassProblem& p, const Strategy& s, const Available& available) {
  const bool active = p.activation != Activation::none;
  if (p.pass != s.pass) return "another pass";
  if (is_own_product(s)) {
    return available.hopper ? own_objection(p) : "no kernels of our own here";
  }
  if (has_step(s, Step::own_small)) {
    return available.small ? small_objection(p) : "no kernels of our own here";
  }
  if (s.pass == Pass::fprop) {
    if (p.keeps == Keeps::mask && !s.fuses_activation) {
      return "only an epilogue writes a bit mask";
    }
    if (!active && has_step(s, Step::own_activation)) return "no activation";
  }
  // at::addmm writes to dense results only.
  if (s.provider == Provider::aten && writes_aux(p) && p.matmul.ld_aux != p.matmul.m) {
    return "padded rows";
  }
  if (s.pass == Pass::dgrad && s.fuses_activation) {
    if (!active) return "no activation";
    if (s.fuses_bias && !p.bias) return "no bias gradient";
    if (p.activation == Activation::relu && p.keeps != Keeps::mask) return "no bit mask was kept";
  }
  if (has_step(s, Step::aten_gradient)) {
    if (!active) return "no activation";
    if (p.keeps == Keeps::mask) return "ATen reads no bit mask";
  }
  if (s.pass == Pass::wgrad && !p.bias) {
    if (s.fuses_bias || has_step(s, Step::aten_column_sum)) return "no bias gradient";
  }
  if (s.provider != Provider::cublaslt) return nullptr;
  if (!epilogue_of(p, s)) return "no such epilogue";
  // In fp32 and fp64 the library runs these epilogues as a slow kernel with an approximate tanh.
  if (s.fuses_activation && is_gelu(p.activation) && size_of(p.matmul.type) > 2) {
    return approximate_gelu;
  }
  return objection(matmul_of(p, s), available.cublaslt);
}

// Finds eager's own sequence, or the fallback where ATen cannot read what was saved (a bit mask).
inline const Strategy& eager_of(const PassProblem& p, const Available& available) {
  for (const auto& s : strategies) {
    if (s.pass == p.pass && s.is_eager() && !objection(p, s, available)) return s;
  }
  return fallback_of(p.pass);
}

// Names the strategy that measured best on Hopper GPUs, and separate kernels on others.
inline const char* rule(const PassProblem& p, const Available& available) {
  constexpr int64_t many_tokens = 4096;
  const bool many = tokens_of(p) >= many_tokens;
  const bool narrow = size_of(p.matmul.type) == 2;
  // With longer sums the epilogue takes a smaller part of the time, and only measuring can decide.
  const bool own = available.hopper && many && p.matmul.k <= 2048 && !own_objection(p);
  switch (p.pass) {
    case Pass::fprop:
      return own && (p.activation != Activation::relu || wants_bits(p)) ? "hopper" : "epilogue";
    case Pass::dgrad:
      if (own) return "hopper";
      if (p.library_only && p.activation != Activation::none) return p.bias ? "d_bgrad" : "d+sum";
      // With BGRAD or a ReLU mask the library runs a slow kernel after the product.
      if (p.activation == Activation::gelu_tanh && narrow && many && p.matmul.arch == 90) {
        return "d+sum";
      }
      return is_long_and_thin(p.matmul) ? "mm+one_pass" : "product+one_pass";
    case Pass::wgrad:
      if (is_long_and_thin(p.matmul)) return "mm+sum";
      if (p.library_only && p.bias) return "bgradb";
      // In fp16 the sum is a part of the product; in other types the library runs a slow kernel.
      return p.bias && p.matmul.type == Type::f16 && many ? "bgradb" : "product+sum";
    case Pass::glu:
      return own ? "hopper" : "products+gating";
    case Pass::gating:
      if (own) return "hopper";
      return is_long_and_thin(p.matmul) ? "mm+one_pass" : "product+one_pass";
    case Pass::chain:
      return "layers";
  }
  return "aten";
}

}  // namespace fused::gemm
