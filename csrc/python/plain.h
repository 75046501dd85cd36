// Decides whether modules are plain, and whether tensors fit them. torch_fused_linear/fuse/plain.py
// defines the rules.
#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string_view>

namespace fused::python {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Tables of plain.py and classes of torch, which `know` receives. They are never freed.
inline PyObject *layers, *float8_layers, *modules, *passed, *functions, *square_functions,
    *global_hooks, *untouched, *module_call, *module_call_impl, *linear_class, *conv_class,
    *module_class, *sequential_class;

struct Reference {
  explicit Reference(PyObject* object) : object(object) {}
  ~Reference() { Py_XDECREF(object); }
  Reference(const Reference&) = delete;
  PyObject* object;
};

inline bool is_optional(PyObject* object) {
  return object == Py_None || THPVariable_CheckExact(object);
}
inline OptionalTensor optional(PyObject* object) {
  return object == Py_None ? std::nullopt : OptionalTensor(THPVariable_Unpack(object));
}

// Converts a Python int of 64 bits; nullopt for anything else, nullptr included.
inline std::optional<int64_t> number(PyObject* object) {
  if (object == nullptr || !PyLong_CheckExact(object)) return std::nullopt;
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0 ? std::optional(value) : std::nullopt;
}

// The tensors of a plain layer's call. It owns them, because another thread may give the layer
// others meanwhile, and so that torch.utils.swap_tensors sees that they are in use.
struct Ready {
  Tensor input, weight;
  OptionalTensor bias;
};

struct Plain {
  PyObject *weight, *bias, *groups;
};

std::optional<Plain> plain(PyObject* layer);

std::optional<Ready> ready(PyObject* layer, PyObject* input);

// Returns a plain layer that takes the output of a layer with this weight: `features`, or by
// default the weight's rows.
std::optional<Ready> ready_after(PyObject* layer, const Tensor& before, int64_t features = -1);

// Returns whether the operators take these tensors; torch's own function raises for the others.
bool fits(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, int64_t axis,
          int64_t features);

// transformers' Conv1D has its weight transposed; the operators take any strides.
OptionalTensor transposed(PyObject* layer, const Tensor& weight);

bool is_conv(PyObject* layer);

// Returns the modules of an nn.Sequential that iterates over them, borrowed; nullptr if Python must
// decide.
PyObject* modules_of(PyObject* sequential);

struct ConvGeometry {
  std::array<std::array<c10::SymInt, 2>, 3> pairs;  // stride, padding, dilation
  c10::SymInt groups;
};
// Returns nullopt if a parameter is not given as numbers.
std::optional<ConvGeometry> geometry_of(PyObject* layer);

// Returns the share of its input that a plain dropout or identity drops now; nullopt for others.
std::optional<double> dropped_share(PyObject* module);

bool is_module(PyObject* object);

// Returns whether it is a module, but no dropout or identity.
bool is_other_module(PyObject* object);

std::string_view text(PyObject* object);

// Returns the options of a layer that fuse_ has marked, borrowed; nullptr for anything else.
PyObject* mark_of(PyObject* layer);

// Returns "default" or "low"; "" without a mark, and for a layer that only runs alone. The string
// is static, because another thread may remove the mark meanwhile.
std::string_view memory_in(PyObject* mark);
std::string_view memory_of(PyObject* layer);

// Returns whether a layer with this mark runs as an operator where it is called alone.
bool has_alone(PyObject* mark);

// Returns whether the function returns its first argument's square in the same dtype.
bool squares(PyObject* function, PyObject* const* more, Py_ssize_t count);

// Returns the activation's name, a static string; "" if it is no activation of ours.
std::string_view kind_of(PyObject* function);

}  // namespace fused::python
