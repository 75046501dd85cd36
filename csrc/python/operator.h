#pragma once

#include "dispatch/operators.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>

namespace fused::python {

template <typename F>
PyCFunction as_method(F* function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

// Runs an operator without the GIL. The caller must own the tensors, because another thread may
// replace a layer's parameters meanwhile.
template <typename Op, typename... Args>
PyObject* run_operator(const Args&... args) {
  Tensor result;
  {
    const pybind11::gil_scoped_release released;
    result = Op::call(args...);
  }
  return THPVariable_Wrap(std::move(result));
}

}  // namespace fused::python
