#include "python/plain.h"

#include "core/check.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>

namespace fused::python {
namespace {

PyObject* intern(const char* text) { return PyUnicode_InternFromString(text); }

// Borrowed; nullptr where there is none.
PyObject* item(PyObject* dict, PyObject* name) {
  PyObject* found = PyDict_GetItemWithError(dict, name);
  if (found == nullptr) PyErr_Clear();
  return found;
}

struct Dict : Reference {
  explicit Dict(PyObject* owner) : Reference(PyObject_GenericGetDict(owner, nullptr)) {
    PyErr_Clear();
  }
  PyObject* operator[](PyObject* name) const {
    return object == nullptr ? nullptr : item(object, name);
  }
};

// A class's own attribute, borrowed.
PyObject* own(PyObject* owner, PyObject* name) {
  if (!PyType_Check(owner)) return item(PyModule_GetDict(owner), name);
  return item(reinterpret_cast<PyTypeObject*>(owner)->tp_dict, name);
}

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

// Tells whether running the module is nothing but its class's known forward.
bool is_plain(PyObject* module, const Dict& dict, PyObject* forward) {
  static PyObject* const watching[] = {intern("_forward_hooks"),  intern("_forward_pre_hooks"),
                                       intern("_backward_hooks"), intern("_backward_pre_hooks"),
                                       intern("_call_impl"),      intern("forward")};
  static PyObject *const name = intern("forward"), *const call = intern("__call__"),
                         *const call_impl = intern("_call_impl"),
                         *const compiled = intern("_compiled_call_impl");
  for (PyObject* kind : watching) {
    PyObject* found = dict[kind];
    if (found != nullptr && (!PyDict_Check(found) || PyDict_GET_SIZE(found) != 0)) return false;
  }
  PyObject* own_call = dict[compiled];
  PyTypeObject* type = Py_TYPE(module);
  return dict.object != nullptr && (own_call == nullptr || own_call == Py_None) &&
         _PyType_Lookup(type, name) == forward && _PyType_Lookup(type, call) == module_call &&
         _PyType_Lookup(type, call_impl) == module_call_impl;
}

// Tells whether what a module of transformers' calls is the activation that its class is known for.
bool calls(PyObject* module, PyObject* called, std::string_view kind) {
  if (PyMethod_Check(called)) return PyMethod_GET_SELF(called) == module;
  static PyObject *const func = intern("func"), *const keywords = intern("keywords"),
                         *const approximate = intern("approximate");
  if (kind != "gelu_tanh") return kind_of(called) == kind;
  const Reference inner(PyObject_GetAttr(called, func)), given(PyObject_GetAttr(called, keywords));
  PyErr_Clear();
  return inner.object != nullptr && given.object != nullptr && PyDict_Check(given.object) &&
         kind_of(inner.object) == "gelu_erf" && text(item(given.object, approximate)) == "tanh";
}

// Python decides about these.
bool runs_in_float8(PyObject* layer) {
  return PySet_Contains(float8_layers, reinterpret_cast<PyObject*>(Py_TYPE(layer))) == 1;
}

// square() returns fp32 on a GPU under autocast.
bool squares_wide() { return at::autocast::is_autocast_enabled(at::kCUDA); }

}  // namespace

bool fits(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, int64_t axis,
          int64_t features) {
  if (input.dim() < axis || input.size(-axis) != features) return false;
  bool casts = false;
  const auto agrees = [&](const Tensor& t) {
    casts = casts || t.scalar_type() != weight.scalar_type();
    return is_supported(t.scalar_type()) && t.device() == weight.device() &&
           t.layout() == at::kStrided && !t.is_nested();
  };
  if (!agrees(input) || !agrees(weight)) return false;
  if (bias) {
    if (!agrees(*bias) || bias->dim() != 1 || bias->size(0) != weight.size(0)) return false;
    if (casts && bias->scalar_type() == at::kDouble) return false;
  }
  if (!casts) return true;
  const auto device = weight.device().type();  // others are no devices of autocast's
  return (device == at::kCPU || device == at::kCUDA) && at::autocast::is_autocast_enabled(device) &&
         input.scalar_type() != at::kDouble && weight.scalar_type() != at::kDouble;
}

std::optional<Plain> plain(PyObject* layer) {
  static PyObject *const parameters = intern("_parameters"), *const weight_name = intern("weight"),
                         *const bias_name = intern("bias"), *const groups_name = intern("groups"),
                         *const conv_name = intern("_conv_forward");
  PyObject* forward = item(layers, reinterpret_cast<PyObject*>(Py_TYPE(layer)));
  if (forward == nullptr || runs_in_float8(layer)) return std::nullopt;
  const Dict dict(layer);
  if (!is_plain(layer, dict, forward) || !torch_is_plain()) return std::nullopt;
  for (PyObject* name : {weight_name, bias_name, conv_name}) {
    if (dict[name] != nullptr) return std::nullopt;  // which hides the parameter
  }
  PyObject* held = dict[parameters];
  if (held == nullptr || !PyDict_CheckExact(held)) return std::nullopt;  // Python asks the class
  PyObject *const weight = item(held, weight_name), *const bias = item(held, bias_name);
  if (weight == nullptr || bias == nullptr || !THPVariable_CheckExact(weight) ||
      !is_optional(bias)) {
    return std::nullopt;
  }
  return Plain{weight, bias, dict[groups_name]};
}

OptionalTensor transposed(PyObject* layer, const Tensor& weight) {
  const bool is_linear = reinterpret_cast<PyObject*>(Py_TYPE(layer)) == linear_class;
  return is_linear ? std::nullopt : OptionalTensor(weight.t());
}

std::optional<Ready> ready(PyObject* layer, PyObject* input) {
  const auto found = THPVariable_CheckExact(input) ? plain(layer) : std::nullopt;
  if (!found) return std::nullopt;
  Ready call{THPVariable_Unpack(input), THPVariable_Unpack(found->weight), optional(found->bias)};
  Tensor& w = call.weight;
  bool fit = false;
  if (is_conv(layer)) {
    const auto count = number(found->groups);
    fit = count && w.dim() == 4 && call.input.dim() <= 4 &&
          fits(call.input, w, call.bias, 3, w.size(1) * *count);
  } else if (w.dim() == 2) {
    if (const auto matrix = transposed(layer, w)) w = *matrix;
    fit = fits(call.input, w, call.bias, 1, w.size(1));
  }
  return fit ? std::optional<Ready>(std::move(call)) : std::nullopt;
}

bool is_conv(PyObject* layer) { return reinterpret_cast<PyObject*>(Py_TYPE(layer)) == conv_class; }

std::optional<Ready> ready_after(PyObject* layer, const Tensor& before, int64_t features) {
  const auto found = plain(layer);
  if (!found) return std::nullopt;
  Ready call{{}, THPVariable_Unpack(found->weight), optional(found->bias)};
  Tensor& w = call.weight;
  if (w.dim() != before.dim()) return std::nullopt;
  int64_t groups = 1;
  if (is_conv(layer)) {
    const auto count = number(found->groups);
    if (!count) return std::nullopt;
    groups = *count;
  } else if (const auto matrix = transposed(layer, w)) {
    w = *matrix;
  }
  if (w.size(1) * groups != (features < 0 ? before.size(0) : features)) return std::nullopt;
  // The result before has the dtype of its weight, or of autocast.
  return fits(before, w, call.bias, 1, before.size(-1)) ? std::optional(std::move(call))
                                                        : std::nullopt;
}

PyObject* modules_of(PyObject* sequential) {
  static PyObject *const modules_name = intern("_modules"), *const iter = intern("__iter__");
  auto* torchs = reinterpret_cast<PyTypeObject*>(sequential_class);
  if (_PyType_Lookup(Py_TYPE(sequential), iter) != _PyType_Lookup(torchs, iter)) {
    return nullptr;
  }
  const Dict dict(sequential);
  PyObject* held = dict[modules_name];
  return held == nullptr || !PyDict_CheckExact(held) ? nullptr : held;
}

std::optional<ConvGeometry> geometry_of(PyObject* layer) {
  static PyObject* const names[] = {intern("stride"), intern("padding"), intern("dilation")};
  static PyObject *const mode = intern("padding_mode"), *const groups_name = intern("groups");
  const Dict dict(layer);
  const auto groups = number(dict[groups_name]);
  if (!groups || text(dict[mode]) != "zeros") return std::nullopt;
  ConvGeometry found{{}, *groups};
  for (int k = 0; k < 3; ++k) {
    PyObject* pair = dict[names[k]];
    if (pair == nullptr || !PyTuple_CheckExact(pair) || PyTuple_GET_SIZE(pair) != 2) return {};
    for (int d = 0; d < 2; ++d) {
      const auto size = number(PyTuple_GET_ITEM(pair, d));
      if (!size) return {};
      found.pairs[k][d] = *size;
    }
  }
  return found;
}

std::optional<double> dropped_share(PyObject* module) {
  static PyObject *const training = intern("training"), *const share = intern("p"),
                         *const inplace = intern("inplace");
  PyObject* forward = item(passed, reinterpret_cast<PyObject*>(Py_TYPE(module)));
  if (forward == nullptr) return std::nullopt;
  const Dict dict(module);
  if (!is_plain(module, dict, forward)) return std::nullopt;
  PyObject* p = dict[share];
  if (p == nullptr) return 0;  // an identity
  const double value = PyFloat_CheckExact(p) ? PyFloat_AS_DOUBLE(p) : -1;
  if (value < 0 || value > 1) return std::nullopt;
  if (dict[training] == Py_False) return 0;
  if (dict[training] != Py_True || dict[inplace] != Py_False) return std::nullopt;
  return value;
}

bool is_module(PyObject* object) { return PyObject_IsInstance(object, module_class) == 1; }

bool is_other_module(PyObject* object) {
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
  return item(passed, type) == nullptr && is_module(object);
}

std::string_view text(PyObject* object) {
  if (object == nullptr || !PyUnicode_Check(object)) return "";
  Py_ssize_t size;
  const char* utf8 = PyUnicode_AsUTF8AndSize(object, &size);
  if (utf8 == nullptr) PyErr_Clear();  // of a lone surrogate
  return utf8 == nullptr ? "" : std::string_view(utf8, size);
}

PyObject* mark_of(PyObject* layer) {
  static PyObject* const name = intern("_torch_fused_linear");
  if (item(layers, reinterpret_cast<PyObject*>(Py_TYPE(layer))) == nullptr) return nullptr;
  return Dict(layer)[name];
}

std::string_view memory_in(PyObject* mark) {
  static PyObject *const low = intern("low"), *const usual = intern("default");
  if (mark == nullptr) return "";
  if (!PyDict_Check(mark) || PyDict_GET_SIZE(mark) == 0) return "default";
  if (item(mark, low) != nullptr) return "low";
  return item(mark, usual) != nullptr ? "default" : "";
}

std::string_view memory_of(PyObject* layer) { return memory_in(mark_of(layer)); }

bool has_alone(PyObject* mark) {
  static PyObject* const name = intern("alone");
  return mark != nullptr && PyDict_Check(mark) && item(mark, name) != nullptr;
}

bool squares(PyObject* function, PyObject* const* more, Py_ssize_t count) {
  PyObject* given = item(square_functions, function);
  if (given == nullptr || PyTuple_GET_SIZE(given) != count || squares_wide()) return false;
  return count == 0 || number(more[0]) == 2;
}

std::string_view kind_of(PyObject* function) {
  static PyObject *const approximate = intern("approximate"), *const act = intern("act");
  for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(functions); ++k) {
    PyObject* row = PyTuple_GET_ITEM(functions, k);
    if (PyTuple_GET_ITEM(row, 0) != function) continue;
    const std::string_view kind = text(PyTuple_GET_ITEM(row, 1));
    return kind == "gelu" ? "gelu_erf" : kind;
  }
  PyObject* known = item(modules, reinterpret_cast<PyObject*>(Py_TYPE(function)));
  if (known == nullptr) return "";
  const Dict dict(function);
  if (!is_plain(function, dict, PyTuple_GET_ITEM(known, 1))) return "";
  const std::string_view kind = text(PyTuple_GET_ITEM(known, 0));
  if (kind == "relu2" && squares_wide()) return "";
  PyObject* called = dict[act];
  if (called != nullptr && !calls(function, called, kind)) return "";
  if (kind != "gelu") return kind;
  const std::string_view form = text(dict[approximate]);
  return form == "tanh" ? "gelu_tanh" : form == "none" ? "gelu_erf" : "";
}

}  // namespace fused::python
