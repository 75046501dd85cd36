#pragma once

// What ran, and why: one row per operator call while a report is being taken, nothing otherwise.
// A row is opened where the dispatcher's call arrives; the code that does the work appends to it.

#include <ATen/ATen.h>

#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace fused::explain {

bool enabled();

// Begins a report, whatever others are being taken, and says by which number to end it.
int64_t start();
// The rows since then, in order, those of reports within it too; fields separated by tabs:
// operator, shapes, dtype, device, path, remark.
std::vector<std::string> stop(int64_t report);

// A row for what is done elsewhere, in Python.
void note(std::string_view row);

// Rows of one thread may lie within each other. A row that ends in an exception is not reported.
class Row {
 public:
  Row(const char* op, const at::Tensor& input, const at::Tensor& weight);
  ~Row();
  Row(const Row&) = delete;
  Row& operator=(const Row&) = delete;

  // Reports nothing of it: what was tried here is done elsewhere.
  void drop() { dropped_ = true; }

 private:
  bool dropped_ = false;
  struct Open;
  std::unique_ptr<Open> open_;  // null where nothing is reported
};

// Adds to the path of the row that is open on this thread: an epilogue, "own kernel", or in
// parentheses what was not taken and why; nullptr adds nothing.
void append(const char* name);
// The same where torch's own functions do the work.
inline constexpr const char* not_fused = "PyTorch's own (not fused)";

// While it lives this thread runs trials, which no report is about.
class Quiet {
 public:
  Quiet();
  ~Quiet();
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;

 private:
  bool before_;
};

// Says something about the row that this thread opens next: why a gradient is handed over, or not.
// It is lost with the innermost Remarks of the thread, and where there are none.
void remark(std::string_view text);

class Remarks {
 public:
  Remarks();
  ~Remarks();
  Remarks(const Remarks&) = delete;
  Remarks& operator=(const Remarks&) = delete;

 private:
  std::string text_;
  std::string* outer_;
};

}  // namespace fused::explain
