#pragma once

// Decisions in a file: a header that says what they are valid for, one line each, a checksum.

#include "plans/decisions.h"

namespace fused::plans {

// This package's version. What another one has written is used as far as it is understood.
inline constexpr const char* own_version = "0.2.0";

struct PlanFile {
  std::string gpu;         // model, compute capability and multiprocessors
  size_t library_version;  // of cuBLASLt
  std::vector<std::pair<PassProblem, Decision>> decisions;
  std::string version = own_version;  // who wrote it
};

// Throws (ValueError) where the file is not one of ours, or damaged: nothing of it is used then.
PlanFile read_plan_file(const std::string& path);

// At no moment is there half a file: it is written beside and then renamed. With `merge`, what
// other processes have put there is kept, and a file for another GPU or library is an error; a
// lock, held meanwhile beside the file, lets no two processes lose each other's plans.
void write_plan_file(const std::string& path, PlanFile plans, bool merge);

// Why plans for `have` must not be used by `want`, or an empty string.
std::string mismatch(const PlanFile& have, const std::string& gpu, size_t library_version);

}  // namespace fused::plans
