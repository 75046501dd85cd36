#include "core/explain.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/function.h>

#include <atomic>
#include <exception>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>

namespace fused::explain {
namespace {

// While anything is reported a number that no earlier such time had, else 0.
std::atomic<int64_t> period{0};

// What all blocks report, and from which row on each one does.
struct Reports {
  std::mutex mutex;
  std::vector<std::string> rows;
  std::map<int64_t, size_t> begins;
  int64_t last = 0;
};

Reports& reports() {
  static auto* value = new Reports;  // outlives every thread
  return *value;
}

void add(std::string row) {
  const std::lock_guard lock(reports().mutex);
  if (!reports().begins.empty()) reports().rows.push_back(std::move(row));
}

std::string shape_of(const at::Tensor& tensor) {
  std::ostringstream text;
  if (tensor.is_nested()) return "(nested)";
  text << tensor.sym_sizes();
  return text.str();
}

bool is_tracing() {
  using c10::impl::TorchDispatchModeKey, c10::impl::TorchDispatchModeTLS;
  for (const auto mode : {TorchDispatchModeKey::FAKE, TorchDispatchModeKey::PROXY,
                          TorchDispatchModeKey::FUNCTIONAL}) {
    if (TorchDispatchModeTLS::get_mode(mode)) return true;
  }
  return false;
}

thread_local std::string* steps = nullptr;  // of the innermost row that is open
thread_local bool quiet = false;

// Whoever remarks on a row may be prevented from opening it, or be traced, which runs no kernel.
// The remark is for rows of the same node of the graph.
struct Remark {
  std::string text;
  int64_t period = 0;
  const void* node = nullptr;
};
thread_local Remark next_remark;

const void* current_node() { return torch::autograd::get_current_node().get(); }

std::string take_remark() {
  if (next_remark.text.empty()) return "";
  const auto taken = std::exchange(next_remark, {});
  return taken.period == period && taken.node == current_node() ? taken.text : "";
}

}  // namespace

bool enabled() { return period.load(std::memory_order_relaxed) != 0; }

int64_t start() {
  const std::lock_guard lock(reports().mutex);
  const auto report = ++reports().last;
  if (reports().begins.empty()) period = report;
  reports().begins[report] = reports().rows.size();
  return report;
}

std::vector<std::string> stop(int64_t report) {
  auto& all = reports();
  const std::lock_guard lock(all.mutex);
  const auto found = all.begins.find(report);
  TORCH_CHECK_VALUE(found != all.begins.end(), "_explain_stop: no report ", report, " is taken");
  std::vector<std::string> rows(all.rows.begin() + found->second, all.rows.end());
  all.begins.erase(found);
  if (all.begins.empty()) {
    period = 0;
    all.rows.clear();
  }
  return rows;
}

void note(std::string_view row) {
  if (enabled() && !quiet && !is_tracing()) add(std::string(row));
}

struct Row::Open {
  std::string head, steps, remark;
  std::string* outer;
  int exceptions;
};

Row::Row(const char* op, const at::Tensor& input, const at::Tensor& weight) {
  if (!enabled()) return;
  auto remark = take_remark();
  if (input.is_meta() || is_tracing()) return;  // which runs nothing
  std::ostringstream text;
  text << op << '\t' << shape_of(input);
  if (weight.defined()) text << " x " << shape_of(weight);
  text << '\t' << input.scalar_type() << '\t' << input.device() << '\t';
  open_ =
      std::make_unique<Open>(text.str(), "", std::move(remark), steps, std::uncaught_exceptions());
  steps = &open_->steps;
}

Row::~Row() {
  if (!open_) return;
  steps = open_->outer;
  if (dropped_ || std::uncaught_exceptions() > open_->exceptions) return;
  add(open_->head + open_->steps + '\t' + open_->remark);
}

void append(const char* name) {
  if (name == nullptr || steps == nullptr || quiet) return;
  if (!steps->empty()) *steps += " + ";
  *steps += name;
}

Quiet::Quiet() : before_(std::exchange(quiet, true)) {}
Quiet::~Quiet() { quiet = before_; }

void remark(const std::string& text) {
  if (!enabled()) return;
  const auto before = take_remark();
  next_remark = {before.empty() ? text : before + "; " + text, period, current_node()};
}

}  // namespace fused::explain
