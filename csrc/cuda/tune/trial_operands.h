#pragma once

#include "cuda/runtime/device.h"
#include "cuda/runtime/gemm_call.h"
#include "cuda/tune/accuracy.h"

#include <ATen/cuda/CUDAContext.h>

#include <optional>
#include <vector>

namespace fused::cuda::tune {

// Returns a generous bound on the error of a sum of exact products, relative to Σ|aₖbₖ|.
double sign_error(const gemm::Problem& matmul);

// A pass at both ends of its bucket. The lower end of a sum over tokens is tried with an odd
// number, too, which split sums cannot do. Rows that would take longer than a fraction of a
// millisecond are left out, because no element depends on them.
class TrialOperands {
 public:
  static constexpr int64_t most_ends = 3, most_seeds = 16;

  struct End {
    PassCall call;   // operands and results in the trial's memory
    PassCall eager;  // the call as ATen can do it: with a dense aux, and no mask
    bool needed;     // a candidate that cannot run at this end is refused
  };

  explicit TrialOperands(const PassCall& call);

  struct Read {
    Operand operand;
    Matrix matrix;
    double amplitude;
    bool positive = false;
  };
  static std::vector<Read> reads_of(const PassCall& call);

  // Fills the operands, and the results with NaN, so that an element that is not written is not
  // taken from the run before.
  void prepare(const End& end, int64_t seed) const;
  void fill_again(const Read& read, int64_t seed) const;
  void renew_result(const PassCall& call, int64_t seed) const;

  Exact* exact(size_t end, int64_t seed) const;

  const c10::cuda::CUDAStream stream = at::cuda::getCurrentCUDAStream();
  std::vector<End> ends;
  int64_t seeds = 1;                     // more for small results, to see enough elements
  plans::TrialErrors* errors = nullptr;  // on the device
  void* workspace = nullptr;             // for algorithms

 private:
  struct Arena;

  // Places an end's matrices in memory, with no better alignment than the user's.
  static End place(PassCall call, bool needed, Arena& arena);

  // Torch's allocator may hold all of the driver's memory.
  std::optional<DriverMemory> memory_;
  std::optional<Workspace> instead_;
  Exact* exact_ = nullptr;
};

}  // namespace fused::cuda::tune
