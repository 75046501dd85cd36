#pragma once

// Predicates by which the Autograd kernels choose between formula, node and inference.

#include "core/check.h"
#include "core/policy.h"
#include "dispatch/operators.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

namespace fused::autograd {

inline bool requires_grad(const Tensor& tensor) {
  return tensor.defined() && tensor.requires_grad();
}
inline bool requires_grad(const OptionalTensor& tensor) { return tensor && requires_grad(*tensor); }

inline bool inside_torch_func() {
  return c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

// Returns whether fn is true for any tensor in an operator's arguments.
template <typename Fn>
bool any_tensor(const Fn& fn, const Tensor& tensor) {
  return tensor.defined() && fn(tensor);
}
template <typename Fn>
bool any_tensor(const Fn& fn, const OptionalTensor& tensor) {
  return tensor && any_tensor(fn, *tensor);
}
template <typename Fn>
bool any_tensor(const Fn& fn, const at::TensorList& tensors) {
  return std::ranges::any_of(tensors, [&](const Tensor& tensor) { return any_tensor(fn, tensor); });
}
template <typename Fn>
bool any_tensor(const Fn& fn, const c10::List<OptionalTensor>& tensors) {
  for (const OptionalTensor& tensor : tensors) {
    if (any_tensor(fn, tensor)) return true;
  }
  return false;
}
template <typename Fn, typename Value>  // a number, a flag, a text
bool any_tensor(const Fn&, const Value&) {
  return false;
}
template <typename Fn, typename... Arguments>
  requires(sizeof...(Arguments) > 1)
bool any_tensor(const Fn& fn, const Arguments&... arguments) {
  return (any_tensor(fn, arguments) || ...);
}
template <typename Fn>
bool any_tensor(const Fn& fn, const steps::LinearBackward& layer) {
  return any_tensor(fn, layer.grad_output, layer.input, layer.weight, layer.saved);
}
template <typename Fn>
bool any_tensor(const Fn& fn, const steps::PreviousLayer& layer) {
  return any_tensor(fn, layer.saved);
}
template <typename Fn>
bool any_tensor(const Fn& fn, const steps::GluBackward& step) {
  return any_tensor(fn, step.grad_output, step.gate, step.up, step.down);
}

// Returns whether the formula must run, which torch differentiates as it does its own operators. A
// C++ node cannot serve torch.func and forward AD, and the user may ask for it (policy "eager").
template <typename... Arguments>
bool wants_formula(const Arguments&... arguments) {
  if (inside_torch_func()) return true;
  const bool is_eager = policy() == Policy::eager;
  const auto wants = [&](const Tensor& tensor) {
    return has_tangent(tensor) || (is_eager && policy_for_graph(tensor) == Policy::eager);
  };
  return any_tensor(wants, arguments...);
}

template <typename... Arguments>
bool wants_gradient(const Arguments&... arguments) {
  return at::GradMode::is_enabled() &&
         any_tensor([](const Tensor& tensor) { return tensor.requires_grad(); }, arguments...);
}

// The Autograd kernel of a step that users call: `formula` if it is differentiated, else `step`.
template <auto formula, auto step>
struct Step;

template <auto formula, typename Result, typename... Args, Result (*step)(Args...)>
struct Step<formula, step> {
  static Result call(Args... args) {
    if (wants_formula(args...) || wants_gradient(args...)) return formula(args...);
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return step(args...);
  }
};

// Registers the steps of a list with formulas: the functions of a struct that have the rows' names.
template <class List, class Formulas>
void put_steps(torch::Library& m) {
  dispatch::for_each_row<List>([&m](auto row) {
    using Row = decltype(row);
    m.impl(Row::name, &Row::template flat<Step<Row::template in<Formulas>, Row::step>::call>);
  });
}

}  // namespace fused::autograd
