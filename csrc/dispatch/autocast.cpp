// Under autocast the operators run in the user's autocast dtype, as torch's own linear does.
// Casts of the weights are cached for the length of the autocast region. The steps keep the dtypes
// that they are given: what they call of ATen's would cast again.

#include "core/check.h"
#include "dispatch/signatures.h"
#include "fused_linear.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

namespace fused::dispatch {
namespace {

template <auto step>
struct Kept;

template <typename Result, typename... Args, Result (*step)(Args...)>
struct Kept<step> {
  static Result call(Args... args) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return step(args...);
  }
};

template <c10::DeviceType device>
struct Autocast {
  static constexpr auto key =
      device == c10::kCUDA ? c10::DispatchKey::AutocastCUDA : c10::DispatchKey::AutocastCPU;

  static Tensor cast(const Tensor& tensor) {
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), tensor, device);
  }

  static OptionalTensor cast(const OptionalTensor& tensor) {
    return has_value(tensor) ? OptionalTensor(cast(*tensor)) : std::nullopt;
  }

  static Tensor linear(const Tensor& input, const Tensor& weight, const OptionalTensor& bias) {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
    return fused::linear(cast(input), cast(weight), cast(bias));
  }

  static Tensor linear_relu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            std::string_view memory) {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
    return fused::linear_relu(cast(input), cast(weight), cast(bias), memory);
  }

  static Tensor linear_gelu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            std::string_view approximate, std::string_view memory) {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
    return fused::linear_gelu(cast(input), cast(weight), cast(bias), approximate, memory);
  }

  static Tensor linear_silu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            std::string_view memory) {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
    return fused::linear_silu(cast(input), cast(weight), cast(bias), memory);
  }

  static Tensor mlp(const Tensor& input, at::TensorList weights,
                    const c10::List<OptionalTensor>& biases, std::string_view activation,
                    std::string_view memory) {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
    std::vector<Tensor> cast_weights;
    for (const auto& weight : weights) cast_weights.push_back(cast(weight));
    c10::List<OptionalTensor> cast_biases;
    for (const OptionalTensor& bias : biases) cast_biases.push_back(cast(bias));
    return fused::mlp(cast(input), cast_weights, cast_biases, activation, memory);
  }

  static Tensor linear_glu(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                           const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
                           std::string_view activation, std::string_view memory) {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
    return fused::linear_glu(cast(input), cast(gate), cast(up), cast(gate_bias), cast(up_bias),
                             activation, memory);
  }

  static Tensor gated_mlp(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                          const Tensor& down, const OptionalTensor& gate_bias,
                          const OptionalTensor& up_bias, const OptionalTensor& down_bias,
                          std::string_view activation, std::string_view memory) {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
    return fused::gated_mlp(cast(input), cast(gate), cast(up), cast(down), cast(gate_bias),
                            cast(up_bias), cast(down_bias), activation, memory);
  }

  static Tensor conv2d_relu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            c10::SymIntArrayRef stride, c10::SymIntArrayRef padding,
                            c10::SymIntArrayRef dilation, c10::SymInt groups) {
    c10::impl::ExcludeDispatchKeyGuard no_autocast(key);
    return fused::conv2d_relu_symint(cast(input), cast(weight), cast(bias), stride, padding,
                                     dilation, groups);
  }

  static void register_kernels(torch::Library& m) {
    m.impl("linear", linear);
    m.impl("linear_relu", linear_relu);
    m.impl("linear_gelu", linear_gelu);
    m.impl("linear_silu", linear_silu);
    m.impl("mlp", mlp);
    m.impl("linear_glu", linear_glu);
    m.impl("gated_mlp", gated_mlp);
    m.impl("conv2d_relu", conv2d_relu);
    m.impl("_linear_glu_aux", flat_linear_glu_aux<Kept<&steps::linear_glu_aux>::call>);
    m.impl("_glu", flat_glu<Kept<&steps::glu>::call>);
    m.impl("_glu_backward", flat_glu_backward<Kept<&steps::glu_backward>::call>);
    m.impl("_linear_relu_aux", Kept<&steps::linear_relu_aux>::call);
    m.impl("_linear_gelu_aux", Kept<&steps::linear_gelu_aux>::call);
    m.impl("_linear_silu_aux", Kept<&steps::linear_silu_aux>::call);
    m.impl("_relu_mask", Kept<&steps::relu_mask>::call);
    m.impl("_linear_relu_bits", Kept<&steps::linear_relu_bits>::call);
    m.impl("_activation_backward",
           flat_activation_backward<Kept<&steps::activation_backward>::call>);
    m.impl("_channels_relu_backward", Kept<&steps::channels_relu_backward>::call);
    m.impl("_linear_backward", flat_linear_backward<Kept<&steps::linear_backward>::call>);
    m.impl("_linear_backward_across",
           flat_linear_backward_across<Kept<&steps::linear_backward_across>::call>);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fused, AutocastCUDA, m) { Autocast<c10::kCUDA>::register_kernels(m); }
TORCH_LIBRARY_IMPL(fused, AutocastCPU, m) { Autocast<c10::kCPU>::register_kernels(m); }

}  // namespace fused::dispatch
