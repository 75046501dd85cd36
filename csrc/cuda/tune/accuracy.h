#pragma once

#include "cuda/tune/error_unit.h"
#include "gemm/pass_call.h"
#include "plans/errors.h"

#include <cuda_runtime_api.h>

namespace fused::cuda::tune {

struct TrialData {
  gemm::PassCall call;
  Roundoff unit;
  double sign_error = 0;  // relative to Σ|aₖbₖ|: a sum below it may have either bit in a mask
  bool of_sum = false;    // errors are counted in the sum's unit, without the activation
};

// A sampled element before the activation, and Σ|aₖbₖ| + |bias|, for the product and for up's.
struct Exact {
  double value, scale, up = 0, scale_of_up = 0;
};
inline constexpr int most_samples = 2048;

// Writes uniform numbers from (-amplitude, amplitude); if `positive`, from [0, amplitude).
void fill(gemm::Type type, void* data, int64_t count, double amplitude, bool positive,
          uint64_t seed, cudaStream_t stream);
// Writes random bits into the mask, and values[row, col] = 1 for a set bit, else 0.
void fill_bits(gemm::Type type, const gemm::Matrix& mask, int64_t bytes, const gemm::Matrix& values,
               uint64_t seed, cudaStream_t stream);

enum class Operand : uint8_t { left, right, bias, saved, up, up_weight, up_bias };
// Writes NaN or +inf, which must reach the results, into some rows as a whole, or into columns if
// the operand is multiplied or added by features.
inline constexpr bool by_columns(Operand operand) {
  return operand == Operand::right || operand == Operand::bias || operand == Operand::up_weight ||
         operand == Operand::up_bias;
}
struct Mark {
  Operand operand;
  bool infinite = false;
};
void put(const Mark& mark, gemm::Type type, const gemm::Matrix& matrix, cudaStream_t stream);

void exact_values(const TrialData& data, Exact* exact, cudaStream_t stream);
void add_errors(const TrialData& data, const Exact* exact, plans::TrialErrors* errors,
                cudaStream_t stream);
void add_lost(const Mark& mark, const TrialData& data, plans::TrialErrors* errors,
              cudaStream_t stream);

}  // namespace fused::cuda::tune
