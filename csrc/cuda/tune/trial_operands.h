#pragma once

#include "cuda/runtime/device.h"
#include "cuda/runtime/gemm_call.h"
#include "cuda/tune/accuracy.h"

#include <ATen/cuda/CUDAContext.h>

#include <optional>
#include <vector>

namespace fused::cuda::tune {

// Bounds a sum whose products are exact, generously, as a part of the sum of their magnitudes.
double sign_error(const gemm::Problem& matmul);

// A pass at both ends of its bucket; the lower one of a sum over tokens is tried as an odd number,
// too, which split sums do not take. Rows beyond a fraction of a millisecond are left out, as no
// element depends on them.
class TrialOperands {
 public:
  static constexpr int64_t most_ends = 3, most_seeds = 16;

  struct End {
    PassCall call;   // operands and results in the trial's memory
    PassCall eager;  // the same as ATen can do it: with a dense aux, and none that is a mask
    bool needed;     // whether who cannot be launched there is out
  };

  explicit TrialOperands(const PassCall& call);

  struct Read {
    Operand operand;
    Matrix matrix;
    double amplitude;
    bool positive = false;
  };
  static std::vector<Read> reads_of(const PassCall& call);

  // Fills the operands, and the results with NaN: what is not written is not taken for the work of
  // the one before.
  void prepare(const End& end, int64_t seed) const;
  void fill_again(const Read& read, int64_t seed) const;
  void renew_result(const PassCall& call, int64_t seed) const;

  Exact* exact(size_t end, int64_t seed) const;

  const c10::cuda::CUDAStream stream = at::cuda::getCurrentCUDAStream();
  std::vector<End> ends;
  int64_t seeds = 1;                     // so that enough elements are seen
  plans::TrialErrors* errors = nullptr;  // on the device
  void* workspace = nullptr;             // for algorithms

 private:
  struct Arena;

  // Gives an end its places, no better aligned than the user's.
  static End place(PassCall call, bool needed, Arena& arena);

  // Torch's allocator may hold all that the driver had.
  std::optional<DriverMemory> memory_;
  std::optional<Workspace> instead_;
  Exact* exact_ = nullptr;
};

}  // namespace fused::cuda::tune
