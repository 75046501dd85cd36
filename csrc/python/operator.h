// The operators as Python calls them.
#pragma once

#include "dispatch/signatures.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <utility>

namespace fused::python {

inline constexpr char linear[] = "fused::linear", linear_relu[] = "fused::linear_relu",
                      linear_gelu[] = "fused::linear_gelu", linear_silu[] = "fused::linear_silu",
                      linear_glu[] = "fused::linear_glu", gated_mlp[] = "fused::gated_mlp",
                      mlp[] = "fused::mlp", conv2d_relu[] = "fused::conv2d_relu";

// The operator `name`, without the GIL. The caller owns the tensors: another thread may exchange a
// layer's parameters meanwhile, and torch.utils.swap_tensors sees that they are in use.
template <const auto& name, typename Signature, typename... Args>
PyObject* run_operator(const Args&... args) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow(name, "").template typed<Signature>();
  Tensor result;
  {
    const pybind11::gil_scoped_release released;
    result = op.call(args...);
  }
  return THPVariable_Wrap(std::move(result));
}

}  // namespace fused::python
