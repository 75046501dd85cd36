// Python classes (quantised, distributed, nested, ...) handle torch's own functions, which Python
// calls for them (torch_fused_linear/subclasses.py) at the key that a call passes first. Tensors
// that stand for others in tracing get to see the operators: Python tells the two apart.

#include "dispatch/operators.h"

#include <ATen/core/PythonFallbackKernel.h>
#include <torch/library.h>

namespace fused::dispatch {
namespace {

template <typename Op, typename Signature = typename Op::Signature>
struct Kernel;

template <typename Op, typename... Args>
struct Kernel<Op, Tensor(Args...)> {
  static Tensor call(c10::DispatchKeySet keys, Args... args) {
    if (const auto result = by_python<IfForeign<Op>>(args...)) return *result;
    // what torch does itself at this key
    constexpr auto here = c10::DispatchKey::PythonTLSSnapshot;
    const at::impl::MaybeSetTLSOnEntryGuard guard;
    return Op::handle().redispatch(
        keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, here), args...);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fused, PythonTLSSnapshot, m) {
  for_each_row<Public>([&m](auto row) { m.impl(row.name, TORCH_FN(Kernel<decltype(row)>::call)); });
}

}  // namespace fused::dispatch
