#pragma once

// The ways to do a stage of a layer, as data. A strategy is a short sequence of steps, at most one
// of them a cuBLASLt product; which strategy is taken, and with which algorithm, is a plan
// (plan.h). Another way is another row here, and a step of its own if it brings a new kernel.

#include "gemm/problem.h"

#include <array>
#include <bit>

namespace fused::gemm {

enum class Step : uint8_t {
  none,
  product,          // cuBLASLt
  own_activation,   // act, of a pre-activation
  own_one_pass,     // act'(saved) and the column sums in one pass, in place
  own_column_sum,   //
  aten_product,     // mm, addmm: the algorithm that cuBLAS itself chooses
  aten_activation,  //
  aten_gradient,    // threshold_backward, gelu_backward
  aten_column_sum,  //
};

struct Strategy {
  Stage stage;
  const char* name;       // one word: it stands in files
  bool fuses_activation;  // act, or act', is in the product's epilogue, with its aux
  bool fuses_bias;        // the bias is added, or its gradient summed, in the product's epilogue
  std::array<Step, 3> steps;
};

// Of one stage: the fullest use of the library first, eager's own sequence last. The two facts that
// a caller has to know follow from the stage: only a bit mask that the library wrote departs from
// torch's rule at exactly 0 (keeps_rule_at_zero), and what is saved is what the call asks for.
inline constexpr Strategy strategies[] = {
    {Stage::forward, "epilogue", true, true, {Step::product}},
    {Stage::forward, "bias+activation", false, true, {Step::product, Step::own_activation}},
    {Stage::forward, "aten", false, false, {Step::aten_product, Step::aten_activation}},

    {Stage::input_gradient, "d_bgrad", true, true, {Step::product}},
    {Stage::input_gradient, "d+sum", true, false, {Step::product, Step::own_column_sum}},
    {Stage::input_gradient, "product+one_pass", false, false, {Step::product, Step::own_one_pass}},
    {Stage::input_gradient, "mm+one_pass", false, false, {Step::aten_product, Step::own_one_pass}},
    {Stage::input_gradient,
     "aten",
     false,
     false,
     {Step::aten_product, Step::aten_gradient, Step::aten_column_sum}},

    {Stage::weight_gradient, "bgradb", false, true, {Step::product}},
    {Stage::weight_gradient, "product+sum", false, false, {Step::product, Step::own_column_sum}},
    {Stage::weight_gradient, "mm+sum", false, false, {Step::aten_product, Step::own_column_sum}},
    {Stage::weight_gradient, "aten", false, false, {Step::aten_product, Step::aten_column_sum}},
};

// A stage to be done: everything that decides which strategies and algorithms are valid for it.
struct StageProblem {
  Stage stage = Stage::forward;
  Activation activation = Activation::none;  // input gradient: of the layer before
  bool bias = false;                         // there is one, or its gradient is wanted
  bool aux = false;            // forward: the mask or the pre-activation is to be written
  bool mask = false;           // aux, or what was saved, is ReLU's bit mask
  bool literal = false;        // the user asked for the library's own epilogues
  bool deterministic = false;  // nothing may depend on timing
  Problem product;  // of the bare matrices; alignments of bias and aux where there are any

  bool operator==(const StageProblem&) const = default;
};

struct StageProblemHash {
  size_t operator()(const StageProblem& p) const {
    const size_t flags = static_cast<size_t>(p.stage) << 8 |
                         static_cast<size_t>(p.activation) << 5 | p.bias << 4 | p.aux << 3 |
                         p.mask << 2 | p.literal << 1 | static_cast<size_t>(p.deterministic);
    return ProblemHash()(p.product) ^ (flags * 0x9e3779b97f4a7c15ull);
  }
};

inline bool has_step(const Strategy& strategy, Step step) {
  return std::ranges::find(strategy.steps, step) != strategy.steps.end();
}

// torch's ReLU has gradient 0 at exactly 0, cuBLASLt's bit mask 1.
inline bool keeps_rule_at_zero(const StageProblem& p) {
  return !(p.activation == Activation::relu && p.mask);
}

// The epilogue of the strategy's product; nothing where the library has none.
inline std::optional<Epilogue> epilogue_of(const StageProblem& p, const Strategy& s) {
  const auto activation = s.fuses_activation ? p.activation : Activation::none;
  const bool reads_saved = p.stage == Stage::input_gradient;
  return find_epilogue(p.stage, activation, s.fuses_bias && p.bias,
                       activation != Activation::none && (p.aux || reads_saved));
}

// The strategy's product as a problem of its own.
inline Problem product_of(const StageProblem& p, const Strategy& s) {
  Problem product = p.product;
  product.epilogue = *epilogue_of(p, s);
  // The pre-activation goes where it is kept; the activation then makes the result of it.
  if (p.stage == Stage::forward && p.aux && !s.fuses_activation) {
    product.ldd = p.product.ld_aux;
    product.align_d = p.product.align_aux;
  }
  if (!uses_bias(product.epilogue)) product.align_bias = Problem().align_bias;
  if (!uses_aux(product.epilogue)) {
    product.align_aux = Problem().align_aux;
    product.ld_aux = 0;
  }
  return product;
}

inline constexpr const char* approximate = "approximate";

// Why the strategy is none for this problem, or nullptr.
inline const char* objection(const StageProblem& p, const Strategy& s, size_t library_version) {
  const bool active = p.activation != Activation::none;
  const bool product = has_step(s, Step::product);
  if (p.stage != s.stage) return "another stage";
  if (s.stage == Stage::forward) {
    if (p.mask && !s.fuses_activation) return "only an epilogue writes a bit mask";
    if (!active && has_step(s, Step::own_activation)) return "no activation";
    // at::addmm writes to dense results only.
    if (has_step(s, Step::aten_product) && p.aux && p.product.ld_aux != p.product.m) {
      return "padded rows";
    }
  }
  if (s.stage == Stage::input_gradient && s.fuses_activation) {
    if (!active) return "no activation";
    if (s.fuses_bias && !p.bias) return "no bias gradient";
    if (p.activation == Activation::relu && !p.mask) return "no bit mask was kept";
  }
  if (has_step(s, Step::aten_gradient)) {
    if (!active) return "no activation";
    if (p.mask) return "ATen reads no bit mask";
  }
  if (s.stage == Stage::weight_gradient && !p.bias) {
    if (s.fuses_bias || has_step(s, Step::aten_column_sum)) return "no bias gradient";
  }
  if (!product) return nullptr;
  if (!epilogue_of(p, s)) return "no such epilogue";
  // In fp32 and fp64 they are a product and then a slow kernel, with an approximate tanh at that.
  if (s.fuses_activation && is_gelu(p.activation) && size_of(p.product.type) > 2) {
    return approximate;
  }
  return refusal(product_of(p, s), library_version);
}

inline int64_t tokens_of(const StageProblem& p) {
  return p.stage == Stage::weight_gradient ? p.product.k : p.product.n;
}

// The strategy taken where nothing has been measured: what was found to be best on a Hopper, and
// the plain pieces elsewhere.
inline const char* rule(const StageProblem& p) {
  constexpr int64_t many_tokens = 4096;
  const bool many = tokens_of(p) >= many_tokens;
  const bool narrow = size_of(p.product.type) == 2;
  switch (p.stage) {
    case Stage::forward:
      return "epilogue";
    case Stage::input_gradient:
      if (p.literal && p.activation != Activation::none) return p.bias ? "d_bgrad" : "d+sum";
      // With BGRAD, or with a ReLU's mask, the library runs a slow kernel of its own behind it.
      if (p.activation == Activation::gelu_tanh && narrow && many && p.product.arch == 90) {
        return "d+sum";
      }
      return is_long_and_thin(p.product) ? "mm+one_pass" : "product+one_pass";
    case Stage::weight_gradient:
      if (is_long_and_thin(p.product)) return "mm+sum";
      if (p.literal && p.bias) return "bgradb";
      // Part of the product in fp16 only; elsewhere a slow kernel of its own.
      return p.bias && p.product.type == Type::f16 && many ? "bgradb" : "product+sum";
  }
  return "aten";
}

// The problem under which a measurement is remembered: token counts between two powers of two share
// one, and so do equal devices.
inline StageProblem bucket_of(const StageProblem& p, int first_equal_device) {
  StageProblem bucket = p;
  auto& tokens = p.stage == Stage::weight_gradient ? bucket.product.k : bucket.product.n;
  tokens = static_cast<int64_t>(std::bit_ceil(static_cast<uint64_t>(tokens)));
  bucket.product.device = first_equal_device;
  bucket.deterministic = false;
  return bucket;
}

inline const char* name(Stage stage) {
  constexpr const char* names[] = {"forward", "input_gradient", "weight_gradient"};
  return names[static_cast<int>(stage)];
}

}  // namespace fused::gemm
