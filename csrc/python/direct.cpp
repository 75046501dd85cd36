// The operators for eager Python without the overloads and boxes of torch.ops, which take longer
// than a small layer.
//
// For subclasses of tensors, and if a mode wants to see the call, the result is None, and the
// caller goes through torch.ops. This is a library of its own, because the operators' library has
// no Python.

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/List.h>

#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "conv/operators.h"
#include "float8/operators.h"
#include "python/operator.h"
#include "python/plain.h"
#include "python/run.h"

namespace fused::python {
namespace {

template <typename T>
struct Argument;

template <>
struct Argument<Tensor> {
  static bool fits(PyObject* object) { return THPVariable_CheckExact(object); }
  // Owns the tensor, so that torch.utils.swap_tensors sees that it is in use without the GIL.
  static Tensor take(PyObject* object) { return THPVariable_Unpack(object); }
};

template <>
struct Argument<OptionalTensor> {
  static bool fits(PyObject* object) { return is_optional(object); }
  static OptionalTensor take(PyObject* object) { return optional(object); }
};

template <>
struct Argument<std::string_view> {
  static bool fits(PyObject* object) {
    return PyUnicode_CheckExact(object) && PyUnicode_IS_COMPACT_ASCII(object);
  }
  static std::string_view take(PyObject* object) {
    return {reinterpret_cast<const char*>(PyUnicode_1BYTE_DATA(object)),
            static_cast<size_t>(PyUnicode_GET_LENGTH(object))};
  }
};

template <>
struct Argument<c10::SymInt> {
  static bool fits(PyObject* object) { return number(object).has_value(); }
  static c10::SymInt take(PyObject* object) { return *number(object); }
};

template <typename T, typename List>
struct ListArgument {
  static bool fits(PyObject* object) {
    if (!PyList_CheckExact(object)) return false;
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(object); ++k) {
      if (!Argument<T>::fits(PyList_GET_ITEM(object, k))) return false;
    }
    return true;
  }
  static List take(PyObject* object) {
    List list;
    list.reserve(PyList_GET_SIZE(object));
    for (Py_ssize_t k = 0; k < PyList_GET_SIZE(object); ++k) {
      list.push_back(Argument<T>::take(PyList_GET_ITEM(object, k)));
    }
    return list;
  }
};

template <>
struct Argument<at::TensorList> : ListArgument<Tensor, std::vector<Tensor>> {};
template <>
struct Argument<c10::List<OptionalTensor>>
    : ListArgument<OptionalTensor, c10::List<OptionalTensor>> {};
template <>
struct Argument<c10::SymIntArrayRef> : ListArgument<c10::SymInt, std::vector<c10::SymInt>> {};

// An operator for Python, with all arguments by position.
template <typename Op, typename Signature = typename Op::Signature>
struct Function;

template <typename Op, typename... Args>
struct Function<Op, Tensor(Args...)> {
  static PyObject* call(PyObject*, PyObject* const* given, Py_ssize_t count) {
    HANDLE_TH_ERRORS
    return run(given, count, std::index_sequence_for<Args...>());
    END_HANDLE_TH_ERRORS
  }

 private:
  template <size_t... k>
  static PyObject* run(PyObject* const* given, Py_ssize_t count, std::index_sequence<k...>) {
    const bool plain = count == sizeof...(Args) && !at::impl::torch_function_mode_enabled() &&
                       (Argument<std::decay_t<Args>>::fits(given[k]) && ...);
    if (!plain) Py_RETURN_NONE;
    std::tuple<decltype(Argument<std::decay_t<Args>>::take(given[k]))...> arguments{
        Argument<std::decay_t<Args>>::take(given[k])...};
    return run_operator<Op>(std::get<k>(arguments)...);
  }
};

template <typename Op>
PyMethodDef method() {
  return {Op::name, as_method(&Function<Op>::call), METH_FASTCALL, nullptr};
}

template <typename... Ops>
auto methods_of(const std::tuple<Ops...>*) {
  return std::array{method<Ops>()..., PyMethodDef{}};
}

using Operators = decltype(std::tuple_cat(dispatch::Public(), conv::Public(), float8::Public()));
auto methods = methods_of(static_cast<Operators*>(nullptr));

PyModuleDef module{PyModuleDef_HEAD_INIT, "_direct", nullptr, 0, methods.data(), {}, {}, {}, {}};

}  // namespace
}  // namespace fused::python

PyMODINIT_FUNC PyInit__direct() {
  PyObject* created = PyModule_Create(&fused::python::module);
  if (created != nullptr && PyModule_AddFunctions(created, fused::python::run_methods) != 0) {
    Py_CLEAR(created);
  }
  return created;
}
