// What stands in rewritten code: it runs plain marked layers with known activations, and calls
// layers without a mark as they were; torch_fused_linear/fuse/call.py decides about all else.

#include "python/expression.h"

#include "core/check.h"
#include "python/operator.h"
#include "python/plain.h"

#include <optional>
#include <string_view>

namespace fused::python {
namespace {

PyObject *begun, *glu, *decide;

PyObject* part(PyObject* tuple, Py_ssize_t k) { return PyTuple_GET_ITEM(tuple, k); }

bool is_begun(PyObject* object, Py_ssize_t behind = 0) {
  return PyTuple_CheckExact(object) && PyTuple_GET_SIZE(object) == 6 && part(object, 0) == begun &&
         PyTuple_GET_SIZE(part(object, 5)) == behind;
}

PyObject* run(std::string_view kind, const Ready& call, std::string_view memory) {
  const Tensor x = call.input, w = call.weight;  // whose uses swap_tensors counts
  const OptionalTensor b = call.bias;
  if (kind.starts_with("gelu")) {
    const std::string_view approximate = kind == "gelu_tanh" ? "tanh" : "none";
    return run_operator<dispatch::LinearGelu>(x, w, b, approximate, memory);
  }
  PyObject* result = nullptr;
  dispatch::for_each_row<dispatch::LinearOperators>([&](auto row) {
    using Row = decltype(row);
    if constexpr (requires { Row::activation; }) {
      if (kind == name(Row::activation)) result = run_operator<Row>(x, w, b, memory);
    }
  });
  return result;
}

// Runs a begun layer with its activation as one operator; nullptr, with no error, where Python
// decides. Nobody has put other functions into torch since the call began.
PyObject* activate(std::string_view kind, PyObject* call) {
  if (kind.empty() || !THPVariable_CheckExact(part(call, 2)) ||
      !THPVariable_CheckExact(part(call, 3)) || !is_optional(part(call, 4))) {
    return nullptr;
  }
  const std::string_view memory = memory_of(part(call, 1));
  if (memory.empty()) return nullptr;
  const Ready ready{THPVariable_Unpack(part(call, 2)), THPVariable_Unpack(part(call, 3)),
                    optional(part(call, 4))};
  if (!is_conv(part(call, 1))) return run(kind, ready, memory);
  const auto geometry = kind == "relu" ? geometry_of(part(call, 1)) : std::nullopt;
  if (!geometry) return nullptr;
  const auto& [stride, padding, dilation] = geometry->pairs;
  return run_operator<dispatch::Conv2dRelu>(ready.input, ready.weight, ready.bias, stride, padding,
                                            dilation, geometry->groups);
}

// Runs the layer after a begun gated layer as one operator with it; nullptr where Python decides.
PyObject* down(PyObject* layer, PyObject* call) {
  PyObject* given = part(call, 2);
  if (memory_of(layer).empty()) return nullptr;
  const auto found = plain(layer);
  for (Py_ssize_t k = 0; k < 5; ++k) {
    if (!is_optional(part(given, k))) return nullptr;
  }
  if (!found || THPVariable_Unpack(found->weight).dim() != 2) return nullptr;
  const Tensor x = THPVariable_Unpack(part(given, 0)), gate = THPVariable_Unpack(part(given, 1));
  const OptionalTensor up = optional(part(given, 2)), gate_bias = optional(part(given, 3)),
                       up_bias = optional(part(given, 4)), bias = optional(found->bias);
  Tensor weight = THPVariable_Unpack(found->weight);
  if (const auto matrix = transposed(layer, weight)) weight = *matrix;
  // the rows of gate are what the layer's input will have for features
  if (!fits(gate, weight, bias, 2, weight.size(1) * (up ? 1 : 2))) return nullptr;
  const std::string_view kind = text(part(given, 5)), memory = text(part(given, 6));
  return run_operator<dispatch::GatedMlp>(x, gate, up, weight, gate_bias, up_bias, bias, kind,
                                          memory);
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
  if (count >= 2 && all == count && is_begun(given[1], 1) && part(given[1], 1) != glu) {
    const bool is_relu = text(part(part(part(given[1], 5), 0), 0)) == "relu";
    const bool is_square = is_relu && squares(given[0], given + 2, count - 2);
    PyObject* result = is_square ? activate("relu2", given[1]) : nullptr;
    if (result != nullptr || PyErr_Occurred()) return result;
  } else if (count == 2 && all == 2) {
    PyObject *const function = given[0], *const h = given[1];
    if (is_begun(h)) {
      PyObject* result = part(h, 1) == glu ? down(function, h) : activate(kind_of(function), h);
      if (result != nullptr || PyErr_Occurred()) return result;
      if (!is_last && passes(function)) return Py_NewRef(h);
    } else if (const auto call = ready(function, h); call && !(is_last && is_conv(function))) {
      if (is_last) {
        return run_operator<dispatch::Linear>(call->input, call->weight, call->bias);
      }
      const Reference weight(THPVariable_Wrap(call->weight)), nothing(PyTuple_New(0)),
          bias(call->bias ? THPVariable_Wrap(*call->bias) : Py_NewRef(Py_None));
      if (weight.object == nullptr || bias.object == nullptr) return nullptr;
      return PyTuple_Pack(6, begun, function, h, weight.object, bias.object, nothing.object);
    }
  }
  return ask(is_last ? "last" : "step", given, count, names);
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
      PyObject* call = given[1];
      return Py_BuildValue("(OOOOO((sO(){})))", begun, part(call, 1), part(call, 2), part(call, 3),
                           part(call, 4), kind.data(), given[0]);
    }
  } else if (is_bare && !PyTuple_CheckExact(given[1])) {
    return PyObject_CallOneArg(given[0], given[1]);
  }
  return ask("later", given, count, names);
  END_HANDLE_TH_ERRORS
}

// first((owner, name, ...), function, h, ...) in place of function(h, ...), the last call of a
// factor before the layer of the other, that of the path: it waits only where that one will.
PyObject* first(PyObject* self, PyObject* const* given, Py_ssize_t count, PyObject* names) {
  HANDLE_TH_ERRORS
  PyObject *const path = given[0], *other = part(path, 0);
  for (Py_ssize_t k = 1; other != nullptr && k < PyTuple_GET_SIZE(path); ++k) {
    other = child(other, part(path, k));
  }
  const bool is_marked = other != nullptr && !memory_of(other).empty();
  if (is_marked && !plain(other)) return ask("first", given, count, names);
  const auto what = !is_marked ? step<true> : PyTuple_CheckExact(given[2]) ? later : step<false>;
  return what(self, given + 1, count - 1, names);
  END_HANDLE_TH_ERRORS
}

// Begins the gated layer of an activated gate and another layer of one input; nullptr where Python
// decides.
PyObject* glu_of(PyObject* gate, PyObject* other) {
  if (!is_begun(gate, 1) || !is_begun(other)) return nullptr;
  PyObject* kind = part(part(part(gate, 5), 0), 0);  // or the share of a dropout
  const std::string_view memory = memory_of(part(gate, 1));
  const auto is_matrix = [](PyObject* call) {
    PyObject* weight = part(call, 3);
    return THPVariable_CheckExact(weight) && THPVariable_Unpack(weight).dim() == 2;
  };
  if (!PyUnicode_Check(kind) || part(other, 1) == glu || part(gate, 2) != part(other, 2) ||
      memory.empty() || !is_matrix(gate) || !is_matrix(other) ||
      THPVariable_Unpack(part(gate, 3)).sizes() != THPVariable_Unpack(part(other, 3)).sizes()) {
    return nullptr;
  }
  return Py_BuildValue("(OO(OOOOOOs)OO())", begun, glu, part(gate, 2), part(gate, 3),
                       part(other, 3), part(gate, 4), part(other, 4), kind, memory.data(), Py_None,
                       Py_None);
}

// product(left, right) in place of left * right: a begun gated layer or the value.
// last_product(left, right): it is a value.
template <bool is_last>
PyObject* product(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count == 2) {
    PyObject *const left = given[0], *const right = given[1];
    if (!PyTuple_CheckExact(left) && !PyTuple_CheckExact(right)) {
      return PyNumber_Multiply(left, right);
    }
    PyObject* gated = glu_of(left, right);
    if (gated == nullptr && !PyErr_Occurred()) gated = glu_of(right, left);
    if (gated != nullptr && is_last) {
      const Reference whole(gated);
      return ask("end", &whole.object, 1, nullptr);
    }
    if (gated != nullptr || PyErr_Occurred()) return gated;
  }
  return ask(is_last ? "last_product" : "product", given, count, nullptr);
  END_HANDLE_TH_ERRORS
}

bool keep(PyObject*& kept, PyObject* module, const char* name) {
  kept = PyObject_GetAttrString(module, name);
  return kept != nullptr;
}

// know(plain, call, nn.Linear, nn.Conv2d): the two files of Python, and the classes
PyObject* know(PyObject*, PyObject* arguments) {
  PyObject* tables;
  if (!PyArg_ParseTuple(arguments, "OOOO", &tables, &decide, &linear_class, &conv_class) ||
      !keep(layers, tables, "LAYERS") || !keep(modules, tables, "MODULES") ||
      !keep(passed, tables, "PASSED") || !keep(functions, tables, "FUNCTIONS") ||
      !keep(square_functions, tables, "SQUARES") || !keep(global_hooks, tables, "GLOBAL_HOOKS") ||
      !keep(untouched, tables, "UNTOUCHED") || !keep(module_call, tables, "CALL") ||
      !keep(module_call_impl, tables, "CALL_IMPL") || !keep(begun, decide, "Begun") ||
      !keep(glu, decide, "glu")) {
    return nullptr;
  }
  Py_INCREF(arguments);  // for good
  Py_RETURN_NONE;
}

constexpr int with_names = METH_FASTCALL | METH_KEYWORDS;

}  // namespace

PyMethodDef expression_methods[9] = {
    {"step", as_method(step<false>), with_names, nullptr},
    {"last", as_method(step<true>), with_names, nullptr},
    {"first", as_method(first), with_names, nullptr},
    {"end", as_method(end), METH_FASTCALL, nullptr},
    {"later", as_method(later), with_names, nullptr},
    {"product", as_method(product<false>), METH_FASTCALL, nullptr},
    {"last_product", as_method(product<true>), METH_FASTCALL, nullptr},
    {"know", know, METH_VARARGS, nullptr},
    {},
};

}  // namespace fused::python
