// Strategies and the choice between them, without a GPU. `plan_test NAME` runs one test and exits
// with 1 where it fails.

#include "expect.h"
#include "problems.h"

#include "plans/select.h"

#include <limits>
#include <random>
#include <set>

namespace {

constexpr double never = std::numeric_limits<double>::infinity();

// ---- strategies --------------------------------------------------------------------------------

void every_problem_has_a_way() {
  EXPECT(every_problem().size() > 100);
  for (const auto& p : every_problem()) {
    const auto* by_rule = find_strategy(p.pass, rule(p));
    EXPECT(by_rule != nullptr);
    std::vector<const Strategy*> ways;
    for (const auto& s : strategies) {
      if (!applies(p, s)) continue;
      ways.push_back(&s);
      EXPECT(s.pass == p.pass);
      // What ATen cannot do is written by the library, and the other way round.
      if (s.provider == Provider::cublaslt) EXPECT(refusal(matmul_of(p, s), library) == nullptr);
    }
    EXPECT(!ways.empty());
    // Only a bit mask cannot be written without the library.
    const bool mask_is_written = p.pass == Pass::fprop && p.mask;
    const auto& fallback = fallback_of(p.pass);
    EXPECT(mask_is_written || (fallback.provider == Provider::aten && applies(p, fallback)));
    const auto& eager = eager_of(p, library);
    EXPECT(mask_is_written || (eager.provider == Provider::aten && applies(p, eager)));
    // What is asked for is done, and once: the activation, the bias.
    for (const auto* s : ways) {
      const bool activation = s->fuses_activation || has_step(*s, Step::own_activation) ||
                              has_step(*s, Step::own_one_pass) ||
                              has_step(*s, Step::aten_activation) ||
                              has_step(*s, Step::aten_gradient);
      EXPECT(p.activation == Activation::none || activation);
    }
  }
}

void names_are_their_own() {
  std::set<std::pair<Pass, std::string>> names;
  for (const auto& s : strategies) {
    names.emplace(s.pass, s.name);
    EXPECT(find_strategy(s.pass, s.name) == &s);
    EXPECT(std::string(s.name).find(' ') == std::string::npos);
  }
  EXPECT(names.size() == std::size(strategies));
  EXPECT(find_strategy(Pass::fprop, "bgradb") == nullptr);
}

void every_pass_has_one_fallback_and_one_eager() {
  for (auto pass : {Pass::fprop, Pass::dgrad, Pass::wgrad}) {
    int fallbacks = 0, eagers = 0;
    for (const auto& s : strategies) {
      if (s.pass != pass) continue;
      EXPECT(s.steps.front() == Step::matmul);
      const bool both = s.role == Role::eager_fallback;
      fallbacks += both || s.role == Role::fallback;
      eagers += both || s.role == Role::eager;
      if (s.role != Role::candidate) EXPECT(s.provider == Provider::aten);
    }
    EXPECT(fallbacks == 1 && eagers == 1);
  }
  // Eager applies act' in a kernel of its own, which reads no bit mask.
  const auto edge = problem_of(Pass::dgrad, Activation::relu);
  EXPECT(eager_of(edge, library).role == Role::eager);
  EXPECT(&eager_of(problem_of(Pass::dgrad, Activation::relu, true, true), library) ==
         &fallback_of(Pass::dgrad));
}

void what_may_be_done_where() {
  const auto forward = problem_of(Pass::fprop, Activation::gelu_tanh);
  EXPECT(applies(forward, "epilogue") && applies(forward, "bias+activation"));
  EXPECT(!applies(problem_of(Pass::fprop, Activation::gelu_erf), "epilogue"));
  EXPECT(!applies(problem_of(Pass::fprop), "bias+activation"));
  auto wide = forward;
  wide.matmul.type = Type::f32;
  EXPECT(!applies(wide, "epilogue") && applies(wide, "bias+activation"));
  auto padded = forward;
  padded.aux = true, padded.matmul.m = 250, padded.matmul.ld_aux = 256;
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

void products_are_those_of_the_epilogue() {
  auto p = problem_of(Pass::fprop, Activation::gelu_tanh);
  p.aux = true, p.matmul.ld_aux = 264, p.matmul.align_aux = 5, p.matmul.align_bias = 2;
  const auto full = matmul_of(p, *find_strategy(p.pass, "epilogue"));
  EXPECT(full.epilogue == Epilogue::gelu_aux_bias && full.ld_aux == 264 && full.ldd == 256);
  EXPECT(full.align_aux == 5 && full.align_bias == 2);
  // The product alone writes the pre-activation, to where it is kept.
  const auto plain = matmul_of(p, *find_strategy(p.pass, "bias+activation"));
  EXPECT(plain.epilogue == Epilogue::bias && plain.ldd == 264 && plain.align_d == 5);
  EXPECT(plain.ld_aux == 0 && plain.align_aux == Problem().align_aux);

  p = problem_of(Pass::dgrad, Activation::gelu_tanh);
  EXPECT(matmul_of(p, *find_strategy(p.pass, "d_bgrad")).epilogue == Epilogue::dgelu_bgrad);
  EXPECT(matmul_of(p, *find_strategy(p.pass, "d+sum")).epilogue == Epilogue::dgelu);
  EXPECT(matmul_of(p, *find_strategy(p.pass, "product+one_pass")).epilogue == Epilogue::identity);
  p = problem_of(Pass::wgrad);
  EXPECT(matmul_of(p, *find_strategy(p.pass, "bgradb")).epilogue == Epilogue::bgradb);
  EXPECT(matmul_of(p, *find_strategy(p.pass, "product+sum")).epilogue == Epilogue::identity);
}

void token_counts_share_buckets() {
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
  std::vector<size_t> rounds;
  double now = 0;
  std::mt19937 random{1};

  Timings run(size_t incumbent, TuningRules rules = {}) {
    rounds.assign(speeds.size(), 0);
    std::normal_distribution<double> normal(0, 1);
    return time_in_rounds(
        speeds.size(), incumbent,
        [&](const std::vector<size_t>& running) {
          std::vector<double> times;
          for (const size_t i : running) {
            ++rounds[i];
            times.push_back(speeds[i] * (1 + noise * std::abs(normal(random))));
          }
          now += lap_cost;
          return times;
        },
        [&] { return now; }, rules);
  }
};

void the_fastest_wins() {
  for (size_t incumbent = 0; incumbent < 4; ++incumbent) {
    Track track{{100, 80, 120, 300}};
    const auto result = track.run(incumbent);
    EXPECT(result.winner == 1 && result.medians[1] == 80 && result.medians[0] == 100);
    // Who is far behind is not asked again, but for the incumbent.
    EXPECT(track.rounds[3] == 1 || incumbent == 3);
    EXPECT(track.rounds[incumbent] >= 5);
  }
  for (int seed = 0; seed < 50; ++seed) {
    Track noisy{{100, 80, 95, 97}, 0.1};
    noisy.random.seed(seed);
    EXPECT(noisy.run(0).winner == 1);
  }
}

void the_incumbent_stays_unless_the_lead_is_clear() {
  EXPECT((Track{{100, 99}}.run(0).winner) == 0);
  EXPECT((Track{{100, 99}}.run(1).winner) == 1);
  EXPECT((Track{{100, 97}}.run(0).winner) == 1);
  EXPECT((Track{{2, 1.8}}.run(0).winner) == 0);  // a gain below what can be timed
  int changes = 0;
  for (int seed = 0; seed < 100; ++seed) {
    Track equal{{100, 100, 100, 100}, 0.02};
    equal.random.seed(seed);
    changes += equal.run(2).winner != 2;
  }
  EXPECT(changes < 10);
}

void who_fails_is_out() {
  Track track{{100, never, 90}};
  EXPECT(track.run(0).winner == 2 && track.rounds[1] == 1);
  EXPECT((Track{{never, 200}}.run(0).winner) == 1);
  const auto none = Track{{never, never}}.run(1);
  EXPECT(none.winner == 1 && none.medians[1] == never && none.rounds == 1);

  // One that ran at first and then no more has no time to show.
  int round = 0;
  const auto late = time_in_rounds(
      2, 1,
      [&](const std::vector<size_t>& running) {
        ++round;
        std::vector<double> times;
        for (const size_t i : running) times.push_back(i == 0 ? (round < 3 ? 10 : never) : 100);
        return times;
      },
      [] { return 0.0; }, {});
  EXPECT(late.winner == 1 && late.medians[0] == never);
}

void the_budget_is_kept() {
  TuningRules rules;
  rules.budget_us = 1000;
  Track quick{{10, 11}, 0, 1};
  EXPECT(quick.run(0, rules).rounds == rules.most_rounds);
  Track slow{{10, 11}, 0, 300};
  EXPECT(slow.run(0, rules).rounds == rules.least_rounds);
  Track huge{{10, 9}, 0, 2500};
  const auto result = huge.run(0, rules);
  EXPECT(result.rounds == 2 && result.winner == 1);
  // A lone survivor has nobody left to be compared with.
  Track lone{{10, 20, 30}, 0, 1};
  EXPECT(lone.run(0, rules).rounds == rules.least_rounds);
}

SampledErrors error(double mean, double worst, double worst_sum = 0) {
  return {{100 * mean, worst, 1, 100}, {0, worst_sum, 1, 100}};
}

// Three candidates, the last of them eager's way unless said; by rule the first is taken.
struct Chooser {
  std::vector<double> speeds;
  std::vector<std::optional<SampledErrors>> errors;
  std::vector<bool> eligible{true, true, true};
  size_t yardstick = 2;

  std::optional<Choice> run() {
    const auto round = [&](const std::vector<size_t>& running) {
      std::vector<double> times;
      for (const size_t i : running) times.push_back(speeds[i]);
      return times;
    };
    return choose({errors, eligible, 0, yardstick, 0x1p-7}, round, [] { return 0.0; }, {});
  }
};

void the_chooser_wants_the_fastest_that_is_right() {
  const auto right = error(0.001, 0.004), wrong = error(0.01, 0.5);
  const auto rounds_twice = error(0.0013, 0.005);
  EXPECT((Chooser{{100, 50, 80}, {right, right, right}}.run()->winner) == 1);
  EXPECT((Chooser{{100, 50, 80}, {right, wrong, right}}.run()->winner) == 2);
  EXPECT((Chooser{{100, 50, 120}, {right, rounds_twice, right}}.run()->winner) == 0);
  EXPECT((Chooser{{100, 50, 120}, {right, std::nullopt, right}}.run()->winner) == 0);
  EXPECT((Chooser{{100, never, 120}, {right, right, right}}.run()->winner) == 0);
  // A rule's own choice may be unsound: eager is what the others are then held against.
  EXPECT((Chooser{{100, never, 120}, {wrong, right, right}}.run()->winner) == 2);
  EXPECT((Chooser{{100, 50, 80}, {right, right, right}, {true, false, true}}.run()->winner) == 2);
  // Where eager stands among the candidates does not matter.
  const std::vector<bool> all(3, true);
  EXPECT((Chooser{{100, 130, 80}, {wrong, right, wrong}, all, 1}.run()->winner) == 1);
  // Nobody to compare with, nobody left, nobody who runs to the end: the caller's rule decides.
  EXPECT(!(Chooser{{100, 50, 80}, {right, right, std::nullopt}}.run()));
  EXPECT(!(Chooser{{100, 50, 80}, {wrong, wrong, right}, {true, true, false}}.run()));
  EXPECT(!(Chooser{{never, never, never}, {right, right, right}}.run()));
  EXPECT((Chooser{{100, 50, 80}, {right, right, right}}.run()->entered) == 3);
  // Of zeros nothing can be told: every way is exact.
  EXPECT(!(Chooser{{100, 50, 80}, {SampledErrors{}, SampledErrors{}, SampledErrors{}}}.run()));
}

void errors_are_compared_with_eagers() {
  const auto eager = error(0.001, 0.004);
  EXPECT(is_as_exact(eager, eager, 0));
  EXPECT(is_as_exact(error(0.00109, 0.0044), eager, 0));
  EXPECT(!is_as_exact(error(0.0012, 0.004), eager, 0));
  EXPECT(!is_as_exact(error(0.001, 0.005), eager, 0));
  EXPECT(is_as_exact(error(0.001, 0.005), eager, 0x1p-7));  // one unit in the last place
  EXPECT(is_as_exact({}, {}, 0x1p-7));                      // all infinite: nothing to be said
  // In fp32 the order of adding up decides by more than that.
  EXPECT(is_as_exact(error(1.3e-7, 4e-7), error(1.18e-7, 4e-7), 0x1p-23));
  EXPECT(!is_as_exact(error(2e-7, 4e-7), error(1e-7, 4e-7), 0x1p-23));
  // What is NaN where eager is not has left the count short.
  auto partial = eager;
  partial.elements.count = 99;
  EXPECT(!is_as_exact(partial, eager, 0x1p-7) && is_as_exact(eager, partial, 0x1p-7));
  EXPECT(!is_as_exact(error(0.001, 0.004, 0.1), error(0.001, 0.004, 0.01), 0x1p-7));
  EXPECT(is_as_exact(error(0.001, 0.004, 0.015), error(0.001, 0.004, 0.01), 0x1p-7));
}

const Tests tests{
    {"every_problem_has_a_way", every_problem_has_a_way},
    {"names_are_their_own", names_are_their_own},
    {"one_fallback_and_one_eager", every_pass_has_one_fallback_and_one_eager},
    {"what_may_be_done_where", what_may_be_done_where},
    {"products_are_those_of_the_epilogue", products_are_those_of_the_epilogue},
    {"token_counts_share_buckets", token_counts_share_buckets},
    {"the_fastest_wins", the_fastest_wins},
    {"the_incumbent_stays", the_incumbent_stays_unless_the_lead_is_clear},
    {"who_fails_is_out", who_fails_is_out},
    {"the_budget_is_kept", the_budget_is_kept},
    {"the_chooser_wants_the_right", the_chooser_wants_the_fastest_that_is_right},
    {"errors_are_compared", errors_are_compared_with_eagers},
};

}  // namespace

int main(int, char** argv) { return run_one(tests, argv); }
