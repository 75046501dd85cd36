#include "float8/support.h"

#include <c10/util/StringUtil.h>

#include <atomic>

namespace fused::float8 {
namespace {

constexpr int64_t multiple = 16;

std::atomic<GpuObjection> ask_gpu{nullptr};

std::optional<std::string> device_objection(c10::Device device) {
  if (device.is_cpu() || device.is_meta()) return std::nullopt;
  if (!device.is_cuda()) return c10::str("no FP8 on ", device.type());
  const auto ask = ask_gpu.load();
  const char* why = ask == nullptr ? "this build has no FP8 kernels for GPUs" : ask(device);
  return why == nullptr ? std::nullopt : std::optional(c10::str("no FP8: ", why));
}

std::string no_multiple(const c10::SymInt& size, const char* what) {
  return c10::str("no FP8: ", size, " ", what, ", which is no multiple of ", multiple);
}

}  // namespace

void set_gpu_objection(GpuObjection ask) { ask_gpu = ask; }

std::optional<std::string> objection(const at::Tensor& input, at::TensorList weights,
                                     bool wants_weight_gradient) {
  if (auto why = device_objection(input.device())) return why;
  for (const auto& weight : weights) {
    for (const auto& size : weight.sym_sizes()) {
      if (size % multiple != 0) return no_multiple(size, "features");
      if (size == 0) return "no FP8: an empty weight";
    }
  }
  c10::SymInt rows = 1;
  for (int64_t d = 0; d + 1 < input.dim(); ++d) rows *= input.sym_size(d);
  if (rows == 0) return "no FP8: an empty input";
  if (wants_weight_gradient && rows % multiple != 0) return no_multiple(rows, "rows");
  return std::nullopt;
}

}  // namespace fused::float8
