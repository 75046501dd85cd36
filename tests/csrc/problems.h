#pragma once

// Pass problems for the tests of plans, which strategies apply to them, and decisions of them.

#include "gemm/choice.h"
#include "plans/decisions.h"
#include "plans/plan_file.h"

#include <c10/util/Exception.h>

#include <string>
#include <vector>

using namespace fused;
using namespace fused::gemm;
using namespace fused::plans;

inline constexpr size_t library = 130100;
inline constexpr Available with_hopper{library, true, true}, without_hopper{library};

inline constexpr Pass every_pass[] = {Pass::fprop,  Pass::dgrad, Pass::wgrad,
                                      Pass::gating, Pass::glu,   Pass::chain};
static_assert(every_pass[std::size(every_pass) - 1] == last_pass);

inline PassProblem problem_of(Pass pass, Activation activation = Activation::none, bool bias = true,
                              bool mask = false) {
  PassProblem p;
  p.pass = pass;
  p.activation = activation;
  p.bias = bias;
  if (mask) p.keeps = pass == Pass::fprop ? Keeps::bits : Keeps::mask;
  auto& g = p.matmul;
  g.arch = 90, g.type = Type::bf16;
  g.transpose_a = is_forward(pass);
  g.transpose_b = pass == Pass::wgrad;
  g.m = 256, g.n = 8192, g.k = 128;
  if (pass == Pass::wgrad) g.n = 256, g.m = 128, g.k = 8192;
  g.lda = g.transpose_a ? g.k : g.m, g.ldb = g.transpose_b ? g.n : g.k, g.ldd = g.m;
  const bool reads =
      (pass == Pass::dgrad || pass == Pass::gating) && activation != Activation::none;
  if (reads && !mask) p.keeps = Keeps::values;
  if (mask || reads) g.ld_aux = g.m;
  g.workspace_limit = 32 << 20;
  if (pass == Pass::chain) p.further = {64, 10};
  return p;
}

inline std::vector<PassProblem> every_problem() {
  std::vector<PassProblem> all;
  for (auto pass : every_pass) {
    for (auto activation : {Activation::none, Activation::relu, Activation::gelu_tanh,
                            Activation::gelu_erf, Activation::silu}) {
      for (auto type : {Type::f64, Type::f32, Type::f16, Type::bf16}) {
        for (int flags = 0; flags < 16; ++flags) {
          const bool mask = flags & 2 && activation == Activation::relu;
          auto p = problem_of(pass, activation, flags & 1, mask);
          p.matmul.type = type;
          p.library_only = flags & 4;
          if (is_forward(pass) && activation != Activation::none && flags & 8) {
            p.keeps = mask ? Keeps::mask : Keeps::values;
            p.matmul.ld_aux = p.matmul.m;
          }
          if (pass == Pass::fprop && activation == Activation::relu && p.keeps == Keeps::values) {
            continue;
          }
          if (pass == Pass::wgrad && activation != Activation::none) continue;
          if (pass == Pass::wgrad && !p.bias) {
            p.matmul.adds = flags & 2;
            p.matmul.to_f32 = flags & 8 && size_of(type) == 2;
          }
          const bool gated = pass == Pass::gating || pass == Pass::glu;
          if (gated && activation == Activation::none) continue;
          if ((gated || pass == Pass::chain) && mask) continue;
          if (pass == Pass::gating && p.bias) continue;
          all.push_back(p);
        }
      }
    }
  }
  return all;
}

inline bool applies(const PassProblem& p, const Strategy& s) {
  return !objection(p, s, with_hopper);
}
inline bool applies(const PassProblem& p, const char* name) {
  return applies(p, *find_strategy(p.pass, name));
}

inline Decision decision(const PassProblem& p, const char* strategy, uint64_t mark = 7) {
  Decision d;
  d.origin = Decision::Origin::measured;
  d.strategy = find_strategy(p.pass, strategy);
  for (size_t i = 0; i < d.algorithm.bytes.size(); ++i) d.algorithm.bytes[i] = mark << (8 * i);
  d.algorithm.workspace = 4096, d.microseconds = 12.5, d.eager_microseconds = 20;
  return d;
}

inline const MadeFor here{"GPU A", library, "580.65"};

inline Entries entries_of(int count, int64_t first = 1) {
  Entries entries;
  for (int64_t i = first; i < first + count; ++i) {
    auto p = problem_of(Pass::fprop, Activation::relu);
    p.matmul.m = 8 * i;
    auto d = decision(p, "epilogue", i);
    d.origin = Decision::Origin::file;
    entries.emplace_back(p, d);
  }
  return entries;
}

// The message of the error, or nothing.
template <typename Fn>
std::string error_of(const Fn& fn) {
  try {
    fn();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}
