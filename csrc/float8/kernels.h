#pragma once

// The steps' kernels, as the dispatcher calls them: checks, a row of a report, and a backend like
// Reference.

#include "core/explain.h"
#include "core/policy.h"
#include "float8/check.h"
#include "float8/reference.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>

namespace fused::float8 {

template <class Backend>
struct Kernels {
  static Quadruple cast(const Tensor& input, bool gradient, bool sum, bool columns) {
    const explain::Row row(CastStep::name, input, {});
    check_matrix(row.op, "input", input);
    return way(row.op, input, [&](auto w) { return w.cast(input, gradient, sum, columns); });
  }

  static Quadruple activation(const Tensor& z, int64_t number, bool columns) {
    const explain::Row row(ActivationStep::name, z, {});
    const auto activation = activation_of(row.op, number);
    check_matrix(row.op, "z", z);
    return way(row.op, z, [&](auto w) { return w.activation(z, activation, columns); });
  }

  static Quintuple activation_backward(const Tensor& grad, const Tensor& z, int64_t number,
                                       bool sum, const OptionalTensor& scale) {
    const explain::Row row(ActivationBackwardStep::name, grad, {});
    const auto activation = activation_of(row.op, number);
    check_matrix(row.op, "grad", grad);
    check_preactivation(row.op, grad, z, activation);
    check_scale(row.op, scale, z);
    return way(row.op, grad,
               [&](auto w) { return w.activation_backward(grad, z, activation, sum, scale); });
  }

  static Quadruple gating(const Tensor& gate, const Tensor& up, int64_t number, bool columns) {
    const explain::Row row(GatingStep::name, gate, {});
    const auto activation = activation_of(row.op, number);
    check_matrix(row.op, "gate", gate);
    check_like(row.op, "up", up, gate);
    return way(row.op, gate, [&](auto w) { return w.gating(gate, up, activation, columns); });
  }

  static Nonuple gating_backward(const Tensor& grad, const Tensor& gate, const Tensor& up,
                                 int64_t number, bool together, bool sum,
                                 const OptionalTensor& scale) {
    const explain::Row row(GatingBackwardStep::name, grad, {});
    const auto activation = activation_of(row.op, number);
    check_matrix(row.op, "grad", grad);
    check_like(row.op, "gate", gate, grad);
    check_like(row.op, "up", up, grad);
    check_scale(row.op, scale, gate);
    return way(row.op, grad, [&](auto w) {
      return w.gating_backward(grad, gate, up, activation, together, sum, scale);
    });
  }

  static Tensor product(const Tensor& a, const Tensor& b, const Tensor& inverse_a,
                        const Tensor& inverse_b, const OptionalTensor& bias,
                        const OptionalTensor& add, at::ScalarType dtype, bool fast) {
    const explain::Row row(ProductStep::name, a, b);
    check_product(row.op, {a, b, inverse_a, inverse_b, bias, add, dtype});
    return way(row.op, a, [&](auto w) {
      return w.product(a, b, inverse_a, inverse_b, bias, add, dtype, fast);
    });
  }

 private:
  template <typename Fn>
  static auto way(const char* op, const Tensor& like, const Fn& fn) {
    // ATen's operators would be cast again under autocast.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const at::NoGradGuard no_grad;
    refuse_batch_dependence(op, like, "precision 'default'", "FP8 with one scale for all rows");
    return under_policy<Backend, Reference>(op, like, fn);
  }
};

template <class Backend>
void register_steps(torch::Library& m) {
  m.impl(CastStep::name, Kernels<Backend>::cast);
  m.impl(ActivationStep::name, Kernels<Backend>::activation);
  m.impl(ActivationBackwardStep::name, Kernels<Backend>::activation_backward);
  m.impl(GatingStep::name, Kernels<Backend>::gating);
  m.impl(GatingBackwardStep::name, Kernels<Backend>::gating_backward);
  m.impl(ProductStep::name, Kernels<Backend>::product);
}

}  // namespace fused::float8
