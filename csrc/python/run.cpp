// Runs plain marked layers with known activations as operators; torch_fused_linear/fuse/run.py says
// what each function means, and decides wherever C does not know (`ask`).

#include "python/run.h"

#include "conv/operators.h"
#include "core/check.h"
#include "python/operator.h"
#include "python/plain.h"

#include <torch/csrc/jit/frontend/tracer.h>

#include <optional>
#include <string_view>
#include <vector>

namespace fused::python {
namespace {

PyObject* decisions;  // run.py

// Calls the function of run.py that decides everything.
PyObject* ask(const char* name, PyObject* const* given, Py_ssize_t count) {
  const Reference function(PyObject_GetAttrString(decisions, name));
  return function.object == nullptr ? nullptr
                                    : PyObject_Vectorcall(function.object, given, count, nullptr);
}

// A layer with the activation after it, if there is one, or a function that is called as it is.
struct Call {
  PyObject* layer;
  Tensor weight;
  OptionalTensor bias;
  std::string_view kind;
  PyObject* function = nullptr;
};

PyObject* run_layer(const Call& call, const Tensor& x) {
  const auto& [layer, w, b, kind, _] = call;
  const std::string_view memory = memory_of(layer) == "low" ? "low" : "default";
  if (is_conv(layer)) {
    const auto geometry = geometry_of(layer);
    if (!geometry) {  // changed by another thread since it was looked at
      PyErr_SetString(PyExc_RuntimeError, "conv2d_relu: the convolution changed while it ran");
      return nullptr;
    }
    const auto& [stride, padding, dilation] = geometry->pairs;
    return run_operator<conv::Conv2dRelu>(x, w, b, stride, padding, dilation, geometry->groups);
  }
  if (kind.empty()) return run_operator<dispatch::Linear>(x, w, b);
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

// Calls a layer that is marked to run alone, as an operator if it is plain.
PyObject* run_alone(PyObject* layer, PyObject* x) {
  if (const auto call = ready(layer, x)) {
    return run_operator<dispatch::Linear>(call->input, call->weight, call->bias);
  }
  PyObject* const given[] = {layer, x};
  return ask("alone", given, 2);
}

// The calls that functions become from one of them on (run.py, calls_from).
class Calls {
 public:
  Calls(PyObject* const* functions, Py_ssize_t count) : functions_(functions), count_(count) {}

  // Returns false where Python decides. No call: no run begins with the first function.
  bool read(Py_ssize_t start, PyObject* input) {
    calls_.clear();
    for (end_ = start; end_ < count_;) {
      PyObject* function = functions_[end_];
      PyObject* mark = mark_of(function);
      if (!memory_in(mark).empty()) {
        if (!read_layer(function, input)) return false;
        continue;
      }
      if (calls_.empty()) {
        is_alone_ = has_alone(mark);
        break;
      }
      const auto share = dropped_share(function);
      if (!share && is_other_module(function)) break;
      if (!share) return false;
      if (*share > 0) calls_.push_back({nullptr, {}, {}, "", function});
      ++end_;
    }
    return true;
  }

  bool empty() const { return calls_.empty(); }
  Py_ssize_t end() const { return end_; }

  // Calls the first function, with which no run begins. Returns a new reference.
  PyObject* call_first(PyObject* x) const {
    PyObject* function = functions_[end_];
    return is_alone_ ? run_alone(function, x) : PyObject_CallOneArg(function, x);
  }

  // Takes a reference to the input, and returns one to the result.
  PyObject* carry_out(PyObject* x) const {
    for (size_t i = 0; i < calls_.size() && x != nullptr;) {
      const size_t length = chain_from(i);
      const Reference input(x);
      if (calls_[i].function != nullptr) {
        x = PyObject_CallOneArg(calls_[i].function, x);
      } else {
        const Tensor tensor = THPVariable_Unpack(x);
        x = length > 1 ? run_chain(i, length, tensor) : run_layer(calls_[i], tensor);
      }
      i += length;
    }
    return x;
  }

 private:
  bool read_layer(PyObject* layer, PyObject* input) {
    auto call = calls_.empty() ? ready(layer, input) : ready_after(layer, *before_);
    if (!call) return false;
    const bool conv = is_conv(layer);
    Py_ssize_t at = end_ + 1;
    std::vector<PyObject*> drops;
    for (; at < count_; ++at) {
      const auto share = dropped_share(functions_[at]);
      if (!share) break;
      if (*share > 0) drops.push_back(functions_[at]);
    }
    std::string_view kind = at < count_ ? kind_of(functions_[at]) : "";
    if (at < count_ && kind.empty() && !is_module(functions_[at])) return false;
    if (conv && (kind != "relu" || !geometry_of(layer))) return false;
    before_ = call->weight;
    if (kind.empty() || (kind != "relu" && !drops.empty())) {
      calls_.push_back({layer, std::move(call->weight), std::move(call->bias), ""});
      ++end_;
      return true;
    }
    end_ = at + 1;
    if (kind == "relu" && drops.empty() && !conv && end_ < count_ &&
        squares(functions_[end_], nullptr, 0)) {
      kind = "relu2", ++end_;
    }
    calls_.push_back({layer, std::move(call->weight), std::move(call->bias), kind});
    for (PyObject* drop : drops) calls_.push_back({nullptr, {}, {}, "", drop});
    return true;
  }

  bool may_join(size_t i) const {
    return calls_[i].function == nullptr && !is_conv(calls_[i].layer);
  }

  // Returns how many layers from this one on become `mlp`: layers with one activation, then one
  // without.
  size_t chain_from(size_t first) const {
    if (!may_join(first) || calls_[first].kind.empty()) return 1;
    if (torch::jit::tracer::isTracing()) return 1;  // which cannot record a list of optionals
    for (size_t i = first + 1; i < calls_.size() && may_join(i); ++i) {
      if (calls_[i].kind.empty()) return i - first + 1;
      if (calls_[i].kind != calls_[first].kind) return 1;
    }
    return 1;
  }

  PyObject* run_chain(size_t first, size_t length, const Tensor& x) const {
    std::vector<Tensor> weights;
    c10::List<OptionalTensor> biases;
    std::string_view memory = "default";
    for (size_t i = first; i < first + length; ++i) {
      weights.push_back(calls_[i].weight);
      biases.push_back(calls_[i].bias);
      if (memory_of(calls_[i].layer) == "low") memory = "low";
    }
    return run_operator<dispatch::Mlp>(x, at::TensorList(weights), biases, calls_[first].kind,
                                       memory);
  }

  PyObject* const* functions_;
  const Py_ssize_t count_;
  Py_ssize_t end_ = 0;
  bool is_alone_ = false;
  std::vector<Call> calls_;
  OptionalTensor before_;
};

// run(x, f1, f2, ...): the result, or None if nothing has run.
PyObject* run(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count >= 2 && memory_of(given[1]).empty()) Py_RETURN_NONE;
  Calls calls(given + 1, count - 1);
  if (count < 2 || !calls.read(0, given[0])) return ask("run", given, count);
  if (calls.empty() || calls.end() < count - 1) Py_RETURN_NONE;
  return calls.carry_out(Py_NewRef(given[0]));
  END_HANDLE_TH_ERRORS
}

// nested(f2, f1, x): f2(f1(x)).
PyObject* nested(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count < 2) return ask("nested", given, count);
  std::vector<PyObject*> functions(std::make_reverse_iterator(given + count - 1),
                                   std::make_reverse_iterator(given));
  PyObject* x = Py_NewRef(given[count - 1]);
  const auto length = static_cast<Py_ssize_t>(functions.size());
  Calls calls(functions.data(), length);
  for (Py_ssize_t i = 0; i < length && x != nullptr;) {
    const Reference input(x);
    if (!calls.read(i, x)) {  // Python goes on from here
      std::vector<PyObject*> rest(given, given + length - i);
      rest.push_back(x);
      return ask("nested", rest.data(), static_cast<Py_ssize_t>(rest.size()));
    }
    if (calls.empty()) {
      x = calls.call_first(x);
      ++i;
    } else {
      x = calls.carry_out(Py_NewRef(x));
      i = calls.end();
    }
  }
  return x;
  END_HANDLE_TH_ERRORS
}

// alone(layer, x): layer(x).
PyObject* alone(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 2) return ask("alone", given, count);
  const bool is_marked = has_alone(mark_of(given[0]));
  return is_marked ? run_alone(given[0], given[1]) : PyObject_CallOneArg(given[0], given[1]);
  END_HANDLE_TH_ERRORS
}

// leads(sequential): whether it holds marked layers, and iterates over its modules.
PyObject* leads(PyObject*, PyObject* const* given, Py_ssize_t count) {
  PyObject* held = count == 1 ? modules_of(given[0]) : nullptr;
  if (held == nullptr) return ask("leads", given, count);
  PyObject* module;
  for (Py_ssize_t at = 0; PyDict_Next(held, &at, nullptr, &module);) {
    if (mark_of(module) != nullptr) Py_RETURN_TRUE;
  }
  Py_RETURN_FALSE;
}

// sequence(sequential, x): what its loop gives.
PyObject* sequence(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  PyObject* held = count == 2 ? modules_of(given[0]) : nullptr;
  if (held == nullptr) return ask("sequence", given, count);
  PyObject* x = Py_NewRef(given[1]);
  const Py_ssize_t length = PyDict_GET_SIZE(held);
  for (Py_ssize_t i = 0; i < length && x != nullptr;) {
    // A module that runs as it is may exchange those after it.
    const Reference input(x), functions(PyDict_Values(held));
    if (functions.object == nullptr) return nullptr;
    if (PyList_GET_SIZE(functions.object) != length) {
      PyErr_SetString(PyExc_RuntimeError, "dictionary changed size during iteration");
      return nullptr;
    }
    PyObject** first = reinterpret_cast<PyListObject*>(functions.object)->ob_item;
    Calls calls(first, length);
    if (const bool known = calls.read(i, x); known && !calls.empty()) {
      x = calls.carry_out(Py_NewRef(x));
      i = calls.end();
    } else if (known) {
      x = calls.call_first(x);
      ++i;
    } else {
      PyObject* const rest[] = {given[0], x, PyLong_FromSsize_t(i)};
      const Reference place(rest[2]);
      return place.object == nullptr ? nullptr : ask("sequence", rest, 3);
    }
  }
  return x;
  END_HANDLE_TH_ERRORS
}

// ---- gated layers ------------------------------------------------------------------------------

// The functions after a gated layer: dropouts that act, and a layer.
struct After {
  std::vector<PyObject*> drops;
  std::optional<Ready> down;
};

// nullopt where Python decides.
std::optional<After> read_after(PyObject* const* functions, Py_ssize_t count, const Tensor& gate,
                                int64_t features) {
  After after;
  for (Py_ssize_t k = 0; k < count; ++k) {
    if (!memory_of(functions[k]).empty() && k == count - 1 && !is_conv(functions[k])) {
      after.down = ready_after(functions[k], gate, features);
      if (!after.down) return std::nullopt;
      continue;
    }
    const auto share = dropped_share(functions[k]);
    if (!share) return std::nullopt;
    if (*share > 0) after.drops.push_back(functions[k]);
  }
  return after;
}

PyObject* run_gated(const Tensor& x, const Tensor& gate, const OptionalTensor& up,
                    const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                    std::string_view kind, std::string_view memory, const After& after) {
  const auto& down = after.down;
  if (down && after.drops.empty()) {
    return run_operator<dispatch::GatedMlp>(x, gate, up, down->weight, gate_bias, up_bias,
                                            down->bias, kind, memory);
  }
  PyObject* h = run_operator<dispatch::LinearGlu>(x, gate, up, gate_bias, up_bias, kind, memory);
  for (PyObject* drop : after.drops) {
    const Reference input(h);
    if (h != nullptr) h = PyObject_CallOneArg(drop, h);
  }
  if (h == nullptr || !down) return h;
  const Reference input(h);
  return run_operator<dispatch::Linear>(THPVariable_Unpack(h), down->weight, down->bias);
}

// gated(x, act, gate, up, ...): the result, or None if nothing has run.
PyObject* gated(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count >= 4 && memory_of(given[2]).empty()) Py_RETURN_NONE;
  if (count >= 4 && !is_conv(given[2]) && !is_conv(given[3]) && !memory_of(given[3]).empty()) {
    const auto gate = ready(given[2], given[0]), up = ready(given[3], given[0]);
    const std::string_view kind = kind_of(given[1]);
    if (gate && up && !kind.empty() && gate->weight.sizes() == up->weight.sizes()) {
      const auto after = read_after(given + 4, count - 4, gate->weight, gate->weight.size(0));
      if (after) {
        return run_gated(gate->input, gate->weight, up->weight, gate->bias, up->bias, kind,
                         memory_of(given[2]), *after);
      }
    }
  }
  return ask("gated", given, count);
  END_HANDLE_TH_ERRORS
}

// halves(x, act, layer, number, chunk, ...): the same of the two halves of a layer's result.
PyObject* halves(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count >= 3 && memory_of(given[2]).empty()) Py_RETURN_NONE;
  return ask("halves", given, count);
}

bool keep(PyObject*& kept, PyObject* module, const char* name) {
  kept = PyObject_GetAttrString(module, name);
  return kept != nullptr;
}

// know(plain, run, nn.Linear, nn.Conv2d, nn.Module, nn.Sequential): files of Python, and classes
PyObject* know(PyObject*, PyObject* arguments) {
  PyObject* tables;
  if (!PyArg_ParseTuple(arguments, "OOOOOO", &tables, &decisions, &linear_class, &conv_class,
                        &module_class, &sequential_class) ||
      !keep(layers, tables, "LAYERS") || !keep(float8_layers, tables, "FLOAT8_LAYERS") ||
      !keep(modules, tables, "MODULES") || !keep(passed, tables, "PASSED") ||
      !keep(functions, tables, "FUNCTIONS") || !keep(square_functions, tables, "SQUARES") ||
      !keep(global_hooks, tables, "GLOBAL_HOOKS") || !keep(untouched, tables, "UNTOUCHED") ||
      !keep(module_call, tables, "CALL") || !keep(module_call_impl, tables, "CALL_IMPL")) {
    return nullptr;
  }
  Py_INCREF(arguments);  // for good
  Py_RETURN_NONE;
}

}  // namespace

PyMethodDef run_methods[9] = {
    {"run", as_method(run), METH_FASTCALL, nullptr},
    {"nested", as_method(nested), METH_FASTCALL, nullptr},
    {"alone", as_method(alone), METH_FASTCALL, nullptr},
    {"leads", as_method(leads), METH_FASTCALL, nullptr},
    {"sequence", as_method(sequence), METH_FASTCALL, nullptr},
    {"gated", as_method(gated), METH_FASTCALL, nullptr},
    {"halves", as_method(halves), METH_FASTCALL, nullptr},
    {"know", know, METH_VARARGS, nullptr},
    {},
};

}  // namespace fused::python
