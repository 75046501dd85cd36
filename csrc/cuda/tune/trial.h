#pragma once

// Whether a way to do a pass is as exact as eager's, tried on synthetic operands.

#include "cuda/runtime/gemm_call.h"
#include "plans/decisions.h"
#include "plans/select.h"

#include <memory>
#include <optional>

namespace fused::cuda::tune {

// The trial of one problem: operands of a fixed seed at both ends of its bucket, exact results,
// eager's errors; made when the first verdict is asked for that is not known yet. Used by one
// thread; results, the allocator's statistics and the random state are as if it had not been.
class Trial {
 public:
  // `bucket`: under which its verdicts are known.
  Trial(const PassCall& call, const PassProblem& bucket);
  ~Trial();

  // Known for the process from then on, unless memory was too short. No error of what is tried gets
  // out.
  plans::Verdict judge(const plans::Decision& decision);
  // Launches nothing.
  std::optional<plans::Verdict> known(const plans::Decision& decision) const;
  // Whether memory was too short for some verdict.
  bool lacked_memory() const { return lacked_memory_; }

 private:
  class Errors;
  plans::Verdict try_out(const plans::Decision& decision);
  plans::Verdict judge_layers(const plans::Decision& decision);

  const PassCall& call_;
  const PassProblem& bucket_;
  std::unique_ptr<Errors> errors_;
  bool lacked_memory_ = false;
};

}  // namespace fused::cuda::tune
