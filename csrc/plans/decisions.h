#pragma once

// What has been decided: stage problem -> strategy and algorithm. Plain data, kept for the process
// and written to files; nothing here needs a GPU.

#include "gemm/strategy.h"

#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace fused::gemm {

// cuBLASLt's description of an algorithm: plain bytes, valid for one version of the library, on any
// device of the architecture that it was found for.
struct Algorithm {
  std::array<uint64_t, 8> bytes{};
  int64_t workspace = 0;

  bool operator==(const Algorithm&) const = default;
};

struct Decision {
  enum class Origin : uint8_t { rule, measured, file };

  Origin origin = Origin::rule;
  const Strategy* strategy = nullptr;
  Algorithm algorithm;           // of its product, if it has one
  float microseconds = 0;        // as measured
  float eager_microseconds = 0;  // of eager's sequence, beside it

  bool operator==(const Decision&) const = default;
};

// Shared between threads. Bounded: endless different problems must not grow without end.
class Decisions {
 public:
  explicit Decisions(size_t capacity) : capacity_(capacity) {}

  std::optional<Decision> find(const StageProblem& problem) const;
  // Remembers, unless somebody has been quicker, and gives what is remembered; where there is no
  // more room, the decision is given back unremembered.
  Decision add(const StageProblem& problem, const Decision& decision);
  void replace(const StageProblem& problem, const Decision& decision);
  void clear();
  bool is_full() const;
  std::vector<std::pair<StageProblem, Decision>> all() const;

 private:
  const size_t capacity_;
  mutable std::mutex mutex_;
  std::unordered_map<StageProblem, Decision, StageProblemHash> known_;
};

// One line of text, and back: nothing where the text is not exactly such a line. The device is not
// written: files are for one model of GPU.
std::string to_text(const StageProblem& problem, const Decision& decision);
std::optional<std::pair<StageProblem, Decision>> from_text(const std::string& line);

// The same for people.
std::string describe(const StageProblem& problem, const Decision& decision);

const Strategy* find_strategy(Stage stage, std::string_view name);

}  // namespace fused::gemm
