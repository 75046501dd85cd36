// The decisions of torch_fused_linear/fuse/call.py where they are simple: a plain layer, plain
// tensors of one dtype and device, an activation of a known class. The answer to all else is None,
// and Python decides.

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

// What know_plain was given, kept for good.
PyObject *layers, *activations, *relus, *gelu, *silu, *begun, *global_hooks, *untouched,
    *linear_class, *conv_class, *glu;

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

bool is_empty(PyObject* dict) { return dict == nullptr || PyDict_GET_SIZE(dict) == 0; }

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
    if (now != PyTuple_GET_ITEM(entry, 2)) return false;
  }
  return !at::impl::torch_function_mode_enabled();
}

// Running the module is nothing but running its class's forward, which is the known one.
bool is_plain(PyObject* module, PyObject* dict, PyObject* forward) {
  static PyObject* const hooks[] = {intern("_forward_hooks"), intern("_forward_pre_hooks"),
                                    intern("_backward_hooks"), intern("_backward_pre_hooks")};
  static PyObject *const name = intern("forward"), *const compiled = intern("_compiled_call_impl");
  for (PyObject* kind : hooks) {
    if (!is_empty(item(dict, kind))) return false;
  }
  PyObject* call = item(dict, compiled);
  return item(dict, name) == nullptr && (call == nullptr || call == Py_None) &&
         own(reinterpret_cast<PyObject*>(Py_TYPE(module)), name) == forward;
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
  if (layers == nullptr) return std::nullopt;
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

// begin(layer, input) -> (Begun, layer, input, weight, bias, ()) or None
PyObject* begin(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const auto found = count == 2 ? ready(given[0], given[1]) : std::nullopt;
  if (!found) Py_RETURN_NONE;
  return Py_BuildValue("(OOONO())", begun, given[0], given[1], found->wrapped(), found->bias);
  END_HANDLE_TH_ERRORS
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
  const auto text = [](PyObject* o) -> std::string_view {
    return o != nullptr && PyUnicode_Check(o) ? PyUnicode_AsUTF8(o) : "";
  };
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

// activate(function, begun call, memory) -> the operator's result or None. That nobody has put
// other functions into torch was seen when the call began, and nothing that could runs in between.
PyObject* activate(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 3 || layers == nullptr || !PyTuple_CheckExact(given[1]) ||
      PyTuple_GET_SIZE(given[1]) != 6 || PyTuple_GET_ITEM(given[1], 0) != begun) {
    Py_RETURN_NONE;
  }
  const auto part = [&](Py_ssize_t k) { return PyTuple_GET_ITEM(given[1], k); };
  if (PyTuple_GET_SIZE(part(5)) != 0 || !THPVariable_CheckExact(part(2)) ||
      reinterpret_cast<PyObject*>(Py_TYPE(part(1))) == conv_class ||
      !THPVariable_CheckExact(part(3)) ||
      !(part(4) == Py_None || THPVariable_CheckExact(part(4)))) {
    Py_RETURN_NONE;
  }
  const std::string_view kind = kind_of(given[0]);
  if (kind.empty()) Py_RETURN_NONE;
  const Ready call{THPVariable_Unpack(part(2)), part(3), part(4), {}};
  return run(kind, call.input, call.matrix(), call.vector(), PyUnicode_AsUTF8(given[2]));
  END_HANDLE_TH_ERRORS
}

// call(function, layer, input) -> the operator's result or None: both in one step
PyObject* call(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 3 || layers == nullptr ||
      reinterpret_cast<PyObject*>(Py_TYPE(given[1])) == conv_class) {
    Py_RETURN_NONE;
  }
  const std::string_view kind = kind_of(given[0]);
  const auto found = kind.empty() ? std::nullopt : ready(given[1], given[2]);
  if (!found) Py_RETURN_NONE;
  return run(kind, found->input, found->matrix(), found->vector(), "default");
  END_HANDLE_TH_ERRORS
}

// gated(function, layer, other layer or None, input, memory, up_first) -> a begun gated layer,
// (Begun, glu, (input, gate, up, gate_bias, up_bias, activation, memory), None, None, ()), or None
PyObject* gated(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  const std::string_view kind = count == 6 && layers != nullptr ? kind_of(given[0]) : "";
  const auto first = kind.empty() ? std::nullopt : ready(given[1], given[3]);
  if (!first || first->matrix().dim() != 2) Py_RETURN_NONE;
  PyObject *gate = nullptr, *up = nullptr, *gate_bias = nullptr, *up_bias = nullptr;
  if (given[2] != Py_None) {
    const auto second = ready(given[2], given[3]);
    if (!second || second->matrix().sizes() != first->matrix().sizes()) Py_RETURN_NONE;
    up = second->wrapped();
    up_bias = Py_NewRef(second->bias);
  } else if (first->matrix().size(0) % 2 != 0) {
    Py_RETURN_NONE;
  } else if (given[5] == Py_True) {
    const auto weights = first->matrix().chunk(2);
    gate = THPVariable_Wrap(weights[1]);
    up = THPVariable_Wrap(weights[0]);
    if (const auto bias = first->vector()) {
      const auto biases = bias->chunk(2);
      gate_bias = THPVariable_Wrap(biases[1]);
      up_bias = THPVariable_Wrap(biases[0]);
    }
  }
  const auto or_none = [](PyObject* owned) { return owned ? owned : Py_NewRef(Py_None); };
  if (gate == nullptr) {
    gate = first->wrapped();
    gate_bias = Py_NewRef(first->bias);
  }
  PyObject* name = PyUnicode_FromStringAndSize(kind.data(), kind.size());
  return Py_BuildValue("(OO(ONNNNNO)OO())", begun, glu, given[3], gate, or_none(up),
                       or_none(gate_bias), or_none(up_bias), name, given[4], Py_None, Py_None);
  END_HANDLE_TH_ERRORS
}

OptionalTensor optional(PyObject* object) {
  return object == Py_None ? std::nullopt : OptionalTensor(THPVariable_Unpack(object));
}

// down(layer, a begun gated layer) -> the block's result or None
PyObject* down(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 2 || layers == nullptr || !PyTuple_CheckExact(given[1]) ||
      PyTuple_GET_SIZE(given[1]) != 6 || PyTuple_GET_ITEM(given[1], 1) != glu ||
      PyTuple_GET_SIZE(PyTuple_GET_ITEM(given[1], 5)) != 0) {
    Py_RETURN_NONE;
  }
  const auto part = [&](Py_ssize_t k) {
    return PyTuple_GET_ITEM(PyTuple_GET_ITEM(given[1], 2), k);
  };
  const auto found = plain(given[0]);
  for (Py_ssize_t k = 0; k < 5; ++k) {
    if (part(k) != Py_None && !THPVariable_CheckExact(part(k))) Py_RETURN_NONE;
  }
  if (!found || THPVariable_Unpack(found->weight).dim() != 2) Py_RETURN_NONE;
  const Tensor x = THPVariable_Unpack(part(0)), gate = THPVariable_Unpack(part(1));
  const OptionalTensor up = optional(part(2)), gate_bias = optional(part(3)),
                       up_bias = optional(part(4)), bias = optional(found->bias);
  Tensor weight = THPVariable_Unpack(found->weight);
  if (const auto matrix = transposed(given[0], weight)) weight = *matrix;
  // the rows of gate are what the layer's input will have for features
  if (!fits(gate, weight, found->bias, 2, weight.size(1) * (up ? 1 : 2))) Py_RETURN_NONE;
  const std::string_view kind = PyUnicode_AsUTF8(part(5)), memory = PyUnicode_AsUTF8(part(6));
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("fused::gated_mlp", "")
                             .typed<dispatch::GatedMlp>();
  Tensor result;
  {
    const pybind11::gil_scoped_release released;
    result = op.call(x, gate, up, weight, gate_bias, up_bias, bias, kind, memory);
  }
  return THPVariable_Wrap(std::move(result));
  END_HANDLE_TH_ERRORS
}

// know_plain(layers, activations, relus, gelu, silu, Begun, global hooks, untouched, Linear,
// Conv2d, the function of a begun gated layer)
PyObject* know_plain(PyObject*, PyObject* arguments) {
  if (!PyArg_ParseTuple(arguments, "OOOOOOOOOOO", &layers, &activations, &relus, &gelu, &silu,
                        &begun, &global_hooks, &untouched, &linear_class, &conv_class, &glu)) {
    return nullptr;
  }
  Py_INCREF(arguments);  // for good
  Py_RETURN_NONE;
}

template <typename F>
PyCFunction function(F* f) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(f));
}

}  // namespace

PyMethodDef expression_methods[7] = {
    {"begin", function(begin), METH_FASTCALL, nullptr},
    {"activate", function(activate), METH_FASTCALL, nullptr},
    {"call", function(call), METH_FASTCALL, nullptr},
    {"gated", function(gated), METH_FASTCALL, nullptr},
    {"down", function(down), METH_FASTCALL, nullptr},
    {"know_plain", know_plain, METH_VARARGS, nullptr},
    {},
};

}  // namespace fused
