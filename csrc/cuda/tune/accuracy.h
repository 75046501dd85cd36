#pragma once

// The kernels of a trial: synthetic operands, exact results of some elements in fp64, and how far a
// pass's results are from them.

#include "cuda/tune/error_unit.h"
#include "gemm/pass_call.h"
#include "plans/select.h"

#include <cuda_runtime_api.h>

namespace fused::cuda::tune {

// A pass on synthetic operands, as it has been run.
struct TrialData {
  gemm::PassCall call;
  Roundoff unit;
  double sign_error = 0;  // of a sum, as a part of Σ|aₖbₖ|: a mask's bit may be either below it
  bool of_sum = false;    // errors are counted in the sum's unit, whatever is behind it
};

// Of one sampled element: what comes before the activation, and Σ|aₖbₖ| + |bias|; the same of up.
struct Exact {
  double value, scale, up = 0, scale_of_up = 0;
};
inline constexpr int most_samples = 2048;

// Uniform numbers in (-amplitude, amplitude), without the negative ones where `positive`.
void fill(gemm::Type type, void* data, int64_t count, double amplitude, bool positive,
          uint64_t seed, cudaStream_t stream);
void fill_bits(void* data, int64_t bytes, uint64_t seed, cudaStream_t stream);
// values[row, col] = 1 where the mask's bit is set, else 0.
void spread_bits(gemm::Type type, const gemm::Matrix& mask, const gemm::Matrix& values,
                 cudaStream_t stream);

// What a pass reads: the product's operands, a bias, what was saved, and of gated layers up's.
enum class Operand : uint8_t { left, right, bias, saved, up, up_weight, up_bias };
// A value that must reach the results, NaN or +inf, is put into all of some lines of an operand:
// rows of it, as meant, or, of what is multiplied or added by features, columns.
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
// Adds the errors of the sampled elements, and of some of the sums, to *errors on the device.
void add_errors(const TrialData& data, const Exact* exact, plans::TrialErrors* errors,
                cudaStream_t stream);
// Counts the elements that a mark was to reach and did not.
void add_lost(const Mark& mark, const TrialData& data, plans::TrialErrors* errors,
              cudaStream_t stream);

}  // namespace fused::cuda::tune
