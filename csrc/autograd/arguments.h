#pragma once

// Questions that the Autograd kernels ask about their arguments before they choose a way.

#include "core/check.h"
#include "core/policy.h"
#include "dispatch/operators.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fused::autograd {

using fused::has_tangent;
inline bool has_tangent(const OptionalTensor& tensor) { return tensor && has_tangent(*tensor); }

inline bool requires_grad(const Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad();
}
inline bool requires_grad(const OptionalTensor& tensor) { return tensor && requires_grad(*tensor); }

inline bool inside_torch_func() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

// Transforms that a C++ node cannot serve (torch.func, forward AD), and the user's wish, take the
// formula, which torch differentiates as it does its own operators.
template <typename... Tensors>
bool wants_formula(const Tensor& input, const Tensors&... others) {
  return policy_for_graph(input) == Policy::eager || inside_torch_func() || has_tangent(input) ||
         (has_tangent(others) || ...);
}

template <typename... Tensors>
bool wants_gradient(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && (requires_grad(tensors) || ...);
}

// Tells whether autograd has anything to do with an argument of an operator.
inline bool is_differentiated(const Tensor& tensor) {
  return wants_gradient(tensor) || wants_formula(tensor);
}
inline bool is_differentiated(const OptionalTensor& tensor) {
  return tensor && is_differentiated(*tensor);
}
template <typename Value>  // a number, a flag, a name
bool is_differentiated(const Value&) {
  return false;
}
template <typename... Arguments>
bool any_differentiated(const Arguments&... arguments) {
  return (is_differentiated(arguments) || ...);
}
inline bool is_differentiated(const steps::LinearBackward& layer) {
  return any_differentiated(layer.grad_output, layer.input, layer.weight, layer.saved);
}
inline bool is_differentiated(const steps::PreviousLayer& layer) {
  return is_differentiated(layer.saved);
}
inline bool is_differentiated(const steps::GluBackward& step) {
  return any_differentiated(step.grad_output, step.gate, step.up, step.down);
}

// A step of a layer called by itself: `formula` where it is differentiated, else `step`.
template <auto formula, auto step>
struct Step;

template <auto formula, typename Result, typename... Args, Result (*step)(Args...)>
struct Step<formula, step> {
  static Result call(Args... args) {
    if ((is_differentiated(args) || ...)) return formula(args...);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return step(args...);
  }
};

// Registers the steps of a list with the formulas of a struct, which has them under the rows'
// names.
template <class List, class Formulas>
void put_steps(torch::Library& m) {
  dispatch::for_each_row<List>([&m](auto row) {
    using Row = decltype(row);
    m.impl(Row::name, &Row::template flat<Step<Row::template in<Formulas>, Row::step>::call>);
  });
}

}  // namespace fused::autograd
