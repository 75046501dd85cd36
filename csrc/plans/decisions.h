#pragma once

// What has been decided: pass problem -> strategy and algorithm. Plain data, kept for the process
// and written to files; nothing here needs a GPU.

#include "gemm/algorithm.h"
#include "gemm/pass_problem.h"
#include "gemm/strategy.h"

#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace fused::plans {

using gemm::Algorithm, gemm::Pass, gemm::PassProblem, gemm::PassProblemHash, gemm::Strategy;

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

// Shared between threads. Bounded: endless different problems must not grow without end.
class Decisions {
 public:
  explicit Decisions(size_t capacity) : capacity_(capacity) {}

  std::optional<Decision> find(const PassProblem& problem) const;
  // Remembers, unless somebody has been quicker, and gives what is remembered; where there is no
  // more room, the decision is given back unremembered.
  Decision add(const PassProblem& problem, const Decision& decision);
  void replace(const PassProblem& problem, const Decision& decision);
  // Unless it has been replaced.
  void remove(const PassProblem& problem, const Decision& decision);
  void clear();
  bool is_full() const;
  std::vector<std::pair<PassProblem, Decision>> all() const;

 private:
  const size_t capacity_;
  mutable std::mutex mutex_;
  std::unordered_map<PassProblem, Decision, PassProblemHash> known_;
};

// One line of text, and back: nothing where the text is not exactly such a line. The device is not
// written: files are for one model of GPU.
std::string to_text(const PassProblem& problem, const Decision& decision);
std::optional<std::pair<PassProblem, Decision>> from_text(const std::string& line);

// The same for people.
std::string summary(const PassProblem& problem, const Decision& decision);

}  // namespace fused::plans
