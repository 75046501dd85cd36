#pragma once

// A convolution as it is asked for, what tells it from others, and how far its results are off.

#include "conv/arguments.h"
#include "plans/errors.h"

#include <c10/util/SmallVector.h>

#include <array>
#include <cstdint>

namespace fused::conv::cuda {

using ConvKey = c10::SmallVector<int64_t, 32>;  // short enough for no allocation

struct ConvProblem {
  const Tensor &image, &weight;
  const OptionalTensor& bias;
  std::array<int64_t, 2> stride, padding, dilation;
  int64_t groups;
  const Geometry& geometry;

  ConvProblem(const Tensor& image, const Tensor& weight, const OptionalTensor& bias,
              const Geometry& geometry);

  ConvKey key() const;
};

// Exact results of some elements, and what their errors are counted in, u (Σ|aₖbₖ| + |bias|).
class ExactConv {
 public:
  ExactConv(const ConvProblem& p, const Tensor& image, const Tensor& weight,
            const OptionalTensor& bias, double roundoff);

  void add_errors(plans::TrialErrors& errors, const Tensor& result) const;

 private:
  // As many from the top as a few megabytes hold, and the results that are made of no others.
  struct Rows {
    int64_t of_image, of_result;

    explicit Rows(const ConvProblem& p);
  };

  Rows rows_;
  Tensor values_, units_;
};

}  // namespace fused::conv::cuda
