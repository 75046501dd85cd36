#pragma once

// Decisions in a file: a line each, which says what it is valid for, and a checksum.

#include "plans/decisions.h"

#include <vector>

namespace fused::plans {

// This package's version. What another one has written is used as far as it is understood.
inline constexpr const char* own_version = "0.2.0";

struct MadeFor {
  std::string gpu;             // model, compute capability and multiprocessors
  size_t library_version = 0;  // of cuBLASLt
  std::string driver;

  bool operator==(const MadeFor&) const = default;
};

using Entries = std::vector<std::pair<PassProblem, Decision>>;

struct PlanLine {
  MadeFor made_for;
  std::string version;   // who wrote it
  std::string decision;  // to_text(problem, decision), or what another version makes of it
};

// Throws (ValueError) where the file is not one of ours, or damaged: nothing of it is used then.
std::vector<PlanLine> read_plan_file(const std::string& path);

Entries entries_for(const std::vector<PlanLine>& file, const MadeFor& here);
std::string mismatch(const std::vector<PlanLine>& file, const MadeFor& here);

// A file is written beside and renamed, so that there is never half a one, under a lock, so that no
// two processes lose plans. What is for others, or not understood, stays; with `merge` also what is
// for `here`, and a file that cannot be read is an error then.
void write_plan_file(const std::string& path, const MadeFor& here, const Entries& entries,
                     bool merge);

}  // namespace fused::plans
