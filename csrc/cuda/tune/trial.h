#pragma once

#include "cuda/runtime/gemm_call.h"
#include "plans/decisions.h"
#include "plans/select.h"

#include <memory>
#include <optional>

namespace fused::cuda::tune {

// Judges whether a way to do a pass is as exact as eager's, by trying it on synthetic operands at
// both ends of the problem's bucket. For one thread. Results, the allocator's statistics and the
// random state stay as they were.
class Trial {
 public:
  Trial(const PassCall& call, const gemm::PassProblem& bucket);
  ~Trial();

  // Remembers the verdict for the process, unless the trial failed. Throws no error.
  plans::Verdict judge(const plans::Decision& decision);

  std::optional<plans::Verdict> known(const plans::Decision& decision) const;

  bool lacked_memory() const { return lacked_memory_; }

 private:
  class Errors;

  plans::Verdict judge_layers(const plans::Decision& decision);
  plans::Verdict try_out(const plans::Decision& decision);

  const PassCall& call_;
  const gemm::PassProblem& bucket_;
  std::unique_ptr<Errors> errors_;
  bool lacked_memory_ = false;
};

}  // namespace fused::cuda::tune
