#pragma once

// A pass's matrices as what ATen's functions work on. The tensors own nothing.

#include "cuda/runtime/device.h"
#include "cuda/runtime/gemm_call.h"

#include <ATen/ops/from_blob.h>

namespace fused::cuda {

// The device is given, or it would be asked for.
inline Tensor as_tensor(const PassCall& call, void* data, at::IntArrayRef sizes,
                        at::IntArrayRef strides, std::optional<gemm::Type> type = {}) {
  const auto& matmul = call.problem.matmul;
  const at::Device device(at::kCUDA, static_cast<c10::DeviceIndex>(matmul.device));
  return at::for_blob(data, sizes)
      .strides(strides)
      .target_device(device)
      .options(at::TensorOptions().dtype(scalar_type(type.value_or(matmul.type))).device(device))
      .make_tensor();
}

inline Tensor as_tensor(const Matrix& m, const PassCall& call,
                        std::optional<gemm::Type> type = {}) {
  return as_tensor(call, m.data, {m.rows, m.cols},
                   {m.transposed ? 1 : m.ld, m.transposed ? m.ld : 1}, type);
}

}  // namespace fused::cuda
