// The Autograd kernels of linear and gated layers. Each chooses the formula, a node or inference,
// by calls of the dispatcher alone, so that sizes may be symbols.

#include "autograd/arguments.h"
#include "autograd/nodes.h"
#include "dispatch/gated_kernels.h"
#include "dispatch/linear_kernels.h"
#include "fused_linear.h"

namespace fused::autograd {
namespace {

// The kernel of an operator: by torch's functions, which torch differentiates, or by a node. A call
// that autograd has no part in goes on to the kernels below as it came: they read its texts and
// check its tensors.
template <class Op, class Formulas, class Nodes, typename Signature = typename Op::Signature>
struct Entry;

template <class Op, class Formulas, class Nodes, typename... Args>
struct Entry<Op, Formulas, Nodes, Tensor(Args...)> {
  static Tensor call(Args... args) {
    if (wants_formula(args...)) return Op::template flat<Op::template in<Formulas>>(args...);
    if (wants_gradient(args...)) return Op::template flat<Op::template in<Nodes>>(args...);
    const at::AutoDispatchBelowADInplaceOrView guard;
    return Op::call(args...);
  }
};

struct LinearFormulas {
  static Tensor layer(const char* op, const Tensor& input, const Tensor& weight,
                      const OptionalTensor& bias, Activation activation, Memory) {
    const char* why = objection(input, weight, bias);
    return reference::as_torch_does(op, why, input, weight, bias, activation);
  }

  static Tensor mlp(const Tensor& input, at::TensorList weights,
                    const c10::List<OptionalTensor>& biases, Activation activation, Memory) {
    check_mlp("mlp", weights, biases);
    const char* why = objection(input, weights, biases);
    return reference::mlp_as_torch_does(why, input, weights, biases, activation);
  }
};

// Torch's functions take, and differentiate, what a node of ours cannot. The kernels that the node
// calls check once more, as anybody can call them.
struct LinearNodes {
  static Tensor layer(const char* op, const Tensor& input, const Tensor& weight,
                      const OptionalTensor& bias, Activation activation, Memory memory) {
    if (const char* why = objection(input, weight, bias)) {
      return reference::as_torch_does(op, why, input, weight, bias, activation);
    }
    return linear_with_gradient(input, weight, bias, activation, memory);
  }

  static Tensor mlp(const Tensor& input, at::TensorList weights,
                    const c10::List<OptionalTensor>& biases, Activation activation, Memory memory) {
    check_mlp("mlp", weights, biases);
    if (const char* why = objection(input, weights, biases)) {
      return reference::mlp_as_torch_does(why, input, weights, biases, activation);
    }
    return mlp_with_gradient(input, weights, biases, activation, memory);
  }
};

struct GatedFormulas {
  static Tensor gated_layer(const char* op, const gated::Layer& layer, const gated::Down& down,
                            Activation activation, Memory) {
    gated::check(op, layer);
    const char* why = gated::objection(layer, down);
    return reference::gated_as_torch_does(op, why, layer, down, activation);
  }
};

struct GatedNodes {
  static Tensor gated_layer(const char* op, const gated::Layer& layer, const gated::Down& down,
                            Activation activation, Memory memory) {
    gated::check(op, layer);
    if (const char* why = gated::objection(layer, down)) {
      return reference::gated_as_torch_does(op, why, layer, down, activation);
    }
    return gated_with_gradient(layer, down, activation, memory);
  }
};

template <class Operators, class Formulas, class Nodes>
void put_entries(torch::Library& m) {
  dispatch::for_each_row<Operators>([&m](auto row) {
    using Op = decltype(row);
    m.impl(Op::name, Entry<Op, Formulas, Nodes>::call);
  });
}

Pair ensemble_linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                     int64_t number) {
  const auto activation = activation_of(dispatch::EnsembleLinear::name, number);
  if (wants_formula(input, weight, bias)) {
    return reference::LinearFormula::ensemble(input, weight, bias, activation);
  }
  if (wants_gradient(input, weight, bias)) {
    check_ensemble(dispatch::EnsembleLinear::name, input, weight, bias);
    auto output = linear_with_gradient(input, weight, bias, activation, Memory::standard);
    return {output, reference::unwanted(output)};
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return dispatch::EnsembleLinear::call(input, weight, bias, number);
}

}  // namespace

TORCH_LIBRARY_IMPL(fused, Autograd, m) {
  m.impl(dispatch::EnsembleLinear::name, ensemble_linear);
  put_entries<dispatch::LinearOperators, LinearFormulas, LinearNodes>(m);
  put_entries<dispatch::GatedOperators, GatedFormulas, GatedNodes>(m);
  put_steps<dispatch::LinearSteps, dispatch::LinearKernels<reference::LinearFormula>>(m);
  put_steps<dispatch::GatedSteps, dispatch::GatedKernels<reference::GluFormula>>(m);
}

}  // namespace fused::autograd
