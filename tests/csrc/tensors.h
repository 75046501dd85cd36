#pragma once

// Helpers for the C++ tests with tensors, which run on one thread from the same random state.

#include "expect.h"
#include "fused_linear.h"

#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/types.h>
#include <torch/utils.h>

using at::Tensor;
using torch::autograd::variable_list;

inline const bool is_set_up = [] {
  torch::manual_seed(0);
  torch::set_num_threads(1);
  return true;
}();

inline Tensor leaf(at::IntArrayRef sizes) {
  return torch::randn(sizes, torch::kDouble).requires_grad_();
}

// As tests/support/numerics.py compares in fp64.
inline bool same(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() &&
         (a - b).abs().max().item<double>() <= 1e-12 * (1 + b.abs().max().item<double>());
}

inline bool same(const variable_list& a, const variable_list& b) {
  return std::ranges::equal(a, b, [](const Tensor& x, const Tensor& y) { return same(x, y); });
}
