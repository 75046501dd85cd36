#pragma once

// The operators, a row each. Schemas, typed calls, kernels for every dispatch key (put), autocast,
// kernels for tensor subclasses and calls from eager Python are made from the rows.

#include "core/activation.h"
#include "core/check.h"
#include "core/gated.h"
#include "fused_linear.h"

#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

namespace fused::dispatch {

template <size_t size>
struct Text {
  char chars[size]{};
  constexpr Text() = default;
  constexpr Text(const char (&given)[size]) { std::copy_n(given, size, chars); }  // NOLINT
};

template <size_t a, size_t b>
constexpr auto operator+(const Text<a>& left, const Text<b>& right) {
  Text<a + b - 1> both;
  std::copy_n(left.chars, a - 1, both.chars);
  std::copy_n(right.chars, b, both.chars + a - 1);
  return both;
}

// An argument that is text in a public schema, and converts to the type that a kernel takes.
struct Word {
  const char* op;
  std::string_view text;

  operator std::string_view() const { return text; }                         // NOLINT
  operator Activation() const { return parse_hidden_activation(op, text); }  // NOLINT
  operator Memory() const { return parse_memory(op, text); }                 // NOLINT
};

// An argument that is a number in a step's schema, and converts to the activation.
struct Number {
  const char* op;
  int64_t given;

  operator Activation() const { return hidden_activation_of(op, given); }  // NOLINT
};

template <Text schema_, typename Signature>
struct Operator;

template <Text schema_, typename Result, typename... Args>
struct Operator<schema_, Result(Args...)> {
  using Signature = Result(Args...);
  static constexpr auto text = schema_;
  static constexpr const char* schema = text.chars;

 private:
  static constexpr auto text_of_name = [] {
    auto text = schema_;
    std::fill(std::ranges::find(text.chars, '('), std::end(text.chars), '\0');
    return text;
  }();

  static Word parsed(std::string_view text) { return {name, text}; }
  static Number parsed(int64_t given) { return {name, given}; }
  template <typename Value>
  static const Value& parsed(const Value& value) {
    return value;
  }

 public:
  static constexpr const char* name = text_of_name.chars;

  static const c10::TypedOperatorHandle<Signature>& handle() {
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow((std::string("fused::") + name).c_str(), "")
                               .template typed<Signature>();
    return op;
  }
  static Result call(Args... args) { return handle().call(args...); }

  // Adapts a function whose parameters are grouped in structs to the schema's flat arguments.
  template <auto fn>
  static Result flat(Args... args) {
    return fn(parsed(args)...);
  }
};

// Names the function that a set of kernels has for a row; a step's is also the C++ API's.
#define FUSED_KERNEL(function) \
  template <class Kernels>     \
  static constexpr auto in = &Kernels::function
#define FUSED_STEP(function)                     \
  static constexpr auto step = &steps::function; \
  FUSED_KERNEL(function)

// ---- what users call ---------------------------------------------------------------------------

// With memory 'low' a backward recomputes what it can.
struct Linear : Operator<"linear(Tensor input, Tensor weight, Tensor? bias=None) -> Tensor",
                         decltype(fused::linear)> {
  FUSED_KERNEL(layer);

  template <auto fn>
  static Tensor flat(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
    return fn(name, input, weight, bias, Activation::none, Memory::standard);
  }
};

template <Text name_, Activation activation_>
struct Layer : Operator<name_ + Text("(Tensor input, Tensor weight, Tensor? bias=None, *, "
                                     "str memory='default') -> Tensor"),
                        decltype(fused::linear_relu)> {
  static constexpr Activation activation = activation_;
  FUSED_KERNEL(layer);

  template <auto fn>
  static Tensor flat(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                     std::string_view memory) {
    return fn(Layer::name, input, weight, bias, activation, parse_memory(Layer::name, memory));
  }
};
using LinearRelu = Layer<"linear_relu", Activation::relu>;
using LinearSilu = Layer<"linear_silu", Activation::silu>;
using LinearRelu2 = Layer<"linear_relu2", Activation::relu2>;

struct LinearGelu : Operator<
                        "linear_gelu(Tensor input, Tensor weight, Tensor? bias=None, *, "
                        "str approximate='tanh', str memory='default') -> Tensor",
                        decltype(fused::linear_gelu)> {
  FUSED_KERNEL(layer);

  template <auto fn>
  static Tensor flat(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                     std::string_view approximate, std::string_view memory) {
    return fn(name, input, weight, bias, parse_approximate(name, approximate),
              parse_memory(name, memory));
  }
};

struct Mlp : Operator<
                 "mlp(Tensor input, Tensor[] weights, Tensor?[] biases, str activation='relu', *, "
                 "str memory='default') -> Tensor",
                 decltype(fused::mlp)> {
  FUSED_KERNEL(mlp);
};

struct LinearGlu
    : Operator<
          "linear_glu(Tensor input, Tensor gate, Tensor? up=None, Tensor? gate_bias=None, "
          "Tensor? up_bias=None, *, str activation='silu', str memory='default') -> Tensor",
          decltype(fused::linear_glu)> {
  FUSED_KERNEL(gated_layer);

  template <auto fn>
  static Tensor flat(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                     const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                     std::string_view activation, std::string_view memory) {
    return fn(name, {input, gate, up, gate_bias, up_bias}, {},
              parse_hidden_activation(name, activation),
              parse_memory(name, memory, /*is_gated=*/true));
  }
};

struct GatedMlp : Operator<
                      "gated_mlp(Tensor input, Tensor gate, Tensor? up, Tensor down, "
                      "Tensor? gate_bias=None, Tensor? up_bias=None, Tensor? down_bias=None, *, "
                      "str activation='silu', str memory='default') -> Tensor",
                      decltype(fused::gated_mlp)> {
  FUSED_KERNEL(gated_layer);

  template <auto fn>
  static Tensor flat(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                     const Tensor& down, const OptionalTensor& gate_bias,
                     const OptionalTensor& up_bias, const OptionalTensor& down_bias,
                     std::string_view activation, std::string_view memory) {
    TORCH_CHECK_TYPE(down.defined(), name, ": expected down to be a tensor, got None");
    return fn(name, {input, gate, up, gate_bias, up_bias}, {down, down_bias},
              parse_hidden_activation(name, activation),
              parse_memory(name, memory, /*is_gated=*/true));
  }
};

using LinearOperators = std::tuple<Linear, LinearRelu, LinearGelu, LinearSilu, LinearRelu2, Mlp>;
using GatedOperators = std::tuple<LinearGlu, GatedMlp>;
using Public = decltype(std::tuple_cat(LinearOperators(), GatedOperators()));

// Python's kernel gives the result by torch's own functions, if a tensor is of a class of its own.
template <class Op, typename Signature = typename Op::Signature>
struct IfForeign;

template <class Op, typename... Args>
struct IfForeign<Op, Tensor(Args...)>
    : Operator<Text("_if_foreign_") + Op::text + Text("?"), OptionalTensor(Args...)> {};

// ---- what nodes call ---------------------------------------------------------------------------

// A step takes the activation as its number: the text of a public schema is parsed once, where the
// call begins.

// The second result is the tensor that the backward needs: ReLU's bit mask, else the
// pre-activation.
struct LinearAux : Operator<
                       "_linear_aux(Tensor input, Tensor weight, Tensor? bias, "
                       "int activation) -> (Tensor output, Tensor saved)",
                       Pair(const Tensor&, const Tensor&, const OptionalTensor&, int64_t)> {
  FUSED_STEP(linear_aux);
};

// A bit for each element of ReLU's output, 0 where output <= 0.
struct ReluMask : Operator<"_relu_mask(Tensor output) -> Tensor", decltype(steps::relu_mask)> {
  FUSED_STEP(relu_mask);
};

struct LinearReluBits : Operator<
                            "_linear_relu_bits(Tensor input, Tensor weight, Tensor? bias=None)"
                            " -> (Tensor output, Tensor mask)",
                            decltype(steps::linear_relu_bits)> {
  FUSED_STEP(linear_relu_bits);
};

struct ActivationBackward
    : Operator<
          "_activation_backward(Tensor grad_output, Tensor saved, int activation, "
          "bool bias_grad) -> (Tensor grad_preactivation, Tensor grad_bias)",
          Pair(const Tensor&, const Tensor&, int64_t, bool)> {
  FUSED_STEP(activation_backward);

  template <auto fn>
  static Pair flat(const Tensor& grad_output, const Tensor& saved, int64_t activation,
                   bool bias_grad) {
    return fn(grad_output, saved, activation_of(name, activation), bias_grad);
  }
};

struct LinearBackward
    : Operator<
          "_linear_backward(Tensor grad_output, Tensor input, Tensor weight, Tensor? saved, "
          "int activation, bool[3] output_mask) -> "
          "(Tensor grad_input, Tensor grad_weight, Tensor grad_bias)",
          Triple(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, int64_t,
                 std::array<bool, 3>)> {
  FUSED_STEP(linear_backward);

  template <auto fn>
  static Triple flat(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                     const OptionalTensor& saved, int64_t activation, std::array<bool, 3> wanted) {
    return fn({grad_output, input, weight, saved, activation_of(name, activation), wanted});
  }
};

struct WeightGradient : Operator<
                            "_weight_gradient(Tensor grad_output, Tensor? input, "
                            "Tensor(a!) into, bool adds) -> ()",
                            decltype(steps::weight_gradient)> {
  FUSED_STEP(weight_gradient);
};

struct LinearBackwardAcross
    : Operator<
          "_linear_backward_across(Tensor grad_output, Tensor input, Tensor weight, "
          "Tensor? saved, int activation, bool[3] output_mask, Tensor previous_saved, "
          "int previous_activation, bool previous_bias_grad) -> "
          "(Tensor grad_previous_preactivation, Tensor grad_weight, Tensor grad_bias, "
          "Tensor grad_previous_bias)",
          Quadruple(const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&, int64_t,
                    std::array<bool, 3>, const Tensor&, int64_t, bool)> {
  FUSED_STEP(linear_backward_across);

  template <auto fn>
  static Quadruple flat(const Tensor& grad_output, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& saved, int64_t activation, std::array<bool, 3> wanted,
                        const Tensor& previous_saved, int64_t previous, bool previous_bias_grad) {
    return fn({grad_output, input, weight, saved, activation_of(name, activation), wanted},
              {previous_saved, hidden_activation_of(name, previous, "previous_activation"),
               previous_bias_grad});
  }
};

// The pre-activations if they are kept; without up both are in the first.
struct LinearGluAux
    : Operator<
          "_linear_glu_aux(Tensor input, Tensor gate, Tensor? up, Tensor? gate_bias, "
          "Tensor? up_bias, int activation, bool keeps) -> "
          "(Tensor output, Tensor gate_preactivation, Tensor up_preactivation)",
          Triple(const Tensor&, const Tensor&, const OptionalTensor&, const OptionalTensor&,
                 const OptionalTensor&, int64_t, bool)> {
  FUSED_STEP(linear_glu_aux);
};

struct Glu : Operator<"_glu(Tensor gate, Tensor? up, int activation) -> Tensor",
                      Tensor(const Tensor&, const OptionalTensor&, int64_t)> {
  FUSED_STEP(glu);
};

// The gradients of gate and up, their column sums, and the result again. If the weight of the next
// layer is given, grad_output is the gradient of that layer's output.
struct GluBackward
    : Operator<
          "_glu_backward(Tensor grad_output, Tensor gate, Tensor? up, int activation, "
          "bool[5] output_mask, Tensor? down=None) -> (Tensor grad_gate, Tensor grad_up, "
          "Tensor grad_gate_bias, Tensor grad_up_bias, Tensor output)",
          Quintuple(const Tensor&, const Tensor&, const OptionalTensor&, int64_t,
                    std::array<bool, 5>, const OptionalTensor&)> {
  FUSED_STEP(glu_backward);

  template <auto fn>
  static Quintuple flat(const Tensor& grad_output, const Tensor& gate, const OptionalTensor& up,
                        int64_t activation, std::array<bool, 5> wanted,
                        const OptionalTensor& down) {
    return fn({grad_output, gate, up, hidden_activation_of(name, activation), wanted, down});
  }
};

#undef FUSED_STEP
#undef FUSED_KERNEL

using LinearSteps = std::tuple<LinearAux, ReluMask, LinearReluBits, ActivationBackward,
                               LinearBackward, WeightGradient, LinearBackwardAcross>;
using GatedSteps = std::tuple<LinearGluAux, Glu, GluBackward>;
using Steps = decltype(std::tuple_cat(LinearSteps(), GatedSteps()));

// The results of each layer of a small network, and the pre-activations of hidden layers if act' is
// read from them. Empty unless one launch on a GPU computes all.
using MlpInOne = Operator<
    "_mlp_in_one(Tensor input, Tensor[] weights, Tensor?[] biases, int activation) -> Tensor[]",
    std::vector<Tensor>(const Tensor&, at::TensorList, const c10::List<OptionalTensor>&, int64_t)>;

// The weight's gradient in a compiled backward. When the graph runs, the product may add it to the
// existing gradient, and the result is zeros. It is never added to memory that the graph reads:
// `storages` holds the addresses.
using AccumulatedWeightGradient = Operator<
    "_accumulated_weight_gradient(Tensor grad_output, Tensor input, Tensor weight, "
    "ScalarType dtype, Tensor? storages=None) -> Tensor",
    Tensor(const Tensor&, const Tensor&, const Tensor&, at::ScalarType, const OptionalTensor&)>;

// A layer of each member of an ensemble, as vmap makes it (reference::LinearFormula). The second
// result is the tensor that act' is read from, or [0]. Its backward is LinearBackward.
using EnsembleLinear = Operator<
    "_ensemble_linear(Tensor input, Tensor weight, Tensor? bias, int activation) -> "
    "(Tensor output, Tensor saved)",
    Pair(const Tensor&, const Tensor&, const OptionalTensor&, int64_t)>;

// ---- what Python does --------------------------------------------------------------------------

// Returns whether it is a DTensor, of which this process holds a part.
using IsSharded = Operator<"_is_sharded(Tensor tensor) -> bool", bool(const Tensor&)>;

// Returns a weight's `main_grad`, or with `added` notes that a gradient has been added to it.
using MainGrad = Operator<"_main_grad(Tensor weight, bool added) -> Tensor?",
                          OptionalTensor(const Tensor&, bool)>;

// Calls Python's kernel; without Python there is none, and the result is empty.
template <class Op, typename... Args>
auto by_python(const Args&... args) {
  constexpr auto key = c10::DispatchKey::BackendSelect;
  const auto& op = Op::handle();
  using Result = decltype(op.redispatch(c10::DispatchKeySet(key), args...));
  return op.hasKernelForDispatchKey(key) ? op.redispatch(c10::DispatchKeySet(key), args...)
                                         : Result();
}

// ---- schemas and kernels -----------------------------------------------------------------------

// Inductor must pass arguments with the strides that they had when they were traced.
inline const std::vector<at::Tag>& tags() {
  static const std::vector both{at::Tag::pt2_compliant_tag, at::Tag::needs_exact_strides};
  return both;
}

template <class List, typename Fn>
void for_each_row(const Fn& fn) {
  std::apply([&fn](const auto&... rows) { (fn(rows), ...); }, List());
}

// Defines the schemas of public operators, given as lists of rows, and of steps in a library.
template <class Public, class Steps>
void define(torch::Library& m) {
  for_each_row<Public>([&m](auto row) { m.def(decltype(row)::schema, tags()); });
  for_each_row<Steps>([&m](auto row) { m.def(decltype(row)::schema, tags()); });
  for_each_row<Public>([&m](auto row) { m.def(IfForeign<decltype(row)>::schema); });
}

template <class List, class Kernels>
void put(torch::Library& m) {
  for_each_row<List>([&m](auto row) {
    using Row = decltype(row);
    m.impl(Row::name, &Row::template flat<Row::template in<Kernels>>);
  });
}

}  // namespace fused::dispatch
