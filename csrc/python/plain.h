// What is plain: a marked layer that only applies its parameters, an activation of ours, tensors
// that fit. torch_fused_linear/fuse/plain.py decides the same in Python; tests hold both to one
// table.
#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include <ATen/core/Tensor.h>

#include <array>
#include <optional>
#include <string_view>

namespace fused::python {

using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

// Tables of plain.py, and classes of torch's: what know was given, kept for good.
inline PyObject *layers, *modules, *passed, *functions, *square_functions, *global_hooks,
    *untouched, *module_call, *module_call_impl, *linear_class, *conv_class;

// Owns an object, nullptr too.
struct Reference {
  explicit Reference(PyObject* object) : object(object) {}
  ~Reference() { Py_XDECREF(object); }
  Reference(const Reference&) = delete;
  PyObject* object;
};

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

std::optional<Plain> plain(PyObject* layer);

// Of a plain layer and an input that fits.
std::optional<Ready> ready(PyObject* layer, PyObject* input);

// What the operators take, so that torch's own function complains about the rest.
bool fits(const Tensor& input, const Tensor& weight, PyObject* bias, int64_t axis,
          int64_t features);

// transformers' Conv1D has its weight transposed; the operators take any strides.
OptionalTensor transposed(PyObject* layer, const Tensor& weight);

bool is_conv(PyObject* layer);

// A convolution's geometry; nullopt where it is not given by numbers alone.
struct ConvGeometry {
  std::array<std::array<c10::SymInt, 2>, 3> pairs;  // stride, padding, dilation
  c10::SymInt groups;
};
std::optional<ConvGeometry> geometry_of(PyObject* layer);

// Whether the module returns its argument: an identity, a dropout that does nothing now.
bool passes(PyObject* module);

// "" of what is no text.
std::string_view text(PyObject* object);

// Of a layer that fuse_ has marked, "" of anything else. Static, as another thread may take the
// mark away while an operator runs.
std::string_view memory_of(PyObject* layer);

// Whether the function returns its first argument's square in the same dtype.
bool squares(PyObject* function, PyObject* const* more, Py_ssize_t count);

// The name of the activation, "" for none of ours. Borrowed from static strings.
std::string_view kind_of(PyObject* function);

}  // namespace fused::python
