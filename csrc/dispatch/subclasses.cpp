// Tensors of Python classes of their own (quantised, distributed, nested, ...). Such a class
// handles what torch's own functions call, and has never heard of our operators; so those functions
// are called. The kernels here are for the key that a call passes before any other when a Python
// class or mode is involved. Tensors that stand for others while a graph is traced are of Python
// classes too and must get to see the operators: torch_fused_linear/subclasses.py tells the two
// apart.

#include "core/memory.h"
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

Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
  return reference::as_torch_does("linear", why, input, weight, bias, Activation::none,
                                  /*foreign=*/true);
}

Tensor linear_relu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                   std::string_view memory) {
  parse_memory("linear_relu", memory);
  return reference::as_torch_does("linear_relu", why, input, weight, bias, Activation::relu,
                                  /*foreign=*/true);
}

Tensor linear_gelu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                   std::string_view approximate, std::string_view memory) {
  constexpr auto op = "linear_gelu";
  parse_memory(op, memory);
  const auto activation = parse_approximate(op, approximate);
  return reference::as_torch_does(op, why, input, weight, bias, activation, /*foreign=*/true);
}

Tensor linear_silu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                   std::string_view memory) {
  parse_memory("linear_silu", memory);
  return reference::as_torch_does("linear_silu", why, input, weight, bias, Activation::silu,
                                  /*foreign=*/true);
}

Tensor mlp(const Tensor& input, at::TensorList weights, const c10::List<OptionalTensor>& biases,
           std::string_view activation, std::string_view memory) {
  parse_memory("mlp", memory);
  check_mlp(weights, biases);
  return reference::mlp_as_torch_does(why, input, weights, biases,
                                      parse_hidden_activation("mlp", "activation", activation),
                                      /*foreign=*/true);
}

Tensor linear_glu(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                  const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                  std::string_view activation, std::string_view memory) {
  constexpr auto op = "linear_glu";
  parse_memory(op, memory);
  const gated::Layer layer{input, gate, up, gate_bias, up_bias};
  gated::check(op, layer);
  return reference::gated_as_torch_does(op, why, layer, {}, gated::parse(op, activation),
                                        /*foreign=*/true);
}

Tensor gated_mlp(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                 const Tensor& down, const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                 const OptionalTensor& down_bias, std::string_view activation,
                 std::string_view memory) {
  constexpr auto op = "gated_mlp";
  parse_memory(op, memory);
  const gated::Layer layer{input, gate, up, gate_bias, up_bias};
  gated::check(op, layer);
  return reference::gated_as_torch_does(op, why, layer, {down, down_bias},
                                        gated::parse(op, activation), /*foreign=*/true);
}

Tensor conv2d_relu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                   c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                   c10::SymIntArrayRef dilation, c10::SymInt groups) {
  return reference::conv_as_torch_does(why, input, weight, bias,
                                       conv::Geometry(stride, padding, dilation, groups));
}

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
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow(Op::name, "")
                               .template typed<Tensor(Args...)>();
    constexpr auto here = c10::DispatchKey::PythonTLSSnapshot;
    const at::impl::MaybeSetTLSOnEntryGuard guard;
    return op.redispatch(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, here),
                         args...);
  }
};

template <typename Op, auto instead>
void put(torch::Library& m) {
  m.impl(Op::name, TORCH_FN((Kernel<Op, instead>::call)));
}

}  // namespace

TORCH_LIBRARY_IMPL(fused, PythonTLSSnapshot, m) {
  put<Linear, linear>(m);
  put<LinearRelu, linear_relu>(m);
  put<LinearGelu, linear_gelu>(m);
  put<LinearSilu, linear_silu>(m);
  put<Mlp, mlp>(m);
  put<LinearGlu, linear_glu>(m);
  put<GatedMlp, gated_mlp>(m);
  put<Conv2dRelu, conv2d_relu>(m);
}

}  // namespace fused::dispatch
