// The rule of the policy "batch_invariant", for every number of rows and place of theirs.

#include "gemm/invariant.h"

#include "expect.h"

#include <random>

namespace {

using namespace fused;
using namespace fused::gemm;

PassProblem drawn(std::mt19937& random) {
  const auto one_of = [&](int n) { return static_cast<int>(random() % n); };
  PassProblem p;
  constexpr Pass passes[] = {Pass::fprop, Pass::dgrad, Pass::gating, Pass::glu};
  p.pass = passes[one_of(4)];
  p.activation = activations[one_of(std::size(activations))];
  constexpr Keeps kept[] = {Keeps::nothing, Keeps::values, Keeps::mask, Keeps::bits};
  p.keeps = kept[one_of(4)];
  p.bias = one_of(2) != 0;
  p.matmul.arch = 90;
  p.matmul.type = static_cast<Type>(one_of(4));
  p.matmul.m = 1 + one_of(3000), p.matmul.k = 1 + one_of(3000);
  if (one_of(2) != 0) p.matmul.m *= 8, p.matmul.k *= 8;
  p.matmul.n = 1;
  return p;
}

TEST(rule_of_invariance_knows_no_rows) {
  std::mt19937 random(1);
  for (int i = 0; i < 500; ++i) {
    const auto p = drawn(random);
    const auto way = invariant::way(p);
    const auto steps = invariant::strategy(p).steps;
    for (int j = 0; j < 20; ++j) {
      auto other = p;
      auto& matmul = other.matmul;
      matmul.n = 1 + random() % 65536;
      matmul.ldb = matmul.k + random() % 50, matmul.ldd = matmul.m + random() % 50;
      matmul.aligned_b = random() % 2 != 0, matmul.aligned_d = random() % 2 != 0;
      matmul.transpose_b = random() % 2 != 0;
      EXPECT(invariant::way(other) == way);
      EXPECT(invariant::strategy(other).steps == steps);
      EXPECT(!invariant::objection(other, /*hopper=*/true));
    }
  }
}

TEST(no_strategy_of_invariance_is_measured_or_of_a_library) {
  std::mt19937 random(2);
  for (int i = 0; i < 500; ++i) {
    const auto p = drawn(random);
    const auto s = invariant::strategy(p);
    EXPECT(s.provider == Provider::own && !has_step(s, Step::own_small));
    EXPECT(has_step(s, Step::matmul) == (invariant::way(p) == invariant::Way::whole));
    const bool active = p.activation != Activation::none;
    const bool in_steps = invariant::way(p) == invariant::Way::in_steps;
    if (in_steps && active && p.pass == Pass::fprop) EXPECT(has_step(s, Step::own_activation));
    if (in_steps && active && p.pass == Pass::dgrad) EXPECT(has_step(s, Step::own_one_pass));
  }
}

TEST(what_invariance_cannot_hold_is_named) {
  std::mt19937 random(3);
  for (int i = 0; i < 200; ++i) {
    auto p = drawn(random);
    const bool narrow = size_of(p.matmul.type) == 2;
    EXPECT((invariant::objection(p, /*hopper=*/false) != nullptr) == narrow);
    p.matmul.arch = 80;
    EXPECT((invariant::objection(p, /*hopper=*/true) != nullptr) == narrow);
    p.pass = Pass::wgrad;
    EXPECT(invariant::objection(p, /*hopper=*/true) != nullptr);
  }
}

}  // namespace
