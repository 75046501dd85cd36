// Decides what is plain: a marked layer that only applies its parameters, an activation of ours,
// tensors that fit. torch_fused_linear/fuse/plain.py defines it.
#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string_view>

namespace fused::python {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Tables of plain.py, and classes of torch's, which know was given, are kept for good.
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

// Takes an int itself of 64 bits; nullopt of anything else, nullptr too.
inline std::optional<int64_t> number(PyObject* object) {
  if (object == nullptr || !PyLong_CheckExact(object)) return std::nullopt;
  int overflow = 0;
  const int64_t value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0 ? std::optional(value) : std::nullopt;
}

// A plain layer's call owns its tensors, as another thread may give the layer others meanwhile, and
// torch.utils.swap_tensors sees that they are in use.
struct Ready {
  Tensor input, weight;
  OptionalTensor bias;
};

struct Plain {
  PyObject *weight, *bias, *groups;
};

std::optional<Plain> plain(PyObject* layer);

std::optional<Ready> ready(PyObject* layer, PyObject* input);

// A plain layer, without an input, that takes what a layer of this weight gives: so many features,
// or as many as the weight has rows.
std::optional<Ready> ready_after(PyObject* layer, const Tensor& before, int64_t features = -1);

// Tells what the operators take; torch's own function complains about the rest.
bool fits(const Tensor& input, const Tensor& weight, const OptionalTensor& bias, int64_t axis,
          int64_t features);

// transformers' Conv1D has its weight transposed; the operators take any strides.
OptionalTensor transposed(PyObject* layer, const Tensor& weight);

bool is_conv(PyObject* layer);

// The modules in an nn.Sequential that iterates over them, borrowed; nullptr where Python looks.
PyObject* modules_of(PyObject* sequential);

struct ConvGeometry {
  std::array<std::array<c10::SymInt, 2>, 3> pairs;  // stride, padding, dilation
  c10::SymInt groups;
};
// nullopt where it is not given by numbers alone.
std::optional<ConvGeometry> geometry_of(PyObject* layer);

// The share of its input that a plain dropout or identity drops now; nullopt of anything else.
std::optional<double> dropped_share(PyObject* module);

bool is_module(PyObject* object);

// Tells of a module that is of no class of dropouts and identities.
bool is_other_module(PyObject* object);

std::string_view text(PyObject* object);

// The options of a layer that fuse_ has marked, borrowed; nullptr of anything else.
PyObject* mark_of(PyObject* layer);

// "" of no mark, and of a layer that only runs alone. Static, as another thread may take the mark
// away meanwhile.
std::string_view memory_in(PyObject* mark);
std::string_view memory_of(PyObject* layer);

// Tells whether a layer of this mark runs as an operator where it is called alone.
bool has_alone(PyObject* mark);

// Tells of a function that returns its first argument's square in the same dtype.
bool squares(PyObject* function, PyObject* const* more, Py_ssize_t count);

// "" of no activation of ours. Borrowed from static strings.
std::string_view kind_of(PyObject* function);

}  // namespace fused::python
