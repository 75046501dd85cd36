#pragma once

// A decision about a pass, as the process keeps it and as files hold it. Nothing here needs a GPU.

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
  Algorithm algorithm;           // the product's, if the strategy has one
  float microseconds = 0;        // measured time
  float eager_microseconds = 0;  // eager's time, measured in the same rounds
  const char* reason = nullptr;  // by rule: why the strategy that the rule names is not taken

  bool operator==(const Decision&) const = default;
};

// Writes a decision as one line of text, and reads it; from_text returns nullopt for other lines.
// The line does not name the device, because a file serves all GPUs of one model.
std::string to_text(const PassProblem& problem, const Decision& decision);
std::optional<std::pair<PassProblem, Decision>> from_text(const std::string& line);

std::string summary(const PassProblem& problem, const Decision& decision);

}  // namespace fused::plans
