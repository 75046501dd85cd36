// Whether cuDNN's fused convolution may be used for a problem, found out once and remembered.
//
// ATen's call asks cuDNN for relu(convolution + 0 · z + bias), with its own result, not yet
// written, as z. It is right only if cuDNN does not read z, for 0 · NaN is NaN; and torch's ReLU
// passes NaN on, which cuDNN's need not do. Neither is documented, and it may depend on the kernel
// that cuDNN chooses; so it is tried with data that would show it, and timed.

#include "cuda_conv.h"

#include "cuda_device.h"
#include "plans.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <thread>

namespace fused::conv {
namespace {

// Why it is not used, as explain's row shows it, or nullptr.
using Verdict = const char*;

// Everything that may decide which kernel cuDNN chooses.
struct Problem {
  const Tensor &image, &weight;
  OptionalTensor bias;
  std::vector<int64_t> stride, padding, dilation;
  int64_t groups;

  Problem(const Tensor& image_, const Tensor& weight_, const OptionalTensor& bias_,
          const Geometry& g)
      : image(image_),
        weight(weight_),
        bias(bias_),
        stride(ints(g.stride)),
        padding(ints(g.padding)),
        dilation(ints(g.dilation)),
        groups(g.groups.guard_int(__FILE__, __LINE__)) {}

  std::vector<int64_t> key() const {
    const auto& context = at::globalContext();
    const bool benchmark = context.benchmarkCuDNN();
    // With benchmark torch has cuDNN's kernels compete in each thread anew.
    const auto thread = std::hash<std::thread::id>()(std::this_thread::get_id());
    std::vector<int64_t> key{image.get_device(),
                             static_cast<int64_t>(image.scalar_type()),
                             format_of(image, weight) == at::MemoryFormat::ChannelsLast,
                             has_value(bias),
                             allow_tf32(),
                             benchmark ? static_cast<int64_t>(thread) : 0,
                             plans::budget() > 0,
                             groups};
    for (const auto values : {image.sizes(), weight.sizes(), at::IntArrayRef(stride),
                              at::IntArrayRef(padding), at::IntArrayRef(dilation)}) {
      key.insert(key.end(), values.begin(), values.end());
    }
    return key;
  }

  Tensor fused(const Tensor& x, const Tensor& w, const OptionalTensor& b) const {
    return at::cudnn_convolution_relu(x, w, b, stride, padding, dilation, groups);
  }

 private:
  static std::vector<int64_t> ints(const Geometry::Pair& pair) {
    return {pair[0].guard_int(__FILE__, __LINE__), pair[1].guard_int(__FILE__, __LINE__)};
  }

  static bool allow_tf32() { return at::globalContext().allowTF32CuDNN(at::Float32Op::CONV); }
};

// ---- what can be told beforehand ---------------------------------------------------------------

// ATen's call has no deterministic form, and its sizes are 32 bits wide.
Verdict objection(const Problem& p) {
  const auto& context = at::globalContext();
  if (p.image.scalar_type() == at::kDouble) return "(not cuDNN's fused form: fp64)";
  if (!context.userEnabledCuDNN()) return "(not cuDNN's fused form: cuDNN is switched off)";
  if (context.deterministicCuDNN() || context.deterministicAlgorithms()) {
    return "(not cuDNN's fused form: it is not deterministic)";
  }
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  const int64_t pixels = p.image.size(0) * p.image.size(2) * p.image.size(3);
  // With a stride of 1 and much padding the output is larger than the image; to be safe, four
  // times.
  if (p.image.numel() > most || pixels > most / (4 * p.weight.size(0))) {
    return "(not cuDNN's fused form: too large)";
  }
  return nullptr;
}

// ---- the trial ---------------------------------------------------------------------------------

bool same(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() && at::allclose(a.to(at::kFloat), b.to(at::kFloat), 2e-2, 1e-2);
}

// Microseconds a call, device and CPU as they go together; the best of some laps.
template <typename Fn>
double time(const Fn& fn, double budget_ms) {
  at::cuda::CUDAEvent begin(cudaEventDefault), end(cudaEventDefault);
  const auto stream = at::cuda::getCurrentCUDAStream();
  const auto lap = [&](int repeats) {
    begin.record(stream);
    for (int i = 0; i < repeats; ++i) fn();
    end.record(stream);
    end.synchronize();
    return std::max<double>(begin.elapsed_time(end), 1e-3) * 1e3 / repeats;
  };
  fn();
  double best = lap(1);
  const int repeats = static_cast<int>(std::clamp(std::floor(budget_ms * 1e3 / 3 / best), 1., 10.));
  for (int i = 0; i < 3; ++i) best = std::min(best, lap(repeats));
  return best;
}

Verdict tried(const Problem& p) {
  const auto nan = std::numeric_limits<double>::quiet_NaN();
  const auto format = format_of(p.image, p.weight);
  const auto filled = [&](const Tensor& like, double value) {
    return at::full(like.sizes(), value, like.options()).contiguous(format);
  };
  // Sums that every dtype holds.
  const auto x = filled(p.image, 1), w = filled(p.weight, 0.015625);
  const auto zero = at::zeros({p.weight.size(0)}, p.weight.options());
  const auto want = at::convolution(x, w, {}, p.stride, p.padding, p.dilation, false,
                                    std::vector<int64_t>{0, 0}, p.groups);
  if (!same(p.fused(x, w, zero), want) ||
      !same(p.fused(x, w, at::full_like(zero, -1e4)), at::zeros_like(want))) {
    return "(not cuDNN's fused form: wrong result)";
  }
  const auto unwritten = filled(want, nan);
  if (!same(at::cudnn_convolution_add_relu(x, w, unwritten, 0, zero, p.stride, p.padding,
                                           p.dilation, p.groups),
            want)) {
    return "(not cuDNN's fused form: it reads memory that nobody wrote)";
  }
  if (!p.fused(x, w, at::full_like(zero, nan)).isnan().all().item().toBool()) {
    return "(not cuDNN's fused form: it loses NaN)";
  }
  const double budget = plans::budget();
  if (budget <= 0) return nullptr;
  const Geometry geometry(c10::fromIntArrayRefSlow(p.stride), c10::fromIntArrayRefSlow(p.padding),
                          c10::fromIntArrayRefSlow(p.dilation), p.groups);
  const auto bias = has_value(p.bias) ? OptionalTensor(zero) : std::nullopt;
  const double ours = time([&] { own_forward(x, w, bias, geometry); }, budget / 2);
  if (time([&] { p.fused(x, w, bias); }, budget / 2) > ours) {
    return "(not cuDNN's fused form: slower)";
  }
  return nullptr;
}

Verdict verdict_of(const Problem& p) {
  static auto* mutex = new std::mutex;
  static auto* known = new std::map<std::vector<int64_t>, Verdict>;
  const auto key = p.key();
  {
    const std::lock_guard lock(*mutex);
    const auto found = known->find(key);
    if (found != known->end()) return found->second;
  }
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
    return "(not cuDNN's fused form: not tried before the capture)";
  }
  Verdict verdict = "(not cuDNN's fused form: it fails)";
  try {
    const explain::Quiet quiet;
    const c10::cuda::CUDAStreamCaptureModeGuard others_may_capture(cudaStreamCaptureModeRelaxed);
    verdict = tried(p);
  } catch (const c10::OutOfMemoryError&) {
    return "(not cuDNN's fused form: no memory to try it)";  // this time
  } catch (const c10::Error&) {
  }
  const std::lock_guard lock(*mutex);
  return known->emplace(key, verdict).first->second;
}

bool aligned(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

}  // namespace

std::optional<Tensor> cudnn_forward(const Tensor& image, const Tensor& weight,
                                    const OptionalTensor& bias, const Geometry& geometry) {
  const Problem p(image, weight, bias, geometry);
  auto reason = objection(p);
  if (reason == nullptr) reason = verdict_of(p);
  if (reason == nullptr) {
    // What was tried was aligned: another alignment may be another kernel.
    const auto format = format_of(image, weight);
    const auto ready = [](Tensor tensor) { return aligned(tensor) ? tensor : tensor.clone(); };
    const auto x = ready(image.contiguous(format)), w = ready(weight.contiguous(format));
    const auto b = has_value(bias) ? OptionalTensor(ready(bias->contiguous())) : std::nullopt;
    try {
      auto output = p.fused(x, w, b).contiguous(format);
      explain::step("cuDNN convolution with bias and ReLU");
      return output;
    } catch (const c10::Error&) {
      reason = "(not cuDNN's fused form: it failed)";
    }
  }
  explain::step(reason);
  return std::nullopt;
}

}  // namespace fused::conv
