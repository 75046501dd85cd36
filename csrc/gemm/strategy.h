#pragma once

// The ways to do a pass of a layer, as data. A strategy is short steps, around a matrix product in
// all passes but one; which strategy is taken, and with which algorithm, is a plan (plans/).
// Another way is another row here, and a step of its own if it brings a new kernel.

#include "gemm/hopper.h"
#include "gemm/problem.h"
#include "gemm/small.h"

#include <array>
#include <bit>
#include <string_view>

namespace fused::gemm {

// Who does the matrix product; our own kernels are for Hopper GPUs, and for small networks.
enum class Provider : uint8_t { cublaslt, own, aten };

// What there is of them, in this build and on a device.
struct Available {
  size_t cublaslt = 0;  // cublasLtGetVersion()
  bool hopper = false;
  bool small = false;
};

enum class Step : uint8_t {
  none,
  matmul,           // the provider's, with the epilogue that the strategy fuses
  matmul_up,        // the same with a gated layer's other weight
  own_small,        // all of the pass by one of our kernels for small networks
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

    {Pass::activation,
     "one_pass",
     Provider::own,
     Role::fallback,
     false,
     false,
     {Step::own_one_pass}},
    {Pass::activation,
     "aten",
     Provider::aten,
     Role::eager,
     false,
     false,
     {Step::aten_gradient, Step::aten_column_sum}},

    // Where our own is not taken, each product has a plan of its own in place of this pass's.
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
};

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

  bool operator==(const PassProblem&) const = default;
};

struct PassProblemHash {
  size_t operator()(const PassProblem& p) const {
    size_t key = static_cast<size_t>(p.pass) << 8 | static_cast<size_t>(p.activation);
    for (const bool flag : {p.bias, p.aux, p.mask, p.literal, p.deterministic}) {
      key = key << 1 | static_cast<size_t>(flag);
    }
    return ProblemHash()(p.matmul) ^ (key * 0x9e3779b97f4a7c15ull);
  }
};

// A forward that makes ReLU's bits by torch's rule, of its output. The library's mask, of the sum
// before it is rounded, is aux.
inline bool wants_bits(const PassProblem& p) { return p.pass == Pass::fprop && p.mask && !p.aux; }

inline bool has_step(const Strategy& strategy, Step step) {
  return std::ranges::find(strategy.steps, step) != strategy.steps.end();
}

// Whether it makes the bits in its own product's epilogue; behind others a kernel of ours does.
inline bool writes_bits(const Strategy& s) {
  return s.provider == Provider::own && has_step(s, Step::matmul);
}

// The epilogue of the strategy's product; nothing where the library has none.
inline std::optional<Epilogue> epilogue_of(const PassProblem& p, const Strategy& s) {
  const auto activation = s.fuses_activation ? p.activation : Activation::none;
  const bool reads_saved = p.pass == Pass::dgrad;
  const auto pass = p.pass == Pass::gating ? Pass::dgrad
                    : p.pass == Pass::glu  ? Pass::fprop
                                           : p.pass;
  return find_epilogue(pass, activation, s.fuses_bias && p.bias,
                       activation != Activation::none && (p.aux || reads_saved));
}

// The strategy's product as a problem of its own.
inline Problem matmul_of(const PassProblem& p, const Strategy& s) {
  Problem matmul = p.matmul;
  matmul.epilogue = *epilogue_of(p, s);
  // The pre-activation goes where it is kept; the activation then makes the result of it.
  if (is_forward(p.pass) && p.aux && !s.fuses_activation) {
    matmul.ldd = p.matmul.ld_aux;
    matmul.align_d = p.matmul.align_aux;
  }
  if (!uses_bias(matmul.epilogue)) matmul.align_bias = Problem().align_bias;
  if (!uses_aux(matmul.epilogue)) {
    matmul.align_aux = Problem().align_aux;
    matmul.ld_aux = 0;
  }
  return matmul;
}

inline constexpr const char* approximate_gelu = "approximate";

// Why our own product is none for this problem, or nullptr.
inline const char* own_objection(const PassProblem& p) {
  if (p.activation == Activation::none) return "no activation";
  if (p.mask && !wants_bits(p)) return "a bit mask";
  if (p.literal) return "the library's own epilogues are asked for";
  const bool gated = p.pass == Pass::gating || p.pass == Pass::glu;
  if (gated && p.activation == Activation::relu) return "ReLU as a gate";
  return hopper::refusal(p.pass, p.matmul, p.bias, p.aux || p.mask || !is_forward(p.pass));
}

// The same of our kernels for small networks.
inline const char* small_objection(const PassProblem& p) {
  if (p.mask && !wants_bits(p)) return "a bit mask";
  if (p.literal) return "the library's own epilogues are asked for";
  return small::refusal(p.pass, p.matmul);
}

// Why the strategy is none for this problem, or nullptr.
inline const char* objection(const PassProblem& p, const Strategy& s, const Available& available) {
  const bool active = p.activation != Activation::none;
  if (p.pass != s.pass) return "another pass";
  if (s.provider == Provider::own && has_step(s, Step::matmul)) {
    return available.hopper ? own_objection(p) : "no kernels of our own here";
  }
  if (has_step(s, Step::own_small)) {
    return available.small ? small_objection(p) : "no kernels of our own here";
  }
  if (s.pass == Pass::fprop) {
    if (p.mask && p.aux && !s.fuses_activation) return "only an epilogue writes a bit mask";
    if (!active && has_step(s, Step::own_activation)) return "no activation";
  }
  // at::addmm writes to dense results only.
  if (is_forward(s.pass) && s.provider == Provider::aten && p.aux &&
      p.matmul.ld_aux != p.matmul.m) {
    return "padded rows";
  }
  if (s.pass == Pass::dgrad && s.fuses_activation) {
    if (!active) return "no activation";
    if (s.fuses_bias && !p.bias) return "no bias gradient";
    if (p.activation == Activation::relu && !p.mask) return "no bit mask was kept";
  }
  if (has_step(s, Step::aten_gradient)) {
    if (!active) return "no activation";
    if (p.mask) return "ATen reads no bit mask";
  }
  if (s.pass == Pass::wgrad && !p.bias) {
    if (s.fuses_bias || has_step(s, Step::aten_column_sum)) return "no bias gradient";
  }
  if (s.provider != Provider::cublaslt) return nullptr;
  if (!epilogue_of(p, s)) return "no such epilogue";
  // In fp32 and fp64 they are a product and then a slow kernel, with an approximate tanh at that.
  if (s.fuses_activation && is_gelu(p.activation) && size_of(p.matmul.type) > 2) {
    return approximate_gelu;
  }
  return refusal(matmul_of(p, s), available.cublaslt);
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

// Eager's own sequence; where ATen has none for the problem (no activation, a bit mask), the
// fallback.
inline const Strategy& eager_of(const PassProblem& p, const Available& available) {
  for (const auto& s : strategies) {
    const bool eager = s.role == Role::eager || s.role == Role::eager_fallback;
    if (s.pass == p.pass && eager && !objection(p, s, available)) return s;
  }
  return fallback_of(p.pass);
}

inline int64_t& tokens_of(PassProblem& p) {
  return p.pass == Pass::wgrad ? p.matmul.k : p.matmul.n;
}
inline int64_t tokens_of(const PassProblem& p) {
  return p.pass == Pass::wgrad ? p.matmul.k : p.matmul.n;
}

// The strategy taken where nothing has been measured: what was found to be best on a Hopper, and
// the plain pieces elsewhere.
inline const char* rule(const PassProblem& p, const Available& available) {
  constexpr int64_t many_tokens = 4096;
  const bool many = tokens_of(p) >= many_tokens;
  const bool narrow = size_of(p.matmul.type) == 2;
  // With longer sums the epilogue is less of the time: measuring decides.
  const bool own = available.hopper && many && p.matmul.k <= 2048 && !own_objection(p);
  switch (p.pass) {
    case Pass::fprop:
      return own && (p.activation != Activation::relu || wants_bits(p)) ? "hopper" : "epilogue";
    case Pass::dgrad:
      if (own) return "hopper";
      if (p.literal && p.activation != Activation::none) return p.bias ? "d_bgrad" : "d+sum";
      // With BGRAD, or with a ReLU's mask, the library runs a slow kernel of its own behind it.
      if (p.activation == Activation::gelu_tanh && narrow && many && p.matmul.arch == 90) {
        return "d+sum";
      }
      return is_long_and_thin(p.matmul) ? "mm+one_pass" : "product+one_pass";
    case Pass::wgrad:
      if (is_long_and_thin(p.matmul)) return "mm+sum";
      if (p.literal && p.bias) return "bgradb";
      // Part of the product in fp16 only; elsewhere a slow kernel of its own.
      return p.bias && p.matmul.type == Type::f16 && many ? "bgradb" : "product+sum";
    case Pass::activation:
      return "one_pass";
    case Pass::glu:
      return own ? "hopper" : "products+gating";
    case Pass::gating:
      if (own) return "hopper";
      return is_long_and_thin(p.matmul) ? "mm+one_pass" : "product+one_pass";
  }
  return "aten";
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
    case Pass::activation:
      return "activation";
    case Pass::gating:
      return "gating";
    case Pass::glu:
      return "glu";
  }
  return "?";
}

}  // namespace fused::gemm
