#pragma once

// A plan file has one line for each decision, with the machine that it is valid for, and a
// checksum.

#include "plans/decisions.h"

#include <vector>

namespace fused::plans {

// This package's version. Lines of another version are used if they can be read.
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
  std::string version;   // of the package that wrote the line
  std::string decision;  // to_text(problem, decision), as that version writes it
};

// Throws (ValueError) if the file is damaged or no plan file.
std::vector<PlanLine> read_plan_file(const std::string& path);

Entries entries_for(const std::vector<PlanLine>& file, const MadeFor& here);
std::string mismatch(const std::vector<PlanLine>& file, const MadeFor& here);

// Writes a new file and renames it, so that the file is always whole, and holds a lock, so that
// processes do not lose each other's plans. Lines for other machines and lines that cannot be read
// stay. With `merge` the lines for `here` stay, too, and a file that cannot be read is an error.
void write_plan_file(const std::string& path, const MadeFor& here, const Entries& entries,
                     bool merge);

}  // namespace fused::plans
