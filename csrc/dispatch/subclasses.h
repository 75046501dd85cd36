#pragma once

// Python classes (quantised, distributed, nested, ...) handle torch's own functions, which Python
// calls for them (torch_fused_linear/_torch/subclasses.py) at the key that a call passes first.
// Tensors that stand for others in tracing get to see the operators: Python tells the two apart.

#include "dispatch/operators.h"

#include <ATen/core/PythonFallbackKernel.h>
#include <torch/library.h>

namespace fused::dispatch {

template <typename Op, typename Signature = typename Op::Signature>
struct OrForeign;

template <typename Op, typename... Args>
struct OrForeign<Op, Tensor(Args...)> {
  static Tensor call(c10::DispatchKeySet keys, Args... args) {
    if (const auto result = by_python<IfForeign<Op>>(args...)) return *result;
    // what torch does itself at this key
    constexpr auto here = c10::DispatchKey::PythonTLSSnapshot;
    const at::impl::MaybeSetTLSOnEntryGuard guard;
    return Op::handle().redispatch(
        keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, here), args...);
  }
};

// Registers the kernels for all operators of a list.
template <class Public>
void register_for_subclasses(torch::Library& m) {
  for_each_row<Public>(
      [&m](auto row) { m.impl(row.name, TORCH_FN(OrForeign<decltype(row)>::call)); });
}

}  // namespace fused::dispatch
