// What stands in rewritten code where the decision is simple: a plain marked layer, plain tensors
// of one dtype and device, an activation of a known class. A layer without a mark is called as it
// was, and torch_fused_linear/fuse/call.py decides all else.

#include "python/expression.h"

#include "dispatch/signatures.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <string_view>

namespace fused {
namespace {

using dispatch::OptionalTensor;

// What know was given, kept for good.
PyObject *layers, *activations, *relus, *gelu, *silu, *global_hooks, *untouched, *module_call,
    *module_call_impl, *linear_class, *conv_class, *begun, *factor, *glu, *decide;

struct Reference {
  explicit Reference(PyObject* object) : object(object) {}
  ~Reference() { Py_XDECREF(object); }
  Reference(const Reference&) = delete;
  PyObject* object;
};

PyObject* intern(const char* text) { return PyUnicode_InternFromString(text); }

// Borrowed; nullptr where there is none.
PyObject* item(PyObject* dict, PyObject* name) {
  PyObject* found = PyDict_GetItemWithError(dict, name);
  if (found == nullptr) PyErr_Clear();
  return found;
}

// A class's own attribute, borrowed.
PyObject* own(PyObject* owner, PyObject* name) {
  if (PyModule_Check(owner)) return item(PyModule_GetDict(owner), name);
  return item(reinterpret_cast<PyTypeObject*>(owner)->tp_dict, name);
}

// Nobody watches every module, and nobody has put other functions into torch.
bool torch_is_plain() {
  for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(global_hooks); ++k) {
    if (PyDict_GET_SIZE(PyTuple_GET_ITEM(global_hooks, k)) != 0) return false;
  }
  for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(untouched); ++k) {
    PyObject* entry = PyTuple_GET_ITEM(untouched, k);
    PyObject* now = own(PyTuple_GET_ITEM(entry, 0), PyTuple_GET_ITEM(entry, 1));
    PyObject* before = PyTuple_GET_ITEM(entry, 2);  // None where there was none
    if ((now == nullptr ? Py_None : now) != before) return false;
  }
  return !at::impl::torch_function_mode_enabled();
}

// Running the module is nothing but running its class's forward, which is the known one.
bool is_plain(PyObject* module, PyObject* dict, PyObject* forward) {
  static PyObject* const watching[] = {intern("_forward_hooks"),  intern("_forward_pre_hooks"),
                                       intern("_backward_hooks"), intern("_backward_pre_hooks"),
                                       intern("_call_impl"),      intern("forward")};
  static PyObject *const name = intern("forward"), *const call = intern("__call__"),
                         *const call_impl = intern("_call_impl"),
                         *const compiled = intern("_compiled_call_impl");
  for (PyObject* kind : watching) {
    PyObject* found = item(dict, kind);
    if (found != nullptr && (!PyDict_Check(found) || PyDict_GET_SIZE(found) != 0)) return false;
  }
  PyObject* own_call = item(dict, compiled);
  PyTypeObject* type = Py_TYPE(module);
  return (own_call == nullptr || own_call == Py_None) && _PyType_Lookup(type, name) == forward &&
         _PyType_Lookup(type, call) == module_call &&
         _PyType_Lookup(type, call_impl) == module_call_impl;
}

bool is_float(at::ScalarType type) {
  return type == at::kFloat || type == at::kDouble || type == at::kHalf || type == at::kBFloat16;
}

// What the operators take, so that torch's own function complains about the rest.
bool fits(const Tensor& input, const Tensor& weight, PyObject* bias, int64_t axis,
          int64_t features) {
  if (input.dim() < axis || input.size(-axis) != features) return false;
  bool casts = false;
  const auto agrees = [&](const Tensor& t) {
    casts = casts || t.scalar_type() != weight.scalar_type();
    return is_float(t.scalar_type()) && t.device() == weight.device() &&
           t.layout() == at::kStrided && !t.is_nested();
  };
  if (!agrees(input) || !agrees(weight)) return false;
  const bool has_bias = bias != Py_None;
  if (has_bias) {
    const Tensor& b = THPVariable_Unpack(bias);
    if (!agrees(b) || b.dim() != 1 || b.size(0) != weight.size(0)) return false;
    if (casts && b.scalar_type() == at::kDouble) return false;
  }
  return !casts || (at::autocast::is_autocast_enabled(weight.device().type()) &&
                    input.scalar_type() != at::kDouble && weight.scalar_type() != at::kDouble);
}

// A plain layer's call that is ready to run. It owns its tensors: torch.utils.swap_tensors then
// sees while the GIL is released that they are in use.
struct Ready {
  Tensor input;
  PyObject *weight, *bias;  // borrowed
  OptionalTensor transposed;
  PyObject* wrapped() const {
    return transposed ? THPVariable_Wrap(*transposed) : Py_NewRef(weight);
  }
  Tensor matrix() const { return transposed ? *transposed : THPVariable_Unpack(weight); }
  OptionalTensor vector() const {
    return bias == Py_None ? std::nullopt : OptionalTensor(THPVariable_Unpack(bias));
  }
};

// The parameters of a plain layer, borrowed, and its class's groups.
struct Plain {
  PyObject *weight, *bias, *groups;
};

std::optional<Plain> plain(PyObject* layer) {
  static PyObject *const parameters = intern("_parameters"), *const weight_name = intern("weight"),
                         *const bias_name = intern("bias"), *const groups_name = intern("groups");
  PyObject* forward = item(layers, reinterpret_cast<PyObject*>(Py_TYPE(layer)));
  if (forward == nullptr) return std::nullopt;
  const Reference dict(PyObject_GenericGetDict(layer, nullptr));
  if (dict.object == nullptr || !is_plain(layer, dict.object, forward) || !torch_is_plain()) {
    PyErr_Clear();
    return std::nullopt;
  }
  PyObject* held = item(dict.object, parameters);
  PyObject* weight = held == nullptr ? nullptr : item(held, weight_name);
  PyObject* bias = held == nullptr ? nullptr : item(held, bias_name);
  if (weight == nullptr || bias == nullptr || !THPVariable_CheckExact(weight) ||
      !(bias == Py_None || THPVariable_CheckExact(bias))) {
    return std::nullopt;
  }
  return Plain{weight, bias, item(dict.object, groups_name)};
}

// transformers' Conv1D has its weight transposed; the operators take any strides.
OptionalTensor transposed(PyObject* layer, const Tensor& weight) {
  const bool is_linear = reinterpret_cast<PyObject*>(Py_TYPE(layer)) == linear_class;
  return is_linear ? std::nullopt : OptionalTensor(weight.t());
}

std::optional<Ready> ready(PyObject* layer, PyObject* input) {
  const auto found = THPVariable_CheckExact(input) ? plain(layer) : std::nullopt;
  if (!found) return std::nullopt;
  const auto [weight, bias, groups] = *found;
  Ready call{THPVariable_Unpack(input), weight, bias, {}};
  const Tensor& w = THPVariable_Unpack(weight);
  bool fit = false;
  if (reinterpret_cast<PyObject*>(Py_TYPE(layer)) == conv_class) {
    fit = groups != nullptr && PyLong_CheckExact(groups) && w.dim() == 4 && call.input.dim() <= 4 &&
          fits(call.input, w, bias, 3, w.size(1) * PyLong_AsLong(groups));
  } else if (w.dim() == 2) {
    call.transposed = transposed(layer, w);
    fit = fits(call.input, call.matrix(), bias, 1, call.matrix().size(1));
  }
  return fit ? std::optional<Ready>(std::move(call)) : std::nullopt;
}

bool is_conv(PyObject* layer) { return reinterpret_cast<PyObject*>(Py_TYPE(layer)) == conv_class; }

std::string_view text(PyObject* object) {
  return object != nullptr && PyUnicode_Check(object) ? PyUnicode_AsUTF8(object) : "";
}

// Of a layer that fuse_ has marked, "" of anything else. Static, as another thread may take the
// mark away while an operator runs.
std::string_view memory_of(PyObject* layer) {
  static PyObject* const name = intern("_fused");
  if (item(layers, reinterpret_cast<PyObject*>(Py_TYPE(layer))) == nullptr) return "";
  const Reference dict(PyObject_GenericGetDict(layer, nullptr));
  PyObject* memory = dict.object == nullptr ? nullptr : item(dict.object, name);
  PyErr_Clear();
  return memory == nullptr ? "" : text(memory) == "low" ? "low" : "default";
}

bool is_tuple_of(PyObject* object, PyObject* kind) {
  return PyTuple_CheckExact(object) && PyTuple_GET_SIZE(object) == 6 &&
         PyTuple_GET_ITEM(object, 0) == kind;
}

PyObject* part(PyObject* tuple, Py_ssize_t k) { return PyTuple_GET_ITEM(tuple, k); }

// A begun layer or gated layer, with no dropout behind it.
bool is_begun(PyObject* object) {
  return is_tuple_of(object, begun) && PyTuple_GET_SIZE(part(object, 5)) == 0;
}

// The name of the activation, "" for none of ours. Borrowed from static strings.
std::string_view kind_of(PyObject* function) {
  static PyObject* const approximate = intern("approximate");
  PyObject* known = item(activations, reinterpret_cast<PyObject*>(Py_TYPE(function)));
  if (known == nullptr) {
    for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(relus); ++k) {
      if (PyTuple_GET_ITEM(relus, k) == function) return "relu";
    }
    return function == gelu ? "gelu_erf" : function == silu ? "silu" : "";
  }
  const Reference dict(PyObject_GenericGetDict(function, nullptr));
  if (dict.object == nullptr || !is_plain(function, dict.object, PyTuple_GET_ITEM(known, 1))) {
    PyErr_Clear();
    return "";
  }
  const std::string_view kind = text(PyTuple_GET_ITEM(known, 0));
  if (kind != "gelu") return kind;
  const std::string_view form = text(item(dict.object, approximate));
  return form == "tanh" ? "gelu_tanh" : form == "none" ? "gelu_erf" : "";
}

// By value: another thread may exchange the layer's parameters while this one is in the operator.
PyObject* run(std::string_view kind, Tensor x, Tensor w, OptionalTensor b,
              std::string_view memory) {
  static const auto relu = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("fused::linear_relu", "")
                               .typed<dispatch::LinearRelu>();
  static const auto gelu = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("fused::linear_gelu", "")
                               .typed<dispatch::LinearGelu>();
  static const auto silu = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("fused::linear_silu", "")
                               .typed<dispatch::LinearSilu>();
  Tensor result;
  {
    const pybind11::gil_scoped_release released;
    result = kind == "relu"   ? relu.call(x, w, b, memory)
             : kind == "silu" ? silu.call(x, w, b, memory)
                              : gelu.call(x, w, b, kind == "gelu_tanh" ? "tanh" : "none", memory);
  }
  return THPVariable_Wrap(std::move(result));
}

// The activation of a begun layer, as one operator; nullptr, with no error, where Python decides.
// That nobody has put other functions into torch was seen when the call began, and nothing that
// could runs in between.
PyObject* activate(PyObject* function, PyObject* call) {
  if (!THPVariable_CheckExact(part(call, 2)) || is_conv(part(call, 1)) ||
      !THPVariable_CheckExact(part(call, 3)) ||
      !(part(call, 4) == Py_None || THPVariable_CheckExact(part(call, 4)))) {
    return nullptr;
  }
  const std::string_view memory = memory_of(part(call, 1));
  const std::string_view kind = memory.empty() ? "" : kind_of(function);
  if (kind.empty()) return nullptr;
  const Ready ready{THPVariable_Unpack(part(call, 2)), part(call, 3), part(call, 4), {}};
  return run(kind, ready.input, ready.matrix(), ready.vector(), memory);
}

OptionalTensor optional(PyObject* object) {
  return object == Py_None ? std::nullopt : OptionalTensor(THPVariable_Unpack(object));
}

// The layer after a begun gated layer, as one operator with it; nullptr where Python decides.
PyObject* down(PyObject* layer, PyObject* call) {
  PyObject* given = part(call, 2);
  if (memory_of(layer).empty()) return nullptr;
  const auto found = plain(layer);
  for (Py_ssize_t k = 0; k < 5; ++k) {
    if (part(given, k) != Py_None && !THPVariable_CheckExact(part(given, k))) return nullptr;
  }
  if (!found || THPVariable_Unpack(found->weight).dim() != 2) return nullptr;
  const Tensor x = THPVariable_Unpack(part(given, 0)), gate = THPVariable_Unpack(part(given, 1));
  const OptionalTensor up = optional(part(given, 2)), gate_bias = optional(part(given, 3)),
                       up_bias = optional(part(given, 4)), bias = optional(found->bias);
  Tensor weight = THPVariable_Unpack(found->weight);
  if (const auto matrix = transposed(layer, weight)) weight = *matrix;
  // the rows of gate are what the layer's input will have for features
  if (!fits(gate, weight, found->bias, 2, weight.size(1) * (up ? 1 : 2))) return nullptr;
  const std::string_view kind = text(part(given, 5)), memory = text(part(given, 6));
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fused::gated_mlp", "")
                             .typed<dispatch::GatedMlp>();
  Tensor result;
  {
    const pybind11::gil_scoped_release released;
    result = op.call(x, gate, up, weight, gate_bias, up_bias, bias, kind, memory);
  }
  return THPVariable_Wrap(std::move(result));
}

PyObject* linear(const Ready& call) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("fused::linear", "").typed<dispatch::Linear>();
  Tensor x = call.input, w = call.matrix();
  const OptionalTensor b = call.vector();
  Tensor result;
  {
    const pybind11::gil_scoped_release released;
    result = op.call(x, w, b);
  }
  return THPVariable_Wrap(std::move(result));
}

// Calls the function of call.py that decides everything.
PyObject* ask(const char* name, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  const Reference function(PyObject_GetAttrString(decide, name));
  if (function.object == nullptr) return nullptr;
  return PyObject_Vectorcall(function.object, given, count, names);
}

// step(function, h, ...) in place of function(h, ...): the result may be a begun call.
// last(function, h, ...): it is a value.
template <bool is_last>
PyObject* step(PyObject*, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  HANDLE_TH_ERRORS
  const Py_ssize_t all = count + (names == nullptr ? 0 : PyTuple_GET_SIZE(names));
  if (all >= 2 && !PyTuple_CheckExact(given[1]) && memory_of(given[0]).empty()) {
    return PyObject_Vectorcall(given[0], given + 1, count - 1, names);
  }
  if (count == 2 && all == 2) {
    PyObject *const function = given[0], *const h = given[1];
    if (is_begun(h)) {
      PyObject* result = part(h, 1) == glu ? down(function, h) : activate(function, h);
      if (result != nullptr || PyErr_Occurred()) return result;
    } else if (const auto call = ready(function, h); call && !(is_last && is_conv(function))) {
      if (is_last) return linear(*call);
      return Py_BuildValue("(OOONO())", begun, function, h, call->wrapped(), call->bias);
    }
  }
  return ask(is_last ? "last" : "step", given, count, names);
  END_HANDLE_TH_ERRORS
}

// call(act, layer, x) in place of act(layer(x)): both in one step
PyObject* call(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count == 3 && !PyTuple_CheckExact(given[2])) {
    const std::string_view memory = memory_of(given[1]);
    if (memory.empty()) {
      const Reference h(PyObject_CallOneArg(given[1], given[2]));
      return h.object == nullptr ? nullptr : PyObject_CallOneArg(given[0], h.object);
    }
    const std::string_view kind = is_conv(given[1]) ? "" : kind_of(given[0]);
    if (const auto found = kind.empty() ? std::nullopt : ready(given[1], given[2])) {
      return run(kind, found->input, found->matrix(), found->vector(), memory);
    }
  }
  return ask("call", given, count, nullptr);
  END_HANDLE_TH_ERRORS
}

// end(h) in place of h: what a begun call would have returned.
PyObject* end(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count == 1 && !PyTuple_CheckExact(given[0])) return Py_NewRef(given[0]);
  return ask("end", given, count, nullptr);
}

// later(act, h, ...) in place of act(h, ...) whose result a product alone gets.
PyObject* later(PyObject*, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  HANDLE_TH_ERRORS
  const bool is_bare = count == 2 && names == nullptr;
  if (is_bare && is_begun(given[1]) && part(given[1], 1) != glu && !is_conv(part(given[1], 1))) {
    const std::string_view kind = kind_of(given[0]);
    if (!kind.empty()) {
      return Py_BuildValue("(OOsO(){})", factor, given[1], kind.data(), given[0]);
    }
  } else if (is_bare && !PyTuple_CheckExact(given[1])) {
    return PyObject_CallOneArg(given[0], given[1]);
  }
  return ask("later", given, count, names);
  END_HANDLE_TH_ERRORS
}

// The gated layer of an activated gate and another layer, both begun with one input; nullptr where
// Python decides.
PyObject* glu_of(PyObject* activated, PyObject* other) {
  if (!is_tuple_of(activated, factor) || !is_begun(part(activated, 1)) || !is_begun(other)) {
    return nullptr;
  }
  PyObject* gate = part(activated, 1);
  const std::string_view memory = memory_of(part(gate, 1));
  const auto is_matrix = [](PyObject* call) {
    PyObject* weight = part(call, 3);
    return THPVariable_CheckExact(weight) && THPVariable_Unpack(weight).dim() == 2;
  };
  if (part(other, 1) == glu || part(gate, 2) != part(other, 2) || memory.empty() ||
      !is_matrix(gate) || !is_matrix(other) ||
      THPVariable_Unpack(part(gate, 3)).sizes() != THPVariable_Unpack(part(other, 3)).sizes()) {
    return nullptr;
  }
  return Py_BuildValue("(OO(OOOOOOs)OO())", begun, glu, part(gate, 2), part(gate, 3),
                       part(other, 3), part(gate, 4), part(other, 4), part(activated, 2),
                       memory.data(), Py_None, Py_None);
}

// product(left, right) in place of left * right: a begun gated layer or the value.
PyObject* product(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count == 2) {
    PyObject *const left = given[0], *const right = given[1];
    if (!PyTuple_CheckExact(left) && !PyTuple_CheckExact(right)) {
      return PyNumber_Multiply(left, right);
    }
    PyObject* gated = glu_of(left, right);
    if (gated == nullptr && !PyErr_Occurred()) gated = glu_of(right, left);
    if (gated != nullptr || PyErr_Occurred()) return gated;
  }
  return ask("product", given, count, nullptr);
  END_HANDLE_TH_ERRORS
}

// know(what stands in the variables above, in their order)
PyObject* know(PyObject*, PyObject* arguments) {
  if (!PyArg_ParseTuple(arguments, "OOOOOOOOOOOOOOO", &layers, &activations, &relus, &gelu, &silu,
                        &global_hooks, &untouched, &module_call, &module_call_impl, &linear_class,
                        &conv_class, &begun, &factor, &glu, &decide)) {
    return nullptr;
  }
  Py_INCREF(arguments);  // for good
  Py_RETURN_NONE;
}

template <typename F>
PyCFunction function(F* f) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f));
}

constexpr int with_names = METH_FASTCALL | METH_KEYWORDS;

}  // namespace

PyMethodDef expression_methods[8] = {
    {"step", function(step<false>), with_names, nullptr},
    {"last", function(step<true>), with_names, nullptr},
    {"call", function(call), METH_FASTCALL, nullptr},
    {"end", function(end), METH_FASTCALL, nullptr},
    {"later", function(later), with_names, nullptr},
    {"product", function(product), METH_FASTCALL, nullptr},
    {"know", know, METH_VARARGS, nullptr},
    {},
};

}  // namespace fused
