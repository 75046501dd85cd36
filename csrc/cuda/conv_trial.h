#pragma once

// Whether a way to a convolution with bias and ReLU may be taken, and how long each takes; tried on
// synthetic operands of the problem's own sizes, on which the choice of a kernel depends.

#include "cuda/conv_choice.h"
#include "cuda/conv_problem.h"

#include <memory>

namespace fused::cuda {

// Of one problem, used by one thread. The random state is as if it had not been.
class ConvTrial {
 public:
  explicit ConvTrial(const ConvProblem& problem);
  ~ConvTrial();

  // `objection`: why cuDNN's fused form need not be tried; or nullptr. Final verdicts are
  // remembered for the process; what has failed is tried once more.
  Judgements judge(const char* objection);

  // In about so many milliseconds. Throws where there is too little memory.
  ConvTimes time(const Judgements& judged, double budget_ms);

 private:
  struct Data;
  Data& data();

  const ConvProblem& problem_;
  std::unique_ptr<Data> data_;
};

}  // namespace fused::cuda
