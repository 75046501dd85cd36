#include "plans/registry.h"

#include "core/environment.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <iostream>

namespace fused::plans {
namespace {

// More than any model has. Measuring does not pay for sizes that never come again.
constexpr size_t most_passes = 8192;

constexpr double default_budget = 200, most_budget = 1e6;
constexpr int64_t most_verbosity = 2;

std::atomic<double>& budget_setting() {
  static std::atomic<double> value =
      number_of_environment("TORCH_FUSED_LINEAR_BUDGET_MS", default_budget, most_budget);
  return value;
}

std::atomic<int64_t>& verbosity_setting() {
  static std::atomic<int64_t> value =
      number_of_environment("TORCH_FUSED_LINEAR_VERBOSE", int64_t{0}, most_verbosity);
  return value;
}

constexpr int64_t default_patience = 256;
std::atomic<int64_t> patience_setting{default_patience};

bool is_measured(const KnownPass& known) {
  return known.decision && known.decision->origin != Decision::Origin::neighbour;
}

std::atomic<uint64_t> current_generation{0};
std::atomic<std::optional<Machine> (*)(int)> machine_source{nullptr};

void start_generation() {
  passes().each([](const PassProblem&, KnownPass& known) {
    known.calls_left.reset();
    known.failures = 0;
  });
  current_generation.fetch_add(1, std::memory_order_release);
}

// The file of the environment, from import to the end of the process.
struct Environment {
  std::mutex mutex;
  std::string path;  // written when the process ends; empty: none
  std::vector<PlanLine> file;
  std::vector<Machine> machines;  // have been used; their plans are written
};

Environment& of_environment() {
  static auto* value = new Environment;  // outlives every thread
  return *value;
}

Entries of_process(const Machine& machine) {
  Entries entries;
  passes().each([&](const PassProblem& problem, const KnownPass& known) {
    if (problem.matmul.device == machine.first_equal_device && is_measured(known)) {
      entries.emplace_back(problem, *known.decision);
    }
  });
  return entries;
}

void take_over(const Entries& entries, const Machine& machine) {
  for (auto [problem, decision] : entries) {
    problem.matmul.device = machine.first_equal_device;
    passes().change(problem, [&](KnownPass& known) { known.decide(decision); });
  }
  start_generation();
}

void save_at_exit() {
  auto& env = of_environment();
  const std::lock_guard lock(env.mutex);
  try {
    for (const auto& machine : env.machines) {
      const auto entries = of_process(machine);
      if (!entries.empty()) write_plan_file(env.path, machine.made_for, entries, /*merge=*/true);
    }
  } catch (const std::exception& failure) {
    std::cerr << "fused: the plans of this process are not saved: " + message_of(failure) + '\n';
  }
}

Machine machine_or_error(const char* what) {
  const auto here = machine();
  TORCH_CHECK(here, "plans.", what, ": plans are of a GPU, and there is none");
  return *here;
}

}  // namespace

Passes& passes() {
  static auto* value = new Passes(most_passes);  // outlives every thread
  return *value;
}

std::optional<Decision> measured(const PassProblem& bucket) {
  return passes().read(bucket, [](const KnownPass& known) {
    return is_measured(known) ? known.decision : std::nullopt;
  });
}

void borrow(const PassProblem& bucket, const Decision& decision) {
  passes().change(bucket, [&](KnownPass& known) {
    if (is_measured(known)) return;  // by another thread
    known.decision = decision;
    known.decision->origin = Decision::Origin::neighbour;
  });
}

std::optional<Decision> neighbours_of(const PassProblem& bucket,
                                      const std::function<bool(const Strategy&)>& serves) {
  const auto tokens = gemm::tokens_of(bucket);
  for (const int64_t other : {tokens * 2, tokens / 2, tokens * 4, tokens / 4}) {
    if (other == 0) continue;
    auto neighbour = bucket;
    gemm::tokens_of(neighbour) = other;
    auto decision = measured(neighbour);
    if (decision && serves(*decision->strategy)) return decision;
  }
  return std::nullopt;
}

int64_t patience() { return patience_setting.load(std::memory_order_relaxed); }

void set_patience(int64_t calls) {
  TORCH_CHECK_VALUE(calls >= 0, "plans: the patience must be at least 0 calls, got ", calls);
  if (patience_setting.exchange(calls) != calls) start_generation();
}

CallsLeft calls_left(const PassProblem& bucket, bool has_neighbour) {
  return passes().change(bucket, [&](KnownPass& known) -> CallsLeft {
    if (!known.calls_left) {
      if (!has_neighbour || patience() == 0) return nullptr;
      known.decide_in(patience());
    }
    return known.is_due() ? nullptr : known.calls_left;
  });
}

CallsLeft decide_later(const PassProblem& bucket) {
  return passes().change(bucket, [](KnownPass& known) { return known.decide_later(); });
}

double budget() { return budget_setting().load(std::memory_order_relaxed); }

void set_budget(double milliseconds) {
  TORCH_CHECK_VALUE(milliseconds >= 0 && milliseconds <= most_budget,
                    "plans: the budget must be from 0 to ", most_budget, " milliseconds, got ",
                    milliseconds);
  if (budget_setting().exchange(milliseconds) != milliseconds) start_generation();
}

int64_t verbosity() { return verbosity_setting().load(std::memory_order_relaxed); }
void set_verbosity(int64_t level) {
  TORCH_CHECK_VALUE(level >= 0 && level <= most_verbosity, "plans: the level must be from 0 to ",
                    most_verbosity, ", got ", level);
  verbosity_setting() = level;
}
void log(const std::string& line) {
  if (verbosity() > 0) std::cerr << "fused: " + line + '\n';
}

std::string message_of(const std::exception& error) {
  const auto* ours = dynamic_cast<const c10::Error*>(&error);
  return ours ? ours->what_without_backtrace() : error.what();
}

uint64_t generation() { return current_generation.load(std::memory_order_acquire); }

void set_machine_source(std::optional<Machine> (*source)(int)) { machine_source = source; }

std::optional<Machine> machine(int device) {
  auto* source = machine_source.load();
  return source == nullptr ? std::nullopt : source(device);
}

void save(const std::string& path) {
  const auto here = machine_or_error("save");
  write_plan_file(path, here.made_for, of_process(here), /*merge=*/false);
}

int64_t load(const std::string& path) {
  const auto file = read_plan_file(path);
  const auto here = machine_or_error("load");
  const auto why = mismatch(file, here.made_for);
  TORCH_CHECK_VALUE(why.empty(), "plans: ", path, " was ", why, "; nothing of it is used");
  const auto entries = entries_for(file, here.made_for);
  take_over(entries, here);
  return static_cast<int64_t>(entries.size());
}

void clear() {
  passes().each([](const PassProblem&, KnownPass& known) { known.forget(); });
  start_generation();
}

std::vector<std::string> show() {
  std::vector<std::string> lines;
  passes().each([&](const PassProblem& problem, const KnownPass& known) {
    for (const auto& decision : {known.decision, known.by_rule}) {
      if (decision) lines.push_back(summary(problem, *decision));
    }
  });
  return lines;
}

void from_environment() {
  static const bool done = [] {
    const char* path = environment("TORCH_FUSED_LINEAR_PLANS");
    if (path == nullptr) return true;
    auto& env = of_environment();
    const std::lock_guard lock(env.mutex);
    try {
      if (std::filesystem::exists(path)) env.file = read_plan_file(path);
      env.path = std::filesystem::absolute(path).string();
      std::atexit(save_at_exit);
    } catch (const std::exception& failure) {
      TORCH_WARN("TORCH_FUSED_LINEAR_PLANS: ", message_of(failure),
                 ". It is left as it is; remove it to have it made anew.");
    }
    return true;
  }();
  static_cast<void>(done);
}

void adopt(const Machine& machine) {
  static_cast<void>(budget()), static_cast<void>(verbosity());
  from_environment();
  auto& env = of_environment();
  const std::lock_guard lock(env.mutex);
  const auto is_it = [&](const Machine& other) {
    return other.first_equal_device == machine.first_equal_device;
  };
  if (env.path.empty() || std::ranges::any_of(env.machines, is_it)) return;
  env.machines.push_back(machine);
  const auto entries = entries_for(env.file, machine.made_for);
  if (!entries.empty()) take_over(entries, machine);
  const auto why = mismatch(env.file, machine.made_for);
  if (!why.empty()) {
    TORCH_WARN("TORCH_FUSED_LINEAR_PLANS: ", env.path, " was ", why,
               "; nothing of it is used, and what is measured now is added.");
  }
}

}  // namespace fused::plans
