#pragma once

// What ran, and why: one row per operator call while a report is being taken, nothing otherwise.
// A row is opened where the dispatcher's call arrives; the code that does the work appends to it.

#include <ATen/ATen.h>

#include <string>
#include <vector>

namespace fused::explain {

bool enabled();

void start();
// The rows since start(), in order; fields separated by tabs: operator, shapes, dtype, device,
// steps, remark.
std::vector<std::string> stop();

class Row {
 public:
  Row(const char* op, const at::Tensor& input, const at::Tensor& weight);
  ~Row();
  Row(const Row&) = delete;
  Row& operator=(const Row&) = delete;

 private:
  bool active_;
  std::string head_;
};

// Adds to the path of the row that is open on this thread: an epilogue, "own kernel", "reference",
// or in parentheses what was not taken and why.
void append(const char* name);

// While it lives this thread's steps are trials, which no report is about.
class Quiet {
 public:
  Quiet();
  ~Quiet();
  Quiet(const Quiet&) = delete;
  Quiet& operator=(const Quiet&) = delete;

 private:
  bool before_;
};

// Says something about the row that this thread opens next: why it is handed over, or not.
void remark(const std::string& text);

}  // namespace fused::explain
