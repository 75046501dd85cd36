// CPU kernels. Inference with GELU goes to oneDNN's linear with the activation as a post-op where
// that holds what we promise; everything else is the formula, through the same autograd nodes as
// on a GPU.

#include "composite.h"
#include "kernels.h"

#include <ATen/Context.h>
#include <ATen/core/List.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <optional>

namespace fused {
namespace {

using PointwiseSignature = Tensor(const Tensor&, const Tensor&, const OptionalTensor&,
                                  std::string_view, c10::List<std::optional<at::Scalar>>,
                                  std::optional<std::string_view>);

// Present only where PyTorch was built with oneDNN.
std::optional<c10::TypedOperatorHandle<PointwiseSignature>> onednn_linear() {
  const auto op = c10::Dispatcher::singleton().findSchema({"mkldnn::_linear_pointwise", ""});
  if (!op) return std::nullopt;
  return op->typed<PointwiseSignature>();
}

bool onednn_bf16() {
  static const bool supported = [] {
    const auto op =
        c10::Dispatcher::singleton().findSchema({"mkldnn::_is_mkldnn_bf16_supported", ""});
    return op && op->typed<bool()>().call();
  }();
  return supported;
}

// Where oneDNN's fused GELU is both quicker and as exact as PyTorch's own way. (Its fused ReLU is
// not used at all: it turns NaN into 0.)
bool onednn_takes(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                  Activation activation) {
  if (!is_gelu(activation) || !at::globalContext().userEnabledMkldnn()) return false;
  const bool fp32 = input.scalar_type() == at::kFloat;
  if (!fp32 && !(input.scalar_type() == at::kBFloat16 && onednn_bf16())) return false;
  // In fp32 oneDNN adds up longer sums one after the other, with twice the error of the blocked
  // sums of the BLAS that PyTorch uses.
  constexpr int64_t longest_sum = 192;
  if (fp32 && weight.size(1) > longest_sum) return false;
  // A call costs some 10 us whatever its size, as long as PyTorch's own BLAS takes for this many
  // multiplications; in 16 bits PyTorch itself calls oneDNN.
  const int64_t least_work = int64_t{1} << (fp32 ? 20 : 15);
  if (input.numel() * weight.size(0) < least_work) return false;
  // It refuses strides that overlap.
  return input.is_non_overlapping_and_dense() && weight.is_non_overlapping_and_dense() &&
         (!has_value(bias) || bias->is_contiguous());
}

struct Cpu : Reference {
  static Tensor forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        Activation activation) {
    static const auto pointwise = onednn_linear();
    if (!pointwise || !onednn_takes(input, weight, bias, activation)) {
      return Reference::forward(input, weight, bias, activation);
    }
    explain::step("oneDNN linear with post-op");
    return pointwise->call(input, weight, bias, "gelu", c10::List<std::optional<at::Scalar>>(),
                           approximate_of(activation));
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fused, CPU, m) { register_kernels<Cpu>(m); }

}  // namespace fused
