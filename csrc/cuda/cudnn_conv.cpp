// The way to a convolution's result: cuDNN's fused call, if it may be used for the problem, or what
// is quicker. Found out once and remembered.
//
// ATen's call asks cuDNN for relu(convolution + 0 · z + bias), with its own result, not yet
// written, as z. It is right only if cuDNN does not read z, for 0 · NaN is NaN; and torch's ReLU
// passes NaN on, which cuDNN's need not do. Neither is documented, and it may depend on the kernel
// that cuDNN chooses; so it is tried with data that would show it, and timed.

#include "cuda/conv.h"

#include "core/explain.h"
#include "cuda/runtime/device.h"
#include "plans/registry.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <mutex>
#include <string>
#include <thread>

namespace fused::cuda {
namespace {

using conv::Geometry, conv::format_of;

enum class Way { cudnn, own, aten };

struct Verdict {
  Way way;
  const char* objection;  // why it is not cuDNN's, as explain's row shows it; or nullptr
};

using Key = c10::SmallVector<int64_t, 32>;  // short enough for no allocation

// Everything that may decide which kernel cuDNN chooses.
struct Problem {
  const Tensor &image, &weight;
  const OptionalTensor& bias;
  std::array<int64_t, 2> stride, padding, dilation;
  int64_t groups;
  const Geometry& geometry;

  Problem(const Tensor& image_, const Tensor& weight_, const OptionalTensor& bias_,
          const Geometry& g)
      : image(image_),
        weight(weight_),
        bias(bias_),
        stride(ints(g.stride)),
        padding(ints(g.padding)),
        dilation(ints(g.dilation)),
        groups(g.groups.guard_int(__FILE__, __LINE__)),
        geometry(g) {}

  Key key() const {
    const auto& context = at::globalContext();
    const bool benchmark = context.benchmarkCuDNN();
    // With benchmark torch has cuDNN's kernels compete in each thread anew.
    const auto thread = std::hash<std::thread::id>()(std::this_thread::get_id());
    Key key{image.get_device(),
            static_cast<int64_t>(image.scalar_type()),
            format_of(image, weight) == at::MemoryFormat::ChannelsLast,
            has_value(bias),
            allow_tf32(),
            benchmark ? static_cast<int64_t>(thread) : 0,
            groups};
    for (const auto values : {image.sizes(), weight.sizes(), at::IntArrayRef(stride),
                              at::IntArrayRef(padding), at::IntArrayRef(dilation)}) {
      key.append(values.begin(), values.end());
    }
    return key;
  }

  Tensor fused(const Tensor& x, const Tensor& w, const OptionalTensor& b) const {
    return at::cudnn_convolution_relu(x, w, b, stride, padding, dilation, groups);
  }

 private:
  static std::array<int64_t, 2> ints(const Geometry::Pair& pair) {
    return {pair[0].guard_int(__FILE__, __LINE__), pair[1].guard_int(__FILE__, __LINE__)};
  }

  static bool allow_tf32() { return at::globalContext().allowTF32CuDNN(at::Float32Op::CONV); }
};

// ---- what can be told beforehand ---------------------------------------------------------------

// ATen's call has no deterministic form, and its sizes are 32 bits wide.
const char* objection(const Problem& p) {
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
  const auto round = [&](int repeats) {
    begin.record(stream);
    for (int i = 0; i < repeats; ++i) fn();
    end.record(stream);
    end.synchronize();
    return std::max<double>(begin.elapsed_time(end), 1e-3) * 1e3 / repeats;
  };
  fn();
  double best = round(1);
  const int repeats = static_cast<int>(std::clamp(std::floor(budget_ms * 1e3 / 3 / best), 1., 10.));
  for (int i = 0; i < 3; ++i) best = std::min(best, round(repeats));
  return best;
}

// Data that would show it if cuDNN's call were not torch's convolution, bias and ReLU.
struct Probe {
  explicit Probe(const Problem& p)
      : format(format_of(p.image, p.weight)),
        x(filled(p.image, 1)),
        w(filled(p.weight, 0.015625)),  // sums that every dtype holds
        zero(at::zeros({p.weight.size(0)}, p.weight.options())),
        want(at::convolution(x, w, {}, p.stride, p.padding, p.dilation, false,
                             std::vector<int64_t>{0, 0}, p.groups)) {}

  Tensor filled(const Tensor& like, double value) const {
    return at::full(like.sizes(), value, like.options()).contiguous(format);
  }

  at::MemoryFormat format;
  Tensor x, w, zero, want;
};

const char* tried(const Problem& p, const Probe& probe) {
  const auto nan = std::numeric_limits<double>::quiet_NaN();
  const auto& [format, x, w, zero, want] = probe;
  if (!same(p.fused(x, w, zero), want) ||
      !same(p.fused(x, w, at::full_like(zero, -1e4)), at::zeros_like(want))) {
    return "(not cuDNN's fused form: wrong result)";
  }
  const auto unwritten = probe.filled(want, nan);
  if (!same(at::cudnn_convolution_add_relu(x, w, unwritten, 0, zero, p.stride, p.padding,
                                           p.dilation, p.groups),
            want)) {
    return "(not cuDNN's fused form: it reads memory that nobody wrote)";
  }
  if (!p.fused(x, w, at::full_like(zero, nan)).isnan().all().item().toBool()) {
    return "(not cuDNN's fused form: it loses NaN)";
  }
  return nullptr;
}

Verdict timed(const Problem& p, const Probe& probe, const char* objection, double budget) {
  const auto& [format, x, w, zero, want] = probe;
  const auto bias = has_value(p.bias) ? OptionalTensor(zero) : std::nullopt;
  const double own = time([&] { own_forward(x, w, bias, p.geometry); }, budget / 3);
  const double aten = time([&] { aten_forward(x, w, bias, p.geometry); }, budget / 3);
  const Way other = aten < own ? Way::aten : Way::own;
  if (objection != nullptr) return {other, objection};
  if (time([&] { p.fused(x, w, bias); }, budget / 3) > std::min(own, aten)) {
    return {other, "(not cuDNN's fused form: slower)"};
  }
  return {Way::cudnn, nullptr};
}

Verdict found_out(const Problem& p) {
  const Probe probe(p);
  const char* objection = "(not cuDNN's fused form: it fails)";
  try {
    objection = tried(p, probe);
  } catch (const c10::OutOfMemoryError&) {
    throw;
  } catch (const c10::Error&) {
  }
  const double budget = plans::budget();
  if (budget > 0) return timed(p, probe, objection, budget);
  return {objection == nullptr ? Way::cudnn : Way::own, objection};
}

// What has been found out, until all plans are to be forgotten.
class Verdicts {
 public:
  std::optional<Verdict> find(const Key& key) {
    const std::lock_guard lock(mutex_);
    keep_up();
    const auto found = known_.find(key);
    if (found == known_.end()) return std::nullopt;
    auto& [verdict, calls_left] = found->second;
    const auto known = verdict;
    if (calls_left > 0 && --calls_left == 0) known_.erase(found);
    return known;
  }
  // For so many calls, 0: for good. Nothing is remembered where all was to be forgotten since
  // `generation`.
  void add(const Key& key, const Verdict& verdict, uint64_t generation, int calls = 0) {
    const std::lock_guard lock(mutex_);
    keep_up();
    if (generation != generation_) return;
    constexpr size_t most = 4096;
    if (known_.size() >= most) known_.clear();
    known_.insert_or_assign(key, std::pair(verdict, calls));
  }

 private:
  void keep_up() {
    if (generation_ != plans::generation()) known_.clear();
    generation_ = plans::generation();
  }

  std::mutex mutex_;
  uint64_t generation_ = 0;
  std::map<Key, std::pair<Verdict, int>> known_;
};

Verdict verdict_of(const Problem& p) {
  static auto* verdicts = new Verdicts;  // outlives every thread
  const auto key = p.key();
  if (const auto known = verdicts->find(key)) return *known;
  if (c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None) {
    return {Way::own, "(not cuDNN's fused form: not tried before the capture)"};
  }
  const auto generation = plans::generation();
  Verdict verdict{Way::own, "(not cuDNN's fused form: it fails)"};
  try {
    const explain::Quiet quiet;
    const c10::cuda::CUDAStreamCaptureModeGuard others_may_capture(cudaStreamCaptureModeRelaxed);
    verdict = found_out(p);
  } catch (const c10::OutOfMemoryError&) {
    constexpr int calls_until_next_try = 256;
    const Verdict for_now{Way::own, "(not cuDNN's fused form: no memory to try it)"};
    verdicts->add(key, for_now, generation, calls_until_next_try);
    return for_now;
  } catch (const c10::Error&) {
  }
  verdicts->add(key, verdict, generation);
  return verdict;
}

bool aligned(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 16 == 0;
}

}  // namespace

Tensor forward_in_best_way(const Tensor& image, const Tensor& weight, const OptionalTensor& bias,
                           const Geometry& geometry) {
  const Problem p(image, weight, bias, geometry);
  const auto known = objection(p);
  auto [way, reason] = known == nullptr ? verdict_of(p) : Verdict{Way::own, known};
  if (way == Way::cudnn) {
    // What was tried was aligned: another alignment may be another kernel.
    const auto format = format_of(image, weight);
    const auto ready = [](Tensor tensor) { return aligned(tensor) ? tensor : tensor.clone(); };
    const auto x = ready(image.contiguous(format)), w = ready(weight.contiguous(format));
    const auto b = has_value(bias) ? OptionalTensor(ready(bias->contiguous())) : std::nullopt;
    try {
      auto output = p.fused(x, w, b).contiguous(format);
      explain::append("cuDNN convolution with bias and ReLU");
      return output;
    } catch (const c10::Error&) {
      way = Way::own, reason = "(not cuDNN's fused form: it failed)";
    }
  }
  explain::append(reason);
  return way == Way::aten ? aten_forward(image, weight, bias, geometry)
                          : own_forward(image, weight, bias, geometry);
}

}  // namespace fused::cuda
