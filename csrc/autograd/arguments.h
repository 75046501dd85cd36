#pragma once

// What the Autograd kernels ask of their arguments before they choose a way.

#include "core/check.h"
#include "core/policy.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

namespace fused {

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

}  // namespace fused
