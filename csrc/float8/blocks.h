#pragma once

// The arguments of the public operators: a chain of layers, or a gated layer with the one after it.
// Each checks its arguments, runs forward, alone or with a node for the backward, and can run in
// the input's own dtype where FP8 cannot.

#include "float8/operators.h"
#include "float8/steps.h"

#include <vector>

namespace fused::float8 {

struct Chain {
  const char* op;
  Tensor input;
  std::vector<Tensor> all_weights;
  std::vector<OptionalTensor> biases;
  Activation activation;
  bool activates_last;  // a single layer with its activation

  const std::vector<Tensor>& weights() const { return all_weights; }
  std::vector<OptionalTensor> tensors() const;
  void check() const;
  Tensor forward() const;
  Tensor with_gradient() const;
  Tensor in_own_dtype() const;
};

struct Gated {
  const char* op;
  Tensor input, gate;
  OptionalTensor up;
  Tensor down;
  OptionalTensor gate_bias, up_bias, down_bias;
  Activation activation;

  bool is_stacked() const { return !has_value(up); }
  std::vector<OptionalTensor> tensors() const;
  std::vector<Tensor> weights() const;
  void check() const;
  Tensor forward() const;
  Tensor with_gradient() const;
  Tensor in_own_dtype() const;
};

}  // namespace fused::float8
