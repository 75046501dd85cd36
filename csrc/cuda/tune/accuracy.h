#pragma once

// The kernels of a trial: synthetic operands, exact results of some elements in fp64, and how far a
// pass's results are from them.

#include "core/activation.h"
#include "cuda/tune/error_unit.h"
#include "plans/select.h"

#include <cuda_runtime_api.h>

namespace fused::cuda::tune {

// A pass on synthetic operands, as it has been run.
struct TrialData {
  gemm::Type type = gemm::Type::f32;
  gemm::Matrix left, right, result;
  bool adds = false;     // the product to the result, which the exact ones are taken of before
  bool is_wide = false;  // the result is in fp32
  bool forward = true;   // result = act(left · right + bias), else
  Activation activation = Activation::none;  // result = left · right · act'(aux)
  const void* bias = nullptr;                // [cols]; forward only
  // Backward: read. Forward: written, if at all: the pre-activation, or the mask.
  gemm::Matrix aux;
  bool mask = false;
  bool of_result = false;    // the mask's bits tell where the result is not <= 0
  gemm::Gating gating;       // backward: up null where there is none
  gemm::Up up;               // forward: weight null where there is none,
  gemm::Matrix right_of_up;  // and that as an operand
  // Backward: column sums of a matrix, if they are there.
  gemm::Matrix summed;
  const void* sums = nullptr;
  bool sums_results = false;  // the matrix is the result, and may have been summed unrounded
  Roundoff unit;
  bool of_sum = false;    // errors are counted in the sum's unit, whatever is behind it
  double sign_error = 0;  // of a sum, as a part of Σ|aₖbₖ|: a mask's bit may be either below it
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
