// The way to a convolution's result: the quickest of those that are as exact as eager's, cuDNN's
// fused call among them. Found out once and remembered.

#include "cuda/conv.h"

#include "core/explain.h"
#include "cuda/conv_trial.h"
#include "cuda/runtime/device.h"
#include "plans/registry.h"
#include "plans/remembered.h"

#include <ATen/Context.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <limits>
#include <mutex>

namespace fused::cuda {
namespace {

using conv::Geometry, conv::format_of;

// Also for a trial, which takes as much memory again.
bool is_too_large(const ConvProblem& p) {
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  const int64_t pixels = p.image.size(0) * p.image.size(2) * p.image.size(3);
  // With a stride of 1 and much padding the output is larger than the image; to be safe, four
  // times.
  return p.image.numel() > most || pixels > most / (4 * p.weight.size(0));
}

// To cuDNN's fused form, as can be told beforehand. ATen's call of it has no deterministic form,
// and its sizes are 32 bits wide.
const char* objection(const ConvProblem& p) {
  const auto& context = at::globalContext();
  if (p.image.scalar_type() == at::kDouble) return "(not cuDNN's fused form: fp64)";
  if (!context.userEnabledCuDNN()) return "(not cuDNN's fused form: cuDNN is switched off)";
  if (context.deterministicCuDNN() || context.deterministicAlgorithms()) {
    return "(not cuDNN's fused form: it is not deterministic)";
  }
  return is_too_large(p) ? "(not cuDNN's fused form: too large)" : nullptr;
}

struct Finding {
  Judgements judged;
  bool complete = false;  // whether what was to be timed has been
  ConvChoice choice;
};

Finding found_out(const ConvProblem& p, const char* objection,
                  const std::optional<Finding>& before) {
  const explain::Quiet quiet;
  const c10::cuda::CUDAStreamCaptureModeGuard others_may_capture(cudaStreamCaptureModeRelaxed);
  ConvTrial trial(p);
  Finding now;
  now.judged = trial.judge(objection);
  if (before && before->complete && before->judged == now.judged) return *before;
  // Where cuDNN's fused form is out of the question, nothing depends on times.
  const double budget = objection == nullptr ? plans::budget() : 0;
  std::optional<ConvTimes> times;
  try {
    const bool alternatives = now.judged.cudnn.is_sound() || now.judged.own.is_sound();
    if (alternatives && budget > 0) times = trial.time(now.judged, budget);
    now.complete = true;
  } catch (const c10::Error&) {  // too little memory now
  }
  now.choice = choose(now.judged, times);
  return now;
}

ConvChoice choice_for(const ConvProblem& p) {
  const char* known = objection(p);
  // Without bias our way is ATen's.
  if (known != nullptr && (!has_value(p.bias) || is_too_large(p))) return {ConvWay::aten, known};
  static auto* findings = new plans::Remembered<ConvKey, Finding>;  // outlives every thread
  const auto key = p.key();
  if (const auto found = findings->find(key); found && !found->due) return found->value.choice;
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
    if (const auto found = findings->find(key)) return found->value.choice;
    return {ConvWay::aten,
            known ? known : "(not cuDNN's fused form: not tried before the capture)"};
  }
  const std::lock_guard lock(measuring(p.image.get_device()));
  const auto found = findings->find(key);  // perhaps by another thread
  if (found && !found->due) return found->value.choice;
  const auto generation = plans::generation();
  const auto now = found_out(p, known, found ? std::optional(found->value) : std::nullopt);
  findings->add(key, now, now.complete && now.judged.are_final(), generation);
  return now.choice;
}

bool aligned(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 32 == 0;
}

}  // namespace

Tensor forward_in_best_way(const Tensor& image, const Tensor& weight, const OptionalTensor& bias,
                           const Geometry& geometry) {
  const ConvProblem p(image, weight, bias, geometry);
  auto [way, reason] = choice_for(p);
  if (way == ConvWay::cudnn) {
    // What was tried was aligned: another alignment, up to 32 bytes, may be another kernel.
    const auto format = format_of(image, weight);
    const auto ready = [](Tensor tensor) { return aligned(tensor) ? tensor : tensor.clone(); };
    const auto x = ready(image.contiguous(format)), w = ready(weight.contiguous(format));
    const auto b = has_value(bias) ? OptionalTensor(ready(bias->contiguous())) : std::nullopt;
    try {
      auto output = p.fused(x, w, b).contiguous(format);
      explain::append("cuDNN convolution with bias and ReLU");
      return output;
    } catch (const c10::Error&) {
      way = ConvWay::aten, reason = "(not cuDNN's fused form: it failed)";
    }
  }
  explain::append(reason);
  return way == ConvWay::own ? own_forward(image, weight, bias, geometry)
                             : aten_forward(image, weight, bias, geometry);
}

}  // namespace fused::cuda
