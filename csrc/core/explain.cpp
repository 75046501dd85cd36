#include "core/explain.h"

#include <c10/core/impl/TorchDispatchModeTLS.h>

#include <atomic>
#include <exception>
#include <map>
#include <mutex>
#include <sstream>
#include <utility>

namespace fused::explain {
namespace {

std::atomic<bool> is_reported{false};

// The rows of all blocks, and from which on each one reports.
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
  return tensor.is_nested() ? "(nested)" : c10::str(tensor.sym_sizes());
}

bool is_tracing() {
  using c10::impl::TorchDispatchModeKey, c10::impl::TorchDispatchModeTLS;
  for (const auto mode : {TorchDispatchModeKey::FAKE, TorchDispatchModeKey::PROXY,
                          TorchDispatchModeKey::FUNCTIONAL}) {
    if (TorchDispatchModeTLS::get_mode(mode)) return true;
  }
  return false;
}

thread_local std::string* path = nullptr;  // of the innermost row that is open
thread_local bool quiet = false;
thread_local std::string* next_remark = nullptr;

}  // namespace

bool enabled() { return is_reported.load(std::memory_order_relaxed); }

int64_t start() {
  const std::lock_guard lock(reports().mutex);
  is_reported = true;
  const auto report = ++reports().last;
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
    is_reported = false;
    all.rows.clear();
  }
  return rows;
}

void note(std::string_view row) {
  if (enabled() && !quiet && !is_tracing()) add(std::string(row));
}

struct Row::Open {
  std::string head, path;
  std::string* outer;
  int exceptions;
};

Row::Row(const char* op, const at::Tensor& input, const at::Tensor& weight) : op(op) {
  if (!enabled()) return;
  auto remark = next_remark ? std::exchange(*next_remark, {}) : std::string();
  if (input.is_meta() || is_tracing()) return;  // which runs nothing
  std::ostringstream text;
  text << op << '\t' << shape_of(input);
  if (weight.defined()) text << " x " << shape_of(weight);
  text << '\t' << input.scalar_type() << '\t' << input.device() << '\t';
  auto begin = remark.empty() ? std::string() : "(" + remark + ")";
  open_ = std::make_unique<Open>(text.str(), std::move(begin), path, std::uncaught_exceptions());
  path = &open_->path;
}

Row::~Row() {
  if (!open_) return;
  path = open_->outer;
  if (dropped_ || std::uncaught_exceptions() > open_->exceptions) return;
  add(open_->head + open_->path);
}

void append(const char* name) {
  if (name == nullptr || path == nullptr || quiet) return;
  if (!path->empty()) *path += " + ";
  *path += name;
}

Quiet::Quiet() : before_(std::exchange(quiet, true)) {}
Quiet::~Quiet() { quiet = before_; }

Remarks::Remarks() : outer_(std::exchange(next_remark, &text_)) {}
Remarks::~Remarks() { next_remark = outer_; }

void remark(std::string_view text) {
  if (!enabled() || next_remark == nullptr) return;
  if (next_remark->find(text) != std::string::npos) return;
  if (!next_remark->empty()) *next_remark += "; ";
  *next_remark += text;
}

}  // namespace fused::explain
