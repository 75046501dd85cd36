// fused::conv2d_relu on a GPU: cuDNN convolves, our kernels do bias, ReLU and its backward in one
// pass.
//
// The forward takes the quickest way that is as exact as eager's, cuDNN's fused call among them.
// ATen gives that call its unwritten result as z of relu(convolution + 0 · z + bias), where 0 · NaN
// would be NaN, and cuDNN's ReLU may lose NaN. Neither is documented, so that both are tried.

#include "conv/cuda/problem.h"
#include "conv/cuda/relu.h"
#include "conv/kernels.h"
#include "core/explain.h"
#include "cuda/kernels/activation.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/execute.h"
#include "cuda/tune/accuracy.h"
#include "cuda/tune/stopwatch.h"
#include "plans/registry.h"

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/hash.h>

#include <cmath>
#include <limits>
#include <mutex>
#include <string>

namespace fused::conv::cuda {
namespace {

namespace tune = fused::cuda::tune;
using at::MemoryFormat;
using fused::cuda::device_of, fused::cuda::gemm_type, fused::cuda::is_capturing;
using plans::TrialErrors, plans::Verdict;

// ---- the ways ----------------------------------------------------------------------------------

Image image_of(const Tensor& tensor) {
  return {gemm_type(tensor.scalar_type()), tensor.size(0), tensor.size(1),
          tensor.size(2) * tensor.size(3)};
}

Tensor aten_convolution(const Tensor& image, const Tensor& weight, const OptionalTensor& bias,
                        const Geometry& g) {
  explain::append("ATen convolution");
  return convolution(image, weight, bias, g).contiguous(format_of(image, weight));
}

// Some of ATen's convolutions add the bias on their way.
Tensor aten_forward(const Tensor& image, const Tensor& weight, const OptionalTensor& bias,
                    const Geometry& geometry) {
  const auto output = aten_convolution(image, weight, bias, geometry);
  explain::append("ATen ReLU in place");
  return output.relu_();
}

Tensor own_forward(const Tensor& image, const Tensor& weight, const OptionalTensor& bias,
                   const Geometry& geometry) {
  if (!has_value(bias)) return aten_forward(image, weight, bias, geometry);
  const auto output = aten_convolution(image, weight, {}, geometry);
  explain::append("own bias and ReLU kernel");
  const bool last = format_of(image, weight) == MemoryFormat::ChannelsLast;
  const auto added = bias->contiguous();
  bias_relu(image_of(output), last, added.const_data_ptr(), output.data_ptr(),
            at::cuda::getCurrentCUDAStream());
  return output;
}

// In the order in which they are taken untimed; ATen's is eager's.
enum Way : size_t { cudnn, own, aten, all_ways };

struct Choice {
  Way way = aten;
  const char* reason = nullptr;  // why it is not cuDNN's fused form
  uint64_t generation = 0;       // of plans
};

// ---- what is known -----------------------------------------------------------------------------
struct KeyHash {
  size_t operator()(const ConvKey& key) const {
    size_t hash = 0;
    for (const int64_t number : key) hash = c10::hash_combine(hash, static_cast<size_t>(number));
    return hash;
  }
};

// A verdict is why the way is never taken, or nullptr.
using KnownConv = plans::Known<Choice, Way, const char*>;

auto& convolutions() {
  static auto* value = new plans::Store<ConvKey, KnownConv, KeyHash>(8192);
  return *value;  // outlives every thread
}

// Returns the choice, unless it is to be made anew.
std::optional<Choice> chosen(const ConvKey& key, bool even_if_due) {
  return convolutions().read(key, [=](const KnownConv& known) {
    const bool holds = known.decision && known.decision->generation == plans::generation();
    return holds && (even_if_due || !known.is_due()) ? known.decision : std::nullopt;
  });
}

constexpr const char* no_memory = "(not cuDNN's fused form: no memory to try it)";

// Tells what cuDNN's 32-bit sizes hold, also in a trial, which takes as much memory again. A stride
// of 1 and much padding make the output larger than the image: four times, to be safe.
bool is_too_large(const ConvProblem& p) {
  constexpr int64_t most = std::numeric_limits<int32_t>::max();
  const int64_t pixels = p.image.size(0) * p.image.size(2) * p.image.size(3);
  return p.image.numel() > most || pixels > most / (4 * p.weight.size(0));
}

// Says why cuDNN's fused form is not taken, as far as can be told beforehand.
const char* objection(const ConvProblem& p) {
  const auto& context = at::globalContext();
  if (p.image.scalar_type() == at::kDouble) return "(not cuDNN's fused form: fp64)";
  if (!context.userEnabledCuDNN()) return "(not cuDNN's fused form: cuDNN is switched off)";
  if (context.deterministicCuDNN() || context.deterministicAlgorithms()) {
    return "(not cuDNN's fused form: it is not deterministic)";
  }
  return is_too_large(p) ? "(not cuDNN's fused form: too large)" : nullptr;
}

Tensor fused_form(const ConvProblem& p, const Tensor& x, const Tensor& w, const OptionalTensor& b) {
  return at::cudnn_convolution_relu(x, w, b, p.stride, p.padding, p.dilation, p.groups);
}

// ---- the trial ---------------------------------------------------------------------------------

// Tries one problem, in one thread. The random state stays as it was.
class Trial {
 public:
  Trial(const ConvProblem& problem, const ConvKey& key, const char* objection)
      : p_(problem), key_(key), eligible_{objection == nullptr, has_value(p_.bias), true} {
    reason_ = objection;
    const auto empty = [&](const Tensor& like) {
      const auto format = format_of(p_.image, p_.weight);
      return at::empty(like.sizes(), like.options().memory_format(format));
    };
    x_ = empty(p_.image), w_ = empty(p_.weight);
    b_ = at::empty({w_.size(0)}, w_.options());
    if (has_value(p_.bias)) bias_ = b_;
  }

  Choice choose() {
    const auto way = eligible_[cudnn] && plans::budget() > 0 ? quickest() : first_sound();
    const bool is_slower = way != cudnn && reason_ == nullptr;
    return {way, is_slower ? "(not cuDNN's fused form: slower)" : reason_};
  }

  // False where something failed, as for want of memory: another trial may end otherwise.
  bool is_final() const { return is_final_; }

 private:
  // Where cuDNN's fused form is out of the question, nothing depends on times.
  Way first_sound() {
    for (const auto way : {cudnn, own}) {
      if (eligible_[way] && judge(way) == Verdict::sound) return way;
    }
    return aten;
  }

  Way quickest() {
    const auto clock = tune::start_clock();
    tune::Stopwatch stopwatch(all_ways, [this](size_t way) {
      return succeeds(static_cast<Way>(way), [&] { run(static_cast<Way>(way)); });
    });
    fill(0);
    plans::Candidates field{eligible_, cudnn, aten};
    for (size_t way = 0; way < all_ways; ++way) {
      field.eligible[way] = eligible_[way] && stopwatch.once(way);
    }
    const auto choice = tune::fastest(field, stopwatch, clock, plans::budget() * 1e3, /*calls=*/24,
                                      [this](size_t way) { return judge(static_cast<Way>(way)); });
    return choice ? static_cast<Way>(choice->winner) : aten;
  }

  // Remembers the verdict for the process, but for a failure.
  Verdict judge(Way way) {
    auto found = convolutions().read(key_, [way](const KnownConv& known) {
      const auto it = known.verdicts.find(way);
      return it == known.verdicts.end() ? std::nullopt : std::optional(it->second);
    });
    if (!found) {
      if (!succeeds(way, [&] { found = wrong_with(way); })) return Verdict::failed;
      convolutions().change(key_, [&](KnownConv& known) { known.verdicts[way] = *found; });
    }
    if (way == cudnn) reason_ = *found;
    return *found == nullptr ? Verdict::sound : Verdict::inexact;
  }

  template <typename Fn>
  bool succeeds(Way way, const Fn& fn) {
    try {
      fn();
      return true;
    } catch (const c10::OutOfMemoryError&) {
      if (way == cudnn) reason_ = no_memory;
    } catch (const c10::Error&) {
      if (way == cudnn) reason_ = "(not cuDNN's fused form: it fails)";
    }
    return is_final_ = false;
  }

  // nullptr: nothing.
  const char* wrong_with(Way way) {
    if (way == cudnn) {
      if (const char* wrong = wrong_with_fused_form()) return wrong;
    }
    if (!reference_) reference_ = errors_of(aten);
    const auto errors = errors_of(way);
    // In fp64 the exact results are no more exact than those that they judge.
    if (plans::is_as_exact(errors, *reference_, type_ == gemm::Type::f64 ? 1 : 1e-6)) {
      return nullptr;
    }
    if (plans::verbosity() > 1) {
      constexpr const char* names[] = {"cuDNN's fused convolution", "our bias and ReLU kernel"};
      plans::log(std::string("  refused ") + names[way] + ": " +
                 plans::summary(errors, *reference_));
    }
    return "(not cuDNN's fused form: less exact than eager)";
  }

  const char* wrong_with_fused_form() {
    const auto nan = std::numeric_limits<double>::quiet_NaN();
    fill(0);
    const auto unwritten = at::full_like(fused_form(p_, x_, w_, b_), nan);
    const auto result = at::cudnn_convolution_add_relu(x_, w_, unwritten, 0, b_, p_.stride,
                                                       p_.padding, p_.dilation, p_.groups);
    if (result.isnan().any().item().toBool()) {
      return "(not cuDNN's fused form: it reads memory that nobody wrote)";
    }
    const bool passes_nan = fused_form(p_, x_, w_, b_.fill_(nan)).isnan().all().item().toBool();
    return passes_nan ? nullptr : "(not cuDNN's fused form: it loses NaN)";
  }

  Tensor run(Way way) const {
    if (way == cudnn) return fused_form(p_, x_, w_, bias_);
    return way == own ? own_forward(x_, w_, bias_, p_.geometry)
                      : aten_forward(x_, w_, bias_, p_.geometry);
  }

  // Takes as many seeds as show enough elements.
  TrialErrors errors_of(Way way) {
    constexpr size_t most_seeds = 64;
    TrialErrors errors;
    for (size_t seed = 0; seed < most_seeds && errors.elements.count < tune::most_samples; ++seed) {
      fill(seed);
      if (seed == exact_.size()) {
        exact_.emplace_back(p_, x_, w_, bias_, tune::Roundoff(type_).of_type);
      }
      exact_[seed].add_errors(errors, run(way));
    }
    return errors;
  }

  void fill(uint64_t seed) {
    const auto stream = at::cuda::getCurrentCUDAStream();
    const auto filled = [&](const Tensor& tensor, double amplitude, uint64_t part) {
      tune::fill(type_, tensor.data_ptr(), tensor.numel(), amplitude, /*positive=*/false,
                 ((seed + 1) << 40) + (part << 36), stream);
    };
    filled(x_, 1, 0);
    // The sums spread by about 1.
    const auto terms = static_cast<double>(w_.numel() / w_.size(0));
    filled(w_, 3 / std::sqrt(terms), 1);
    filled(b_, 1, 2);
  }

  const ConvProblem& p_;
  const ConvKey& key_;
  const std::vector<bool> eligible_;
  const char* reason_ = nullptr;  // why it is not cuDNN's fused form
  bool is_final_ = true;
  const gemm::Type type_ = gemm_type(p_.image.scalar_type());
  Tensor x_, w_, b_;
  OptionalTensor bias_;
  std::vector<ExactConv> exact_;
  std::optional<TrialErrors> reference_;
};

// ---- the choice --------------------------------------------------------------------------------

Choice find_out(const ConvProblem& p, const ConvKey& key, const char* objection) {
  const explain::Quiet quiet;
  const c10::cuda::CUDAStreamCaptureModeGuard others_may_capture(cudaStreamCaptureModeRelaxed);
  const auto generation = plans::generation();
  Choice choice{aten, no_memory};
  bool is_final = false;
  try {
    Trial trial(p, key, objection);
    choice = trial.choose();
    is_final = trial.is_final();
  } catch (const c10::OutOfMemoryError&) {
  }
  choice.generation = generation;
  convolutions().change(key, [&](KnownConv& known) {
    if (is_final) return known.decide(choice);
    known.decide_later(choice);
  });
  return choice;
}

Choice choice_for(const ConvProblem& p) {
  const char* known = objection(p);
  // Without bias our way is ATen's.
  if (known != nullptr && (!has_value(p.bias) || is_too_large(p))) return {aten, known};
  const auto key = p.key();
  if (const auto found = chosen(key, /*even_if_due=*/false)) return *found;
  const auto or_eager = [known](const char* reason) {
    return Choice{aten, known ? known : reason};
  };
  if (is_capturing()) {
    return chosen(key, /*even_if_due=*/true)
        .value_or(or_eager("(not cuDNN's fused form: not tried before the capture)"));
  }
  const std::lock_guard lock(device_of(p.image.get_device()).measuring);
  if (const auto found = chosen(key, /*even_if_due=*/false)) return *found;  // by another thread
  if (convolutions().is_full_for(key)) {
    return or_eager("(not cuDNN's fused form: too many sizes were tried)");
  }
  return find_out(p, key, known);
}

bool aligned(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % 32 == 0;
}

// Explain's row says why it is not cuDNN's fused call.
Tensor forward_in_best_way(const Tensor& image, const Tensor& weight, const OptionalTensor& bias,
                           const Geometry& geometry) {
  const ConvProblem p(image, weight, bias, geometry);
  auto [way, reason, generation] = choice_for(p);
  if (way == cudnn) {
    // The trial's operands were aligned: with less than 32 bytes cuDNN may take another kernel.
    const auto format = format_of(image, weight);
    const auto ready = [](Tensor tensor) { return aligned(tensor) ? tensor : tensor.clone(); };
    const auto x = ready(image.contiguous(format)), w = ready(weight.contiguous(format));
    const auto b = has_value(bias) ? OptionalTensor(ready(bias->contiguous())) : std::nullopt;
    try {
      auto output = fused_form(p, x, w, b).contiguous(format);
      explain::append("cuDNN convolution with bias and ReLU");
      return output;
    } catch (const c10::Error&) {
      way = aten, reason = "(not cuDNN's fused form: it failed)";
    }
  }
  explain::append(reason);
  return way == own ? own_forward(image, weight, bias, geometry)
                    : aten_forward(image, weight, bias, geometry);
}

// ---- what the dispatcher calls -----------------------------------------------------------------

struct Gpu {
  static constexpr bool obeys_policy = true;
  static bool is_usable(const Tensor& like) { return device_of(like.get_device()).has_code; }

  static Tensor forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        const Geometry& geometry) {
    const c10::cuda::CUDAGuard guard(input.device());
    const auto image = batched(input);
    if (image.numel() == 0) {
      return like(input,
                  empty(output_sizes(image, weight, geometry), image, format_of(image, weight)));
    }
    return like(input, forward_in_best_way(image, weight, bias, geometry));
  }

  static Pair relu_backward(const Tensor& grad_output, const Tensor& output, bool bias_grad) {
    const c10::cuda::CUDAGuard guard(grad_output.device());
    const auto format = format_of(output);
    const auto grad = grad_output.contiguous(format), saved = output.contiguous(format);
    const auto image = image_of(saved);
    auto dz = fused::cuda::empty(saved.sizes(), grad, {}, format);
    auto grad_bias = fused::cuda::empty({bias_grad ? image.channels : 0}, grad);
    if (dz.numel() == 0) return {dz, grad_bias.zero_()};
    auto* sums = bias_grad ? grad_bias.data_ptr() : nullptr;
    if (format == MemoryFormat::ChannelsLast) {
      fused::cuda::one_pass(rows(grad, image), rows(saved, image), /*mask=*/false, Activation::relu,
                            image.type, dz.data_ptr(), {sums});
      return {dz, grad_bias};
    }
    PlanesBackward args;
    args.image = image;
    const auto* device = at::cuda::getCurrentDeviceProperties();
    args.processors = device->multiProcessorCount;
    args.arch = device->major * 10 + device->minor;
    args.grad = grad.const_data_ptr(), args.output = saved.const_data_ptr();
    args.dz = dz.data_ptr(), args.grad_bias = sums;
    explain::append("own one-pass kernel");
    const fused::cuda::Workspace scratch(scratch_bytes(args));
    cuda::relu_backward(args, scratch.data(), at::cuda::getCurrentCUDAStream());
    return {dz, grad_bias};
  }

 private:
  // Channels-last, each pixel is a linear layer's row.
  static gemm::Matrix rows(const Tensor& tensor, const Image& image) {
    return {image.batch * image.plane, image.channels, image.channels, false,
            const_cast<void*>(tensor.const_data_ptr())};
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fused, CUDA, m) { register_kernels<Gpu>(m); }

}  // namespace fused::conv::cuda
