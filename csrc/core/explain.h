#pragma once

// Reports of the calls that ran, and why. The kernel that the dispatcher calls opens a row, and the
// code that does the work appends to it.

#include <ATen/ATen.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace fused::explain {

bool enabled();

int64_t start();
// Gives the rows since then, fields separated by tabs: operator, shapes, dtype, device, path.
std::vector<std::string> stop(int64_t report);

void note(std::string_view row);

// May lie within another of its thread. A row that ends in an exception is not reported.
class Row {
 public:
  Row(const char* op, const at::Tensor& input, const at::Tensor& weight);
  ~Row();
  Row& operator=(Row&&) = delete;

  void drop() { dropped_ = true; }

  const char* const op;

 private:
  bool dropped_ = false;
  struct Open;
  std::unique_ptr<Open> open_;  // null where nothing is reported
};

// Adds to the path of this thread's open row what runs, or in parentheses what was not taken and
// why; nullptr adds nothing.
void append(const char* name);
inline constexpr const char* not_fused = "PyTorch's own (not fused)";

// No report is about the trials that a thread runs meanwhile.
class Quiet {
 public:
  Quiet();
  ~Quiet();
  Quiet& operator=(Quiet&&) = delete;

 private:
  bool before_;
};

// Begins the path of the row that this thread opens next with a reason, in parentheses: why a node
// goes another way than it was asked to. Lost at the end of the innermost Remarks, and without one.
void remark(std::string_view text);

class Remarks {
 public:
  Remarks();
  ~Remarks();
  Remarks& operator=(Remarks&&) = delete;

 private:
  std::string text_;
  std::string* outer_;
};

}  // namespace fused::explain
