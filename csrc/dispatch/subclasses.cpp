// Tensors of Python classes of their own (quantised, distributed, nested, ...). Such a class
// handles what torch's own functions call, and has never heard of our operators; so those functions
// are called. The kernels here are for the key that a call passes before any other when a Python
// class or mode is involved. Tensors that stand for others while a graph is traced are of Python
// classes too and must get to see the operators: torch_fused_linear/subclasses.py tells the two
// apart.

#include "dispatch/operators.h"
#include "reference/conv.h"
#include "reference/gated.h"
#include "reference/linear.h"

#include <ATen/core/PythonFallbackKernel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <vector>

namespace fused::dispatch {
namespace {

constexpr auto why = "(no kernel: tensor subclass)";

// ---- the tensors among the arguments -----------------------------------------------------------

using Tensors = std::vector<Tensor>;

void collect(Tensors& found, const Tensor& tensor) { found.push_back(tensor); }
void collect(Tensors& found, const OptionalTensor& tensor) {
  if (has_value(tensor)) found.push_back(*tensor);
}
void collect(Tensors& found, at::TensorList tensors) {
  found.insert(found.end(), tensors.begin(), tensors.end());
}
void collect(Tensors& found, const c10::List<OptionalTensor>& tensors) {
  for (const OptionalTensor& tensor : tensors) collect(found, tensor);
}
template <typename Value>  // a number, a name
void collect(Tensors&, const Value&) {}

// Python's answer; without Python there is no such class.
bool any_foreign(const Tensors& tensors) {
  constexpr auto key = c10::DispatchKey::BackendSelect;
  static const auto handle =
      c10::Dispatcher::singleton().findSchemaOrThrow("fused::_any_foreign", "");
  static const auto op = handle.typed<bool(at::TensorList)>();
  return handle.hasKernelForDispatchKey(key) && op.redispatch(c10::DispatchKeySet(key), tensors);
}

// ---- what is called instead --------------------------------------------------------------------

struct ByTorch {
  static Tensor layer(const char* op, const Tensor& input, const Tensor& weight,
                      const OptionalTensor& bias, Activation activation, Memory) {
    return reference::as_torch_does(op, why, input, weight, bias, activation, /*foreign=*/true);
  }

  static Tensor mlp(const Tensor& input, at::TensorList weights,
                    const c10::List<OptionalTensor>& biases, Activation activation, Memory) {
    check_mlp(weights, biases);
    return reference::mlp_as_torch_does(why, input, weights, biases, activation, /*foreign=*/true);
  }

  static Tensor gated_layer(const char* op, const gated::Layer& layer, const gated::Down& down,
                            Activation activation, Memory) {
    gated::check(op, layer);
    return reference::gated_as_torch_does(op, why, layer, down, activation, /*foreign=*/true);
  }

  static Tensor conv2d_relu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            const conv::Geometry& geometry) {
    return reference::conv_as_torch_does(why, input, weight, bias, geometry);
  }
};

// ---- the kernels -------------------------------------------------------------------------------

template <typename Op, auto instead, typename Signature = typename Op::Signature>
struct Kernel;

template <typename Op, auto instead, typename... Args>
struct Kernel<Op, instead, Tensor(Args...)> {
  static Tensor call(c10::DispatchKeySet keys, Args... args) {
    Tensors tensors;
    (collect(tensors, args), ...);
    if (any_foreign(tensors)) return instead(args...);
    // what torch does itself at this key
    constexpr auto here = c10::DispatchKey::PythonTLSSnapshot;
    const at::impl::MaybeSetTLSOnEntryGuard guard;
    return Op::handle().redispatch(
        keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, here), args...);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fused, PythonTLSSnapshot, m) {
  for_each_row<Public>([&m](auto row) {
    using Row = decltype(row);
    constexpr auto instead = &Row::template flat<Row::template in<ByTorch>>;
    m.impl(Row::name, TORCH_FN((Kernel<Row, instead>::call)));
  });
}

}  // namespace fused::dispatch
