#include "plans/registry.h"

#include "plans/plan_file.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <unordered_map>

namespace fused::plans {
namespace {

// Enough for any model; whoever meets more has sizes that change without end, for which measuring
// does not pay.
constexpr size_t most_measured = 4096;
constexpr size_t most_ruled = 8192;

constexpr double default_budget = 200;

double number_from(const char* variable, double otherwise) {
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == '\0') return otherwise;
  double value = -1;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, value);  // whatever the locale
  TORCH_CHECK_VALUE(error == std::errc() && stop == end && value >= 0, variable,
                    " must be a number of at least 0, got '", text, "'");
  return value;
}

std::atomic<double>& budget_setting() {
  static std::atomic<double> value = number_from("TORCH_FUSED_LINEAR_BUDGET_MS", default_budget);
  return value;
}

std::atomic<int64_t>& verbosity_setting() {
  static std::atomic<int64_t> value =
      static_cast<int64_t>(number_from("TORCH_FUSED_LINEAR_VERBOSE", 0));
  return value;
}

constexpr int64_t default_patience = 256;
std::atomic<int64_t> patience_setting{default_patience};

// Of buckets that are not measured yet.
struct Waiting {
  struct Bucket {
    CallsLeft calls;
    int tries = 0;  // to measure it, in vain
  };
  std::mutex mutex;
  std::unordered_map<PassProblem, Bucket, PassProblemHash> buckets;
};

Waiting& waiting() {
  static auto* value = new Waiting;
  return *value;
}

std::atomic<uint64_t> current_generation{0};
std::atomic<std::optional<Machine> (*)(int)> machine_source{nullptr};

void start_generation() {
  {
    const std::lock_guard lock(waiting().mutex);
    waiting().buckets.clear();
  }
  current_generation.fetch_add(1, std::memory_order_release);
}

// The file of the environment, between import and the first use of a device, and until the end.
struct Environment {
  std::mutex mutex;
  std::string path;                 // to be written at the end; empty: none
  std::optional<PlanFile> waiting;  // read, not yet known to fit
  std::optional<Machine> machine;   // whose plans it holds, and are written at the end
  bool told = false;                // that it does not fit
};

Environment& environment() {
  static auto* value = new Environment;  // outlives every thread
  return *value;
}

PlanFile of_process(const Machine& machine) {
  PlanFile file{machine.gpu, machine.library_version, {}};
  for (auto& entry : measured().all()) {
    if (entry.first.matmul.device == machine.first_equal_device) file.decisions.push_back(entry);
  }
  return file;
}

void take_over(const PlanFile& file, const Machine& machine) {
  for (auto [problem, decision] : file.decisions) {
    problem.matmul.device = machine.first_equal_device;
    measured().replace(problem, decision);
  }
  start_generation();
}

void save_at_exit() {
  auto& env = environment();
  const std::lock_guard lock(env.mutex);
  if (env.path.empty() || !env.machine) return;
  try {
    const auto file = of_process(*env.machine);
    if (!file.decisions.empty()) write_plan_file(env.path, file, /*merge=*/true);
  } catch (const std::exception& failure) {
    std::cerr << "fused: the plans of this process are not saved: " << failure.what() << '\n';
  }
}

Machine machine_or_error(const char* what) {
  const auto here = machine();
  TORCH_CHECK(here, "plans.", what, ": plans are of a GPU, and there is none");
  return *here;
}

}  // namespace

Decisions& measured() {
  static auto* value = new Decisions(most_measured);
  return *value;
}

Decisions& ruled() {
  static auto* value = new Decisions(most_ruled);
  return *value;
}

Decisions& borrowed() {
  static auto* value = new Decisions(most_measured);
  return *value;
}

std::optional<Decision> neighbours_of(const PassProblem& bucket,
                                      const std::function<bool(const gemm::Strategy&)>& serves) {
  const auto tokens = gemm::tokens_of(bucket);
  for (const int64_t other : {tokens * 2, tokens / 2, tokens * 4, tokens / 4}) {
    if (other == 0) continue;
    auto neighbour = bucket;
    gemm::tokens_of(neighbour) = other;
    auto decision = measured().find(neighbour);
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
  auto& all = waiting();
  const std::lock_guard lock(all.mutex);
  auto it = all.buckets.find(bucket);
  if (it == all.buckets.end()) {
    if (!has_neighbour || patience() == 0) return nullptr;
    if (all.buckets.size() >= most_measured) all.buckets.clear();
    const auto calls = std::make_shared<std::atomic<int64_t>>(patience());
    it = all.buckets.emplace(bucket, Waiting::Bucket{calls}).first;
  }
  return it->second.calls->fetch_sub(1) > 0 ? it->second.calls : nullptr;
}

int64_t calls_until_retry(int failures) {
  constexpr int64_t at_first = 64;
  constexpr int most_doublings = 16;
  return at_first << std::min(failures - 1, most_doublings);
}

CallsLeft postpone(const PassProblem& bucket) {
  auto& all = waiting();
  const std::lock_guard lock(all.mutex);
  if (all.buckets.size() >= most_measured) all.buckets.clear();
  auto& entry = all.buckets[bucket];
  const auto calls = calls_until_retry(++entry.tries);
  return entry.calls = std::make_shared<std::atomic<int64_t>>(calls);
}

double budget() { return budget_setting().load(std::memory_order_relaxed); }

void set_budget(double milliseconds) {
  TORCH_CHECK_VALUE(milliseconds >= 0, "plans: the budget must be at least 0 milliseconds, got ",
                    milliseconds);
  if (budget_setting().exchange(milliseconds) != milliseconds) start_generation();
}

int64_t verbosity() { return verbosity_setting().load(std::memory_order_relaxed); }
void set_verbosity(int64_t level) { verbosity_setting() = level; }
void log(const std::string& line) {
  if (verbosity() > 0) std::cerr << "fused: " + line + '\n';
}

uint64_t generation() { return current_generation.load(std::memory_order_acquire); }

void set_machine_source(std::optional<Machine> (*source)(int)) { machine_source = source; }

std::optional<Machine> machine(int device) {
  auto* source = machine_source.load();
  return source == nullptr ? std::nullopt : source(device);
}

void save(const std::string& path) {
  write_plan_file(path, of_process(machine_or_error("save")), /*merge=*/false);
}

int64_t load(const std::string& path) {
  const auto file = read_plan_file(path);
  const auto here = machine_or_error("load");
  const auto why = mismatch(file, here.gpu, here.library_version);
  TORCH_CHECK_VALUE(why.empty(), "plans: ", path, " was ", why, "; nothing of it is used");
  take_over(file, here);
  return static_cast<int64_t>(file.decisions.size());
}

void clear() {
  measured().clear();
  borrowed().clear();
  ruled().clear();
  start_generation();
}

std::vector<std::string> show() {
  std::vector<std::string> lines;
  for (auto* decisions : {&measured(), &borrowed(), &ruled()}) {
    for (const auto& [problem, decision] : decisions->all()) {
      const bool is_past = decisions == &borrowed() && measured().find(problem);
      if (!is_past) lines.push_back(summary(problem, decision));
    }
  }
  return lines;
}

void from_environment() {
  static const bool done = [] {
    const char* path = std::getenv("TORCH_FUSED_LINEAR_PLANS");
    if (path == nullptr || *path == '\0') return true;
    auto& env = environment();
    const std::lock_guard lock(env.mutex);
    try {
      if (std::filesystem::exists(path)) env.waiting = read_plan_file(path);
      env.path = std::filesystem::absolute(path).string();
      std::atexit(save_at_exit);
    } catch (const std::exception& failure) {
      TORCH_WARN("TORCH_FUSED_LINEAR_PLANS: ", failure.what(),
                 ". It is left as it is; remove it to have it made anew.");
    }
    return true;
  }();
  static_cast<void>(done);
}

void adopt(const Machine& machine) {
  from_environment();
  auto& env = environment();
  const std::lock_guard lock(env.mutex);
  if (env.path.empty() || env.machine) return;
  if (!env.waiting) {
    env.machine = machine;  // a new file: of the first device used
    return;
  }
  const auto why = mismatch(*env.waiting, machine.gpu, machine.library_version);
  if (why.empty()) {
    take_over(*env.waiting, machine);
    env.machine = machine;
    env.waiting.reset();
  } else if (!env.told) {
    // It may fit another device of this process, and is left as it is if it does not.
    env.told = true;
    TORCH_WARN("TORCH_FUSED_LINEAR_PLANS: ", env.path, " was ", why, "; nothing of it is used. ",
               "It is left as it is; remove it to have it made anew.");
  }
}

}  // namespace fused::plans
