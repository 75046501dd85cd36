#pragma once

// What was decided of a pass, for the process and for files; nothing here needs a GPU.

#include "gemm/pass_problem.h"
#include "gemm/strategy.h"

#include <optional>
#include <string>
#include <utility>

namespace fused::plans {

using gemm::Algorithm, gemm::Pass, gemm::PassProblem, gemm::Strategy;

struct Decision {
  enum class Origin : uint8_t { rule, measured, file, neighbour };

  Origin origin = Origin::rule;
  const Strategy* strategy = nullptr;
  Algorithm algorithm;           // of its product, if it has one
  float microseconds = 0;        // as measured
  float eager_microseconds = 0;  // of eager's sequence, beside it
  const char* reason = nullptr;  // by rule: why it is not the strategy that the rule names

  bool operator==(const Decision&) const = default;
};

// One line of text, and back, nothing of any other; without the device, as a file is for a model.
std::string to_text(const PassProblem& problem, const Decision& decision);
std::optional<std::pair<PassProblem, Decision>> from_text(const std::string& line);

std::string summary(const PassProblem& problem, const Decision& decision);

}  // namespace fused::plans
