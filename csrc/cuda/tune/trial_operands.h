#pragma once

// The synthetic operands of a trial, in memory of its own.

#include "cuda/runtime/device.h"
#include "cuda/runtime/gemm_call.h"
#include "cuda/tune/accuracy.h"

#include <c10/cuda/CUDAStream.h>

#include <optional>
#include <vector>

namespace fused::cuda::tune {

// A pass at both ends of its bucket of token counts; of a sum over tokens the lower one is tried as
// an odd number, which split sums do not take, and as a usual one. Rows of the result beyond what a
// fraction of a millisecond computes are left out: what happens to an element does not depend on
// them.
class TrialOperands {
 public:
  static constexpr int64_t most_ends = 3, most_seeds = 16;

  // The problem at one end.
  struct End {
    PassCall call;   // operands and results in the trial's memory
    PassCall eager;  // the same as ATen can do it: with a dense aux, and none that is a mask
    bool needed;     // whether who cannot be launched there is out
  };

  explicit TrialOperands(const PassCall& call);

  const std::vector<End>& ends() const { return ends_; }
  int64_t seeds() const { return seeds_; }  // so that enough elements are seen
  c10::cuda::CUDAStream stream() const { return stream_; }

  // An operand, and the range of the numbers that it is filled with.
  struct Read {
    Operand operand;
    Matrix matrix;
    double amplitude;
    bool positive = false;
  };
  // All but a bit mask.
  static std::vector<Read> reads_of(const PassCall& call);

  // Operands of a seed, and NaN in the results.
  void prepare(const End& end, int64_t seed) const;
  void fill_again(const Read& read, int64_t seed) const;
  // NaN, or what the product is added to.
  void renew_result(const PassCall& call, int64_t seed) const;

  // Room for an end's exact results, for errors, and for algorithms.
  Exact* exact(size_t end, int64_t seed) const {
    return exact_ + (static_cast<int64_t>(end) * most_seeds + seed) * most_samples;
  }
  plans::TrialErrors* errors() const { return errors_; }
  void* workspace() const { return workspace_; }

 private:
  // Hands out parts of a piece of memory; of none it only counts the bytes.
  struct Arena {
    char* memory = nullptr;
    int64_t bytes = 0;

    // No better aligned than at `offset` behind a multiple of 512.
    void* take(int64_t size, int64_t offset = 0);
  };

  // Gives an end of the problem, of these sizes, its places.
  End place(PassCall call, bool needed, Arena& arena);

  c10::cuda::CUDAStream stream_;
  // From the driver, or else from PyTorch's allocator, which may hold all that there is.
  std::optional<DriverMemory> memory_;
  std::optional<Workspace> instead_;
  Exact* exact_ = nullptr;
  plans::TrialErrors* errors_ = nullptr;
  void* workspace_ = nullptr;
  std::vector<End> ends_;
  int64_t seeds_ = 1;
};

// A pass for the kernels of the trial.
TrialData describe(const PassCall& call);

}  // namespace fused::cuda::tune
