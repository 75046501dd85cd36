#include "core/explain.h"

#include <atomic>
#include <mutex>
#include <sstream>
#include <utility>

namespace fused::explain {
namespace {

std::atomic<bool> on{false};

struct Report {
  std::mutex mutex;
  std::vector<std::string> rows;
};

Report& report() {
  static auto* value = new Report;  // outlives every thread
  return *value;
}

thread_local std::string open_steps;
thread_local std::string next_remark;
thread_local bool quiet = false;

}  // namespace

bool enabled() { return on.load(std::memory_order_relaxed); }

void start() {
  const std::lock_guard lock(report().mutex);
  report().rows.clear();
  on = true;
}

std::vector<std::string> stop() {
  const std::lock_guard lock(report().mutex);
  on = false;
  return std::move(report().rows);
}

Row::Row(const char* op, const at::Tensor& input, const at::Tensor& weight) : active_(enabled()) {
  // tracing runs nothing
  active_ = active_ && !input.is_meta() && !input.key_set().has(c10::DispatchKey::Python);
  if (!active_) return;
  std::ostringstream text;
  text << op << '\t' << input.sym_sizes();
  if (weight.defined()) text << " x " << weight.sym_sizes();
  text << '\t' << input.scalar_type() << '\t' << input.device() << '\t';
  head_ = text.str();
  open_steps.clear();
}

Row::~Row() {
  if (!active_) return;
  const std::lock_guard lock(report().mutex);
  report().rows.push_back(head_ + open_steps + '\t' + next_remark);
  next_remark.clear();
}

void append(const char* name) {
  if (!enabled() || quiet) return;
  if (!open_steps.empty()) open_steps += " + ";
  open_steps += name;
}

Quiet::Quiet() : before_(std::exchange(quiet, true)) {}
Quiet::~Quiet() { quiet = before_; }

void remark(const std::string& text) {
  if (enabled()) next_remark = text;
}

}  // namespace fused::explain
