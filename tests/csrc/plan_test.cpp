// Strategies and the choice between them, without a GPU.

#include "expect.h"
#include "problems.h"

#include "plans/errors.h"
#include "plans/select.h"

#include <limits>
#include <random>
#include <set>

namespace {

constexpr double never = std::numeric_limits<double>::infinity();

// ---- strategies --------------------------------------------------------------------------------

TEST(every_problem_has_a_way) {
  EXPECT(every_problem().size() > 100);
  for (const auto& p : every_problem()) {
    for (const auto& there : {with_hopper, without_hopper}) {
      const auto* by_rule = find_strategy(p.pass, rule(p, there));
      EXPECT(by_rule != nullptr);
      // Our own product is named only where it can be taken.
      if (by_rule->provider == Provider::own) EXPECT(!objection(p, *by_rule, there));
    }
    std::vector<const Strategy*> ways;
    for (const auto& s : strategies) {
      if (!applies(p, s)) continue;
      ways.push_back(&s);
      EXPECT(s.pass == p.pass);
      // The library does what ATen cannot do, and the other way round.
      if (s.provider == Provider::cublaslt) EXPECT(!objection(matmul_of(p, s), library));
    }
    EXPECT(!ways.empty());
    // Only a bit mask cannot be written without the library.
    const bool mask_is_written = p.pass == Pass::fprop && p.keeps == Keeps::mask;
    const auto& fallback = fallback_of(p.pass);
    EXPECT(mask_is_written || (fallback.provider != Provider::cublaslt && applies(p, fallback)));
    const auto& eager = eager_of(p, with_hopper);
    EXPECT(mask_is_written || (eager.provider != Provider::cublaslt && applies(p, eager)));
    // Activation and bias are applied once.
    for (const auto* s : ways) {
      const bool activation = s->fuses_activation || has_step(*s, Step::own_activation) ||
                              has_step(*s, Step::own_one_pass) ||
                              has_step(*s, Step::aten_activation) ||
                              has_step(*s, Step::aten_gradient) || has_step(*s, Step::own_gating) ||
                              has_step(*s, Step::aten_gating) || has_step(*s, Step::own_glu) ||
                              has_step(*s, Step::aten_glu) || has_step(*s, Step::layers);
      // Both products of a gated layer are done.
      EXPECT((p.pass == Pass::glu && !s->fuses_activation) == has_step(*s, Step::matmul_up));
      EXPECT(p.activation == Activation::none || activation);
    }
  }
}

TEST(names_are_their_own) {
  std::set<std::pair<Pass, std::string>> names;
  for (const auto& s : strategies) {
    names.emplace(s.pass, s.name);
    EXPECT(find_strategy(s.pass, s.name) == &s);
    EXPECT(std::string(s.name).find(' ') == std::string::npos);
  }
  EXPECT(names.size() == std::size(strategies));
  EXPECT(find_strategy(Pass::fprop, "bgradb") == nullptr);
}

TEST(every_pass_has_one_fallback_and_one_eager) {
  for (auto pass : every_pass) {
    int fallbacks = 0, eagers = 0;
    for (const auto& s : strategies) {
      if (s.pass != pass) continue;
      EXPECT(s.steps.front() == Step::matmul || s.steps.front() == Step::own_small ||
             s.steps.front() == Step::layers);
      const bool both = s.role == Role::eager_fallback;
      fallbacks += both || s.role == Role::fallback;
      eagers += both || s.role == Role::eager;
      // The fallbacks need no library.
      if (s.role != Role::candidate) EXPECT(s.provider != Provider::cublaslt);
      if (s.role == Role::eager) EXPECT(s.provider == Provider::aten);
    }
    EXPECT(fallbacks == 1 && eagers == 1);
  }
  // Eager applies act' in a kernel of its own, which reads no bit mask.
  const auto edge = problem_of(Pass::dgrad, Activation::relu);
  EXPECT(eager_of(edge, with_hopper).role == Role::eager);
  EXPECT(&eager_of(problem_of(Pass::dgrad, Activation::relu, true, true), with_hopper) ==
         &fallback_of(Pass::dgrad));
}

TEST(what_may_be_done_where) {
  const auto forward = problem_of(Pass::fprop, Activation::gelu_tanh);
  EXPECT(applies(forward, "epilogue") && applies(forward, "bias+activation"));
  EXPECT(!applies(problem_of(Pass::fprop, Activation::gelu_erf), "epilogue"));
  EXPECT(!applies(problem_of(Pass::fprop), "bias+activation"));
  auto wide = forward;
  wide.matmul.type = Type::f32;
  EXPECT(!applies(wide, "epilogue") && applies(wide, "bias+activation"));
  auto padded = forward;
  padded.keeps = Keeps::values, padded.matmul.m = 250, padded.matmul.ld_aux = 256;
  EXPECT(applies(padded, "epilogue") && !applies(padded, "aten"));

  const auto edge = [](Activation a, bool bias, bool mask) {
    return problem_of(Pass::dgrad, a, bias, mask);
  };
  EXPECT(applies(edge(Activation::gelu_tanh, true, false), "d_bgrad"));
  EXPECT(applies(edge(Activation::gelu_tanh, true, false), "aten"));
  EXPECT(!applies(edge(Activation::gelu_tanh, false, false), "d_bgrad"));
  EXPECT(applies(edge(Activation::gelu_tanh, true, false), "d+sum"));
  EXPECT(applies(edge(Activation::gelu_tanh, false, false), "d+sum"));
  EXPECT(!applies(edge(Activation::relu, true, false), "d_bgrad"));  // no mask to read
  EXPECT(applies(edge(Activation::relu, true, true), "d_bgrad"));
  EXPECT(!applies(edge(Activation::relu, true, true), "aten"));
  EXPECT(!applies(edge(Activation::gelu_erf, true, false), "d+sum"));
  auto thin = edge(Activation::gelu_tanh, true, false);
  thin.matmul.k = 1;
  EXPECT(!applies(thin, "d_bgrad") && applies(thin, "product+one_pass"));

  EXPECT(applies(problem_of(Pass::wgrad), "bgradb"));
  EXPECT(!applies(problem_of(Pass::wgrad, Activation::none, false), "bgradb"));
}

TEST(products_are_those_of_the_epilogue) {
  auto p = problem_of(Pass::fprop, Activation::gelu_tanh);
  p.keeps = Keeps::values, p.matmul.ld_aux = 264, p.matmul.aligned_bias = false;
  const auto full = matmul_of(p, *find_strategy(p.pass, "epilogue"));
  EXPECT(full.epilogue == Epilogue::gelu_aux_bias && full.ld_aux == 264 && full.ldd == 256);
  EXPECT(full.aligned_aux && !full.aligned_bias);
  p.matmul.aligned_aux = false;
  // The product alone writes the pre-activation, to where it is kept.
  const auto plain = matmul_of(p, *find_strategy(p.pass, "bias+activation"));
  EXPECT(plain.epilogue == Epilogue::bias && plain.ldd == 264 && !plain.aligned_d);
  EXPECT(plain.ld_aux == 0 && plain.aligned_aux);

  p = problem_of(Pass::dgrad, Activation::gelu_tanh);
  EXPECT(matmul_of(p, *find_strategy(p.pass, "d_bgrad")).epilogue == Epilogue::dgelu_bgrad);
  EXPECT(matmul_of(p, *find_strategy(p.pass, "d+sum")).epilogue == Epilogue::dgelu);
  EXPECT(matmul_of(p, *find_strategy(p.pass, "product+one_pass")).epilogue == Epilogue::identity);
  p = problem_of(Pass::wgrad);
  EXPECT(matmul_of(p, *find_strategy(p.pass, "bgradb")).epilogue == Epilogue::bgradb);
  EXPECT(matmul_of(p, *find_strategy(p.pass, "product+sum")).epilogue == Epilogue::identity);
}

// ---- our own products for Hopper ----------------------------------------------------------------

TEST(hopper_takes_what_the_hardware_can_copy) {
  const auto backward = problem_of(Pass::dgrad, Activation::gelu_erf);
  auto forward = problem_of(Pass::fprop, Activation::gelu_erf);
  forward.keeps = Keeps::values, forward.matmul.ld_aux = forward.matmul.m;
  const auto gating = problem_of(Pass::gating, Activation::silu, false);
  for (const auto& good :
       {backward, forward, problem_of(Pass::dgrad, Activation::relu, false), gating}) {
    EXPECT(applies(good, "hopper"));
    EXPECT(objection(good, *find_strategy(good.pass, "hopper"), without_hopper) != nullptr);
    const auto refused = [&good](const auto& change) {
      auto p = good;
      change(p);
      return !applies(p, "hopper");
    };
    EXPECT(refused([](PassProblem& p) { p.activation = Activation::none; }));
    EXPECT(refused([](PassProblem& p) { p.keeps = Keeps::mask; }));
    EXPECT(refused([](PassProblem& p) { p.library_only = true; }));
    EXPECT(refused([](PassProblem& p) { p.matmul.arch = 100; }));
    EXPECT(refused([](PassProblem& p) { p.matmul.type = Type::f32; }));
    EXPECT(refused([](PassProblem& p) { p.matmul.transpose_b = true; }));
    for (const auto size : {&Problem::m, &Problem::k, &Problem::lda, &Problem::ldb, &Problem::ldd,
                            &Problem::ld_aux}) {
      EXPECT(refused([=](PassProblem& p) { p.matmul.*size += 4; }));
    }
    for (const auto flag :
         {&Problem::aligned_a, &Problem::aligned_b, &Problem::aligned_d, &Problem::aligned_aux}) {
      EXPECT(refused([=](PassProblem& p) { p.matmul.*flag = false; }));
    }
    EXPECT(refused([](PassProblem& p) { p.matmul.n = int64_t{1} << 31; }));
    EXPECT(refused([](PassProblem& p) { p.matmul.n = 65536, p.matmul.m = p.matmul.k = 4096; }));
    // A weight by columns, rows apart, at offsets, and numbers of features that no tile divides.
    EXPECT(!refused([](PassProblem& p) {
      p.matmul.transpose_a = !p.matmul.transpose_a;
      p.matmul.m = 264, p.matmul.k = 136, p.matmul.n = 8191;
      p.matmul.lda = p.matmul.ldb = p.matmul.ldd = 512, p.matmul.ld_aux = 520;
      p.matmul.aligned_bias = true;
    }));
  }
  // The bias is read in whole vectors, its gradient written number by number.
  auto odd = forward;
  odd.matmul.aligned_bias = false;
  EXPECT(!applies(odd, "hopper"));
  odd = backward;
  odd.matmul.aligned_bias = false;
  EXPECT(applies(odd, "hopper"));
  EXPECT(!applies(problem_of(Pass::gating, Activation::relu, false), "hopper"));
  EXPECT(!applies(problem_of(Pass::glu, Activation::relu, false), "hopper"));
  auto few = problem_of(Pass::glu, Activation::silu);
  EXPECT(applies(few, "hopper"));
  few.matmul.n = hopper::least_tokens_of_glu - 1;
  EXPECT(!applies(few, "hopper"));
}

TEST(bits_are_made_behind_any_forward) {
  auto p = problem_of(Pass::fprop, Activation::relu, true, /*mask=*/true);
  EXPECT(wants_bits(p) && std::string(rule(p, with_hopper)) == "hopper");
  for (const auto* name : {"hopper", "epilogue", "bias+activation", "aten"}) {
    EXPECT(applies(p, name));
    const auto& s = *find_strategy(Pass::fprop, name);
    EXPECT(!uses_aux(matmul_of(p, s).epilogue) && matmul_of(p, s).ld_aux == 0);
    EXPECT(is_own_product(s) == (name == std::string("hopper")));
  }
  EXPECT(std::string(rule(p, without_hopper)) == "epilogue");
  p.matmul.n = small::most_tokens;
  EXPECT(applies(p, "small") && !is_own_product(*find_strategy(Pass::fprop, "small")));
  EXPECT(std::string(rule(p, with_hopper)) == "epilogue");
  // The library's mask is another: of the sum before it is rounded, and set at 0.
  p.keeps = Keeps::mask;
  EXPECT(!wants_bits(p) && applies(p, "epilogue") && !applies(p, "hopper") && !applies(p, "aten"));
  EXPECT(!wants_bits(problem_of(Pass::dgrad, Activation::relu, true, true)));
}

TEST(small_takes_small_problems) {
  for (auto pass : {Pass::fprop, Pass::dgrad, Pass::wgrad, Pass::chain}) {
    auto good = problem_of(pass, pass == Pass::wgrad ? Activation::none : Activation::relu);
    EXPECT(!applies(good, "small"));  // its tokens are many
    tokens_of(good) = small::most_tokens;
    EXPECT(applies(good, "small"));
    EXPECT(objection(good, *find_strategy(pass, "small"), without_hopper) != nullptr);
    const auto refused = [&good](auto change) {
      auto p = good;
      change(p);
      return !applies(p, "small");
    };
    EXPECT(refused([](PassProblem& p) { ++tokens_of(p); }));
    EXPECT(refused([](PassProblem& p) { p.matmul.m = small::most_features + 1; }));
    EXPECT(refused([](PassProblem& p) { p.matmul.m = 0; }));
    EXPECT(refused([](PassProblem& p) { p.matmul.type = Type::f64; }));
    EXPECT(!refused([](PassProblem& p) { p.matmul.type = Type::f32; }));
    EXPECT(refused([](PassProblem& p) { p.matmul.transpose_a = !p.matmul.transpose_a; }));
    EXPECT(refused([](PassProblem& p) { p.matmul.transpose_b = !p.matmul.transpose_b; }));
    EXPECT(refused([](PassProblem& p) { p.keeps = Keeps::mask; }));
    EXPECT(refused([](PassProblem& p) { p.library_only = true; }));
    // Rows of any length, at any address, with and without a bias.
    EXPECT(!refused([](PassProblem& p) {
      p.bias = !p.bias;
      p.matmul.m = 10, p.matmul.ldd = 11, p.matmul.lda = 1023, p.matmul.aligned_a = false;
    }));
  }
}

// A row for each tile of tokens, in whole tiles of features.
TEST(hopper_partial_sums_have_their_places) {
  for (const auto& [m, n] : {std::pair{8, 1}, {128, 128}, {136, 129}, {264, 1000}}) {
    Problem p;
    p.m = m, p.n = n;
    const int64_t beyond = hopper::partial_rows(p) * hopper::tile_tokens - n;
    const int64_t ld = hopper::partial_columns(p);
    EXPECT(beyond >= 0 && beyond < hopper::tile_tokens);
    EXPECT(ld % hopper::tile_features == 0 && ld >= m && ld - m < hopper::tile_features);
  }
}

TEST(hopper_knows_its_orders_only) {
  for (uint64_t i = 0; i < std::size(hopper::orders); ++i) {
    EXPECT(hopper::order_of({{i}, 0})->swizzle == hopper::orders[i].swizzle);
  }
  // A file from another version may hold any number.
  EXPECT(!hopper::order_of({{std::size(hopper::orders)}, 0}) && !hopper::order_of({{~0ull}, 0}));
}

TEST(rules_prefer_hopper_where_it_was_faster) {
  const auto rule_of = [](const PassProblem& p) { return std::string(rule(p, with_hopper)); };
  EXPECT(rule_of(problem_of(Pass::dgrad, Activation::relu)) == "hopper");
  EXPECT(rule_of(problem_of(Pass::dgrad, Activation::gelu_tanh)) == "hopper");
  EXPECT(rule_of(problem_of(Pass::fprop, Activation::gelu_erf)) == "hopper");
  EXPECT(rule_of(problem_of(Pass::fprop, Activation::relu)) == "epilogue");
  EXPECT(rule_of(problem_of(Pass::gating, Activation::silu, false)) == "hopper");
  EXPECT(rule_of(problem_of(Pass::gating, Activation::relu, false)) == "product+one_pass");
  EXPECT(rule_of(problem_of(Pass::glu, Activation::silu, false)) == "hopper");
  EXPECT(rule_of(problem_of(Pass::glu, Activation::relu, false)) == "products+gating");
  EXPECT(rule_of(problem_of(Pass::dgrad, Activation::none)) != "hopper");
  auto other = problem_of(Pass::dgrad, Activation::gelu_tanh);
  other.matmul.n = 256;
  EXPECT(rule_of(other) != "hopper");
  other.matmul.n = 8192, other.matmul.k = 4096;
  EXPECT(rule_of(other) != "hopper" && applies(other, "hopper"));
}

TEST(token_counts_share_buckets) {
  for (auto pass : {Pass::fprop, Pass::dgrad, Pass::wgrad}) {
    const auto with = [&](int64_t tokens) {
      auto p = problem_of(pass);
      (pass == Pass::wgrad ? p.matmul.k : p.matmul.n) = tokens;
      EXPECT(tokens_of(p) == tokens);
      return bucket_of(p, 0);
    };
    EXPECT(with(4097) == with(8192) && with(5000) == with(8000));
    EXPECT(!(with(4096) == with(4097)) && !(with(8192) == with(8193)));
    EXPECT(tokens_of(with(5000)) == 8192 && tokens_of(with(1)) == 1);
  }
  auto p = problem_of(Pass::fprop);
  const auto first = bucket_of(p, 0);
  p.matmul.device = 3, p.deterministic = true;
  EXPECT(bucket_of(p, 0) == first && !(bucket_of(p, 3) == first));
  p.matmul.m++;  // features are no tokens
  EXPECT(!(bucket_of(p, 0) == first));
}

// ---- races -------------------------------------------------------------------------------------

struct Track {
  std::vector<double> speeds;  // microseconds; infinity: fails
  double noise = 0;
  double lap_cost = 0;  // wall-clock time of a round
  size_t disturbed_at_first = ~size_t{0};
  std::vector<size_t> rounds = {};
  double now = 0;
  std::mt19937 random{1};

  Timings run(size_t incumbent, TuningRules rules = {}) {
    rounds.assign(speeds.size(), 0);
    return time_in_rounds(speeds.size(), incumbent, round(), clock(), rules);
  }

  size_t winner(const Candidates& candidates, const Judge& judge) {
    rounds.assign(speeds.size(), 0);
    const auto choice = choose(candidates, round(), clock(), judge, {});
    return choice ? choice->winner : speeds.size();
  }
  // `verdicts` says which are sound; without it, all are.
  size_t winner(size_t incumbent, std::vector<Verdict> verdicts = {}) {
    verdicts.resize(speeds.size(), Verdict::sound);
    return winner({std::vector<bool>(speeds.size(), true), incumbent, speeds.size()},
                  [&](size_t i) { return verdicts[i]; });
  }

  Round round() {
    return [this](const std::vector<size_t>& running) {
      std::normal_distribution<double> normal(0, 1);
      std::vector<double> times;
      for (const size_t i : running) {
        const bool disturbed = rounds[i]++ == 0 && i == disturbed_at_first;
        times.push_back(speeds[i] * (1 + noise * std::abs(normal(random))) * (disturbed ? 2 : 1));
      }
      now += lap_cost;
      return times;
    };
  }
  Clock clock() {
    return [this] { return now; };
  }
};

TEST(the_fastest_wins) {
  for (size_t incumbent = 0; incumbent < 4; ++incumbent) {
    Track track{{100, 80, 120, 300}};
    EXPECT(track.winner(incumbent) == 1);
    // Who is far behind is not asked again, but for the incumbent.
    EXPECT(track.rounds[3] == 1 || incumbent == 3);
    EXPECT(track.rounds[2] == 2 || incumbent == 2);
    EXPECT(track.rounds[incumbent] >= TuningRules().least_rounds);
  }
  for (int seed = 0; seed < 50; ++seed) {
    Track noisy{{100, 80, 95, 97}, 0.1};
    noisy.random.seed(seed);
    EXPECT(noisy.winner(0) == 1);
  }
  // A disturbed lap does not count against anybody.
  Track disturbed{{100, 80, 95}};
  disturbed.disturbed_at_first = 1;
  EXPECT(disturbed.winner(0) == 1);
}

TEST(the_incumbent_stays_unless_the_lead_is_clear) {
  EXPECT((Track{{100, 99}}.winner(0)) == 0);
  EXPECT((Track{{100, 99}}.winner(1)) == 1);
  EXPECT((Track{{100, 97}}.winner(0)) == 1);
  EXPECT((Track{{2, 1.8}}.winner(0)) == 0);  // a gain below what can be timed
  int changes = 0;
  for (int seed = 0; seed < 100; ++seed) {
    Track equal{{100, 100, 100, 100}, 0.02};
    equal.random.seed(seed);
    changes += equal.winner(2) != 2;
  }
  EXPECT(changes < 10);
}

TEST(who_fails_is_out) {
  Track track{{100, never, 90}};
  EXPECT(track.winner(0) == 2 && track.rounds[1] == 1);
  EXPECT((Track{{never, 200}}.winner(0)) == 1);
  EXPECT((Track{{never, never}}.winner(1)) == 2);  // nobody
  const auto none = Track{{never, never}}.run(1);
  EXPECT(none.medians[1] == never && none.rounds == 1);

  // One that ran at first and then no more has no time to show.
  int round = 0;
  const auto late = time_in_rounds(
      2, 1,
      [&](const std::vector<size_t>& running) {
        ++round;
        std::vector<double> times;
        for (const size_t i : running) times.push_back(i == 0 ? (round < 3 ? 90 : never) : 100);
        return times;
      },
      [] { return 0.0; }, {});
  EXPECT(late.medians[1] == 100 && late.medians[0] == never);
}

TEST(the_budget_is_kept) {
  TuningRules rules;
  rules.budget_us = 1000;
  Track quick{{10, 11}, 0, 1};
  EXPECT(quick.run(0, rules).rounds == rules.most_rounds);
  Track slow{{10, 11}, 0, 400};
  EXPECT(slow.run(0, rules).rounds == rules.least_rounds);
  // No round that would end beyond the budget and a quarter of it, but for the first.
  Track huge{{10, 9}, 0, 2500};
  EXPECT(huge.run(0, rules).rounds == 1);
  Track large{{10, 9}, 0, 700};
  EXPECT(large.run(0, rules).rounds == 1);
  // A lone survivor has nobody left to be compared with.
  Track lone{{10, 40, 50}, 0, 1};
  EXPECT(lone.run(0, rules).rounds == rules.least_rounds);
}

TEST(long_laps_are_fewer) {
  // Each is told apart by its first, so that another lap of the slower ones is none too few.
  Track quick{{100, 110, 120, 150}}, slow{{1000, 1100, 1200, 1500}};
  TuningRules rules;
  rules.budget_us = 10;
  quick.lap_cost = 4, slow.lap_cost = 6;  // over the budget after as many laps as are least
  EXPECT(quick.run(0, rules).rounds == 3 && slow.run(0, rules).rounds == 2);
  EXPECT(quick.rounds[2] == 2 && quick.rounds[3] == 2);
  EXPECT(slow.rounds[1] == 2 && slow.rounds[2] == 1 && slow.rounds[3] == 1);
  EXPECT((Track{{1000, 900, 1200}}.winner(0)) == 1);
}

TEST(few_operations_get_a_part_of_the_budget) {
  EXPECT(share_of_budget(0) == share_of_budget(1e9) && share_of_budget(1e9) == 0.15);
  EXPECT(share_of_budget(1e10) == 0.5 && share_of_budget(2e10) == 1 && share_of_budget(1e13) == 1);
}

// ---- exactness ---------------------------------------------------------------------------------

TEST(who_is_inexact_is_out) {
  const auto sound = Verdict::sound, inexact = Verdict::inexact, failed = Verdict::failed;
  EXPECT((Track{{100, 50, 80}}.winner(0, {sound, sound, sound})) == 1);
  EXPECT((Track{{100, 50, 80}}.winner(0, {sound, inexact, sound})) == 2);
  EXPECT((Track{{100, 50, 80}}.winner(0, {sound, failed, failed})) == 0);
  EXPECT((Track{{100, 50, 80}}.winner(0, {inexact, inexact, inexact})) == 3);
  EXPECT((Track{{100, 50, 120}}.winner(0, {inexact, inexact, sound})) == 2);
  // Only who would win is judged.
  int asked = 0;
  const std::vector<bool> all(4, true);
  Track track{{100, 50, 80, 90}};
  const auto judge = [&](size_t) {
    ++asked;
    return sound;
  };
  EXPECT(track.winner({all, 0, 3}, judge) == 1 && asked == 1);
  // Eager's way is not judged, and stands where the incumbent does not; others beat it clearly.
  EXPECT(track.winner({all, 0, 3}, [&](size_t) { return inexact; }) == 3);
  const auto not_first = [&](size_t i) { return i == 0 ? inexact : sound; };
  EXPECT((Track{{90, 89, 89.5}}.winner({{true, true, true}, 0, 2}, not_first)) == 2);
  // Who is there for comparison only does not win.
  Track compared{{100, 50, 20}};
  EXPECT(compared.winner({{true, true, false}, 0, 2}, [&](size_t) { return sound; }) == 1);
  EXPECT(compared.rounds[2] > 0);
}

// Errors of `count` elements, evenly spread up to `most`.
TrialErrors drawn(std::mt19937& random, double most, int count = 2048) {
  std::uniform_real_distribution<double> uniform(-most, most);
  TrialErrors errors;
  for (int i = 0; i < count; ++i) {
    const double e = uniform(random);
    errors.elements.squares += e * e;
    errors.elements.worst = std::max(errors.elements.worst, std::abs(e));
    errors.elements.count++;
  }
  return errors;
}

TEST(the_guard_is_certain) {
  for (int count : {2048, 64}) {
    int refused = 0, accepted = 0;
    for (unsigned seed = 0; seed < 100; ++seed) {
      std::mt19937 random(seed);
      const auto eager = drawn(random, 0.01, count);
      refused += !is_as_exact(drawn(random, 0.013, count), eager);
      accepted += is_as_exact(drawn(random, 0.01, count), eager);
    }
    // Few elements say less, so nothing is refused by chance.
    EXPECT(accepted == 100 && (refused == 100 || count < 2048));
  }
}

TEST(errors_are_compared_with_eagers) {
  std::mt19937 random(1);
  const auto eager = drawn(random, 0.01);
  EXPECT(is_as_exact(eager, eager) && is_as_exact({}, {}));
  auto errors = eager;
  errors.elements.squares *= 1.1;  // 1.049 in the root
  EXPECT(is_as_exact(errors, eager));
  errors.elements.squares *= 1.1;
  EXPECT(!is_as_exact(errors, eager));
  errors = eager;
  errors.elements.worst *= 5;
  EXPECT(!is_as_exact(errors, eager));
  errors = eager;
  errors.missed = 1;  // a NaN, or a bit
  EXPECT(!is_as_exact(errors, eager));
  // Nothing written, nothing compared.
  EXPECT(!is_as_exact({}, eager));
  // Pre-activations and sums count as well.
  for (const auto part : {&TrialErrors::aux, &TrialErrors::sums}) {
    auto both = eager, worse = eager;
    both.*part = eager.elements;
    worse.*part = drawn(random, 0.013).elements;
    EXPECT(!is_as_exact(worse, both) && is_as_exact(both, both));
    // A sum of rounded elements has their roundings in it.
    worse.*part = drawn(random, 0.013).elements;
    (worse.*part).noise = both.elements.squares;
    EXPECT(is_as_exact(worse, both));
  }
}

}  // namespace
