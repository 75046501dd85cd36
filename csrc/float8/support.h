#pragma once

// Says why a call cannot be multiplied in FP8.

#include <ATen/core/Tensor.h>

#include <optional>
#include <string>

namespace fused::float8 {

// Set by csrc/cuda/float8 when the library is loaded: why this GPU has no FP8 products, or nullptr.
using GpuObjection = const char* (*)(c10::Device device);
void set_gpu_objection(GpuObjection ask);

// Why these cannot be multiplied in FP8, or nothing. Sizes must be multiples of 16, as torch's own
// torch._scaled_mm demands on a GPU: features always, rows where a weight's gradient is wanted,
// which is summed over them.
std::optional<std::string> objection(const at::Tensor& input, at::TensorList weights,
                                     bool wants_weight_gradient);

}  // namespace fused::float8
