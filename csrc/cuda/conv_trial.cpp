// ATen's call asks cuDNN for relu(convolution + 0 · z + bias), with its own result, not yet
// written, as z. It is right only if cuDNN does not read z, for 0 · NaN is NaN; and torch's ReLU
// passes NaN on, which cuDNN's need not do. Neither is documented, and it may depend on the kernel
// that cuDNN chooses, as its exactness does; so it is tried with data that would show it.

#include "cuda/conv_trial.h"

#include "cuda/conv.h"
#include "cuda/runtime/device.h"
#include "cuda/tune/conv_accuracy.h"
#include "plans/bounded_map.h"
#include "plans/registry.h"

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAEvent.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace fused::cuda {

using conv::format_of;
using plans::TrialErrors, plans::Verdict;

// ---- verdicts ----------------------------------------------------------------------------------

namespace {

auto& verdicts() {
  static auto* value = new plans::BoundedMap<ConvKey, Judgements, 1 << 14>;
  return *value;  // outlives every thread
}

// What `judge` says, or that it could not.
template <typename Fn>
Judgement attempt(const Fn& judge) {
  try {
    return judge();
  } catch (const c10::OutOfMemoryError&) {
    return {Verdict::failed, "(not cuDNN's fused form: no memory to try it)"};
  } catch (const c10::Error&) {
    return {Verdict::failed, "(not cuDNN's fused form: it fails)"};
  }
}

// ---- times -------------------------------------------------------------------------------------

// Microseconds a call, device and CPU as they go together; the best of some laps.
template <typename Fn>
double microseconds(const Fn& fn, double budget_ms) {
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

bool same(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() && at::allclose(a.to(at::kFloat), b.to(at::kFloat), 2e-2, 1e-2);
}

tune::Extents extents(const Tensor& tensor) {
  tune::Extents result{};
  std::ranges::copy(tensor.sizes(), result.sizes);
  std::ranges::copy(tensor.strides(), result.strides);
  return result;
}

}  // namespace

// ---- operands and errors -----------------------------------------------------------------------

struct ConvTrial::Data {
  static constexpr int64_t most_seeds = 64;

  explicit Data(const ConvProblem& p_)
      : p(p_),
        stream(at::cuda::getCurrentCUDAStream()),
        format(format_of(p.image, p.weight)),
        x(empty_like(p.image)),
        w(empty_like(p.weight)),
        b(at::empty({p.weight.size(0)}, p.weight.options())),
        bias(has_value(p.bias) ? OptionalTensor(b) : std::nullopt) {
    auto& shape = operands.shape;
    operands.type = *gemm_type(x.scalar_type());
    operands.image = x.const_data_ptr(), operands.weight = w.const_data_ptr();
    operands.bias = bias ? b.const_data_ptr() : nullptr;
    shape.image = extents(x), shape.weight = extents(w), shape.groups = p.groups;
    const auto sizes = conv::output_sizes(x, w, p.geometry);
    for (int d = 0; d < 4; ++d) shape.result.sizes[d] = sizes[d].guard_int(__FILE__, __LINE__);
    std::ranges::copy(p.stride, shape.stride);
    std::ranges::copy(p.padding, shape.padding);
    std::ranges::copy(p.dilation, shape.dilation);
    const int64_t samples = tune::samples_of(operands);
    seeds = std::clamp<int64_t>((tune::most_samples + samples - 1) / samples, 1, most_seeds);
    exact_known.resize(seeds);
    exact = doubles(seeds * samples * (sizeof(tune::Exact) / sizeof(double)));
  }

  // Whether cuDNN's call is torch's convolution, bias and ReLU at all; nullptr, or why not.
  const char* objection() {
    const auto nan = std::numeric_limits<double>::quiet_NaN();
    x.fill_(1), w.fill_(0.015625);  // sums that every dtype holds
    const auto want = at::convolution(x, w, {}, p.stride, p.padding, p.dilation, false,
                                      std::vector<int64_t>{0, 0}, p.groups);
    if (!same(p.fused(x, w, b.fill_(0)), want) ||
        !same(p.fused(x, w, b.fill_(-1e4)), at::zeros_like(want))) {
      return "(not cuDNN's fused form: wrong result)";
    }
    const auto unwritten = empty_like(want).fill_(nan);
    if (!same(at::cudnn_convolution_add_relu(x, w, unwritten, 0, b.fill_(0), p.stride, p.padding,
                                             p.dilation, p.groups),
              want)) {
      return "(not cuDNN's fused form: it reads memory that nobody wrote)";
    }
    if (!p.fused(x, w, b.fill_(nan)).isnan().all().item().toBool()) {
      return "(not cuDNN's fused form: it loses NaN)";
    }
    return nullptr;
  }

  Tensor run(ConvWay way) const {
    switch (way) {
      case ConvWay::cudnn:
        return p.fused(x, w, bias);
      case ConvWay::own:
        return own_forward(x, w, bias, p.geometry);
      case ConvWay::aten:
        break;
    }
    return aten_forward(x, w, bias, p.geometry);
  }

  // Against eager's way under the same settings.
  Judgement judge(ConvWay way, const char* name) {
    if (!reference) reference = errors_of(ConvWay::aten);
    const auto errors = errors_of(way);
    // In fp64 the exact results are no more exact than those that they judge.
    const bool f64 = operands.type == gemm::Type::f64;
    if (plans::is_as_exact(errors, *reference, f64 ? 1 : 1e-6)) return {Verdict::sound, nullptr};
    if (plans::verbosity() > 1) {
      plans::log(std::string("  refused ") + name + ": " + plans::summary(errors, *reference));
    }
    return {Verdict::inexact, "(not cuDNN's fused form: less exact than eager)"};
  }

  void fill(int64_t seed) {
    const auto begin = (static_cast<uint64_t>(seed) + 1) << 40;
    const auto filled = [&](const Tensor& tensor, double amplitude, uint64_t part) {
      tune::fill(operands.type, tensor.data_ptr(), tensor.numel(), amplitude, /*positive=*/false,
                 begin + (part << 36), stream);
    };
    filled(x, 1, 0);
    // Sums of a spread of about 1.
    filled(w, 3 / std::sqrt(static_cast<double>(tune::terms_of(operands.shape))), 1);
    filled(b, 1, 2);
  }

 private:
  Tensor empty_like(const Tensor& tensor) const {
    return at::empty(tensor.sizes(), tensor.options().memory_format(format));
  }
  Tensor doubles(int64_t count) const { return at::empty({count}, x.options().dtype(at::kDouble)); }

  // Pooled over the seeds.
  TrialErrors errors_of(ConvWay way) {
    const auto pool = doubles((sizeof(TrialErrors) + 7) / sizeof(double)).zero_();
    auto* errors = static_cast<TrialErrors*>(pool.data_ptr());
    for (int64_t seed = 0; seed < seeds; ++seed) {
      fill(seed);
      const auto* values = exact_of(seed);
      const auto result = run(way);
      auto data = operands;
      const auto sizes = at::IntArrayRef(operands.shape.result.sizes, 4);
      TORCH_CHECK(result.sizes() == sizes && result.scalar_type() == x.scalar_type());
      data.shape.result = extents(result), data.result = result.const_data_ptr();
      tune::add_errors(data, values, errors, stream);
    }
    TrialErrors found;
    C10_CUDA_CHECK(cudaMemcpyAsync(&found, errors, sizeof(found), cudaMemcpyDeviceToHost, stream));
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    return found;
  }

  // Computed once, from operands that are there.
  const tune::Exact* exact_of(int64_t seed) {
    auto* values =
        static_cast<tune::Exact*>(exact.data_ptr()) + seed * int64_t{tune::samples_of(operands)};
    if (!exact_known[seed]) tune::exact_values(operands, values, stream);
    exact_known[seed] = true;
    return values;
  }

  const ConvProblem& p;
  c10::cuda::CUDAStream stream;
  at::MemoryFormat format;
  Tensor x, w, b;
  OptionalTensor bias;
  tune::ConvData operands;
  int64_t seeds = 1;  // of operands, so that enough elements are seen
  Tensor exact;
  std::vector<bool> exact_known;
  std::optional<TrialErrors> reference;
};

// ---- the trial ---------------------------------------------------------------------------------

ConvTrial::ConvTrial(const ConvProblem& problem) : problem_(problem) {}
ConvTrial::~ConvTrial() = default;

ConvTrial::Data& ConvTrial::data() {
  if (!data_) data_ = std::make_unique<Data>(problem_);
  return *data_;
}

Judgements ConvTrial::judge(const char* objection) {
  const auto key = problem_.key();
  auto judged = verdicts().find(key).value_or(Judgements{});
  if (objection != nullptr) judged.cudnn = {Verdict::inexact, objection};
  if (!has_value(problem_.bias)) judged.own = {Verdict::inexact};  // it is ATen's
  if (judged.cudnn.verdict == Verdict::failed) {
    judged.cudnn = attempt([&]() -> Judgement {
      if (const char* wrong = data().objection()) return {Verdict::inexact, wrong};
      return data().judge(ConvWay::cudnn, "cuDNN's fused convolution");
    });
  }
  if (judged.own.verdict == Verdict::failed) {
    judged.own = attempt([&] { return data().judge(ConvWay::own, "our bias and ReLU kernel"); });
  }
  verdicts().put(key, judged);
  return judged;
}

ConvTimes ConvTrial::time(const Judgements& judged, double budget_ms) {
  auto& d = data();
  d.fill(0);
  const auto timed = [&](ConvWay way, bool wanted) {
    if (!wanted) return std::numeric_limits<double>::infinity();
    return microseconds([&] { d.run(way); }, budget_ms / 3);
  };
  return {timed(ConvWay::cudnn, judged.cudnn.is_sound()),
          timed(ConvWay::own, judged.own.is_sound()), timed(ConvWay::aten, true)};
}

}  // namespace fused::cuda
