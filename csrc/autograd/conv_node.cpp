// The node of fused::conv2d_relu, and the Autograd kernels. The backward reads the output for
// ReLU's mask, so that neither the pre-activation nor the bias is kept.

#include "autograd/arguments.h"
#include "core/conv.h"
#include "dispatch/conv_kernels.h"
#include "fused_linear.h"

#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>

namespace fused::autograd {
namespace {

using c10::SymInt, c10::SymIntArrayRef;
using conv::Geometry, conv::batched, conv::op_name;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using Formula = reference::ConvFormula;

// What a node remembers beside tensors, in one entry: looking one up costs as much as a small
// allocation.
struct Traits {
  bool bias;
  Geometry geometry;

  static void keep(AutogradContext& ctx, bool bias, const Geometry& g) {
    ctx.saved_data["conv"] =
        std::vector<SymInt>{bias ? 1 : 0, g.groups,     g.stride[0],   g.stride[1],
                            g.padding[0], g.padding[1], g.dilation[0], g.dilation[1]};
  }
  static Traits of(AutogradContext& ctx) {
    const auto kept = ctx.saved_data["conv"].toSymIntVector();
    const SymIntArrayRef all = kept;
    return {kept[0] == 1, {all.slice(2, 2), all.slice(4, 2), all.slice(6, 2), kept[1]}};
  }
};

struct Conv2dReLU : Function<Conv2dReLU> {
  enum Edge { input_edge, weight_edge, bias_edge };
  static constexpr size_t arguments = 7;

  static Tensor forward(AutogradContext* ctx, const Tensor& input, const Tensor& weight,
                        const OptionalTensor& bias, SymIntArrayRef stride, SymIntArrayRef padding,
                        SymIntArrayRef dilation, const SymInt& groups) {
    Tensor output;
    {
      const at::AutoDispatchBelowADInplaceOrView guard;
      output = conv2d_relu_symint(input, weight, bias, stride, padding, dilation, groups);
    }
    Traits::keep(*ctx, has_value(bias), {stride, padding, dilation, groups});
    ctx->set_materialize_grads(false);
    // Each product's gradient needs the shape of one and the values of the other.
    const bool products = input.requires_grad() || weight.requires_grad();
    ctx->save_for_backward({products ? input : Tensor(), products ? weight : Tensor(), output});
    return output;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    variable_list result(arguments);
    if (!grads[0].defined()) return result;
    const auto saved = ctx->get_saved_variables();
    const auto traits = Traits::of(*ctx);
    const std::array<bool, 3> wanted{ctx->needs_input_grad(input_edge),
                                     ctx->needs_input_grad(weight_edge),
                                     traits.bias && ctx->needs_input_grad(bias_edge)};
    // create_graph, or forward over reverse: the gradients must be differentiable themselves.
    const bool differentiable =
        at::GradMode::is_enabled() || has_tangent(grads[0]) ||
        std::ranges::any_of(saved, [](const Tensor& t) { return has_tangent(t); });
    auto [grad_input, grad_weight, grad_bias] =
        differentiable ? gradients(traits, grads[0], saved, wanted, formula_relu_backward)
                       : usual(traits, grads[0], saved, wanted);
    if (wanted[0]) result[input_edge] = conv::like(grads[0], grad_input);
    if (wanted[1]) result[weight_edge] = grad_weight;
    if (wanted[2]) result[bias_edge] = grad_bias;
    return result;
  }

 private:
  using Gradients = std::tuple<Tensor, Tensor, Tensor>;

  // The mask is a constant: ReLU's second derivative is zero.
  static std::tuple<Tensor, Tensor> formula_relu_backward(const Tensor& grad, const Tensor& output,
                                                          bool bias_grad) {
    return Formula::relu_backward(grad, output.detach(), bias_grad);
  }

  static Gradients usual(const Traits& traits, const Tensor& grad, const variable_list& saved,
                         std::array<bool, 3> wanted) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return gradients(traits, grad, saved, wanted, steps::channels_relu_backward);
  }

  template <typename ReluBackward>
  static Gradients gradients(const Traits& traits, const Tensor& grad, const variable_list& saved,
                             std::array<bool, 3> wanted, const ReluBackward& relu_backward) {
    const auto& g = traits.geometry;
    // On the CPU the library sums the bias gradient while it computes the weight's.
    const bool summed_by_library = wanted[1] && grad.device().is_cpu();
    auto [dz, grad_bias] =
        relu_backward(batched(grad), batched(saved[2]), wanted[2] && !summed_by_library);
    if (!wanted[0] && !wanted[1]) return {Tensor(), Tensor(), grad_bias};
    const std::array<SymInt, 1> bias_sizes{dz.sym_size(1)};
    auto [grad_input, grad_weight, library_bias] = at::convolution_backward_symint(
        dz, batched(saved[0]), saved[1], SymIntArrayRef(bias_sizes), g.stride, g.padding,
        g.dilation, /*transposed=*/false, conv::no_padding, g.groups,
        {wanted[0], wanted[1], wanted[2] && summed_by_library});
    return {grad_input, grad_weight, summed_by_library ? library_bias : grad_bias};
  }
};

Tensor conv2d_relu_autograd(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                            SymInt groups) {
  const bool formula = wants_formula(input, weight, bias);
  if (!formula && !wants_gradient(input, weight, bias)) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return conv2d_relu_symint(input, weight, bias, stride, padding, dilation, groups);
  }
  const Geometry geometry(stride, padding, dilation, groups);
  conv::check(input, weight, bias, geometry);
  if (formula) {
    const explain::Row row(op_name, input, weight);
    explain::append("reference");
    return Formula::forward(input, weight, bias, geometry);
  }
  return Conv2dReLU::apply(input, weight, bias, SymIntArrayRef(geometry.stride),
                           SymIntArrayRef(geometry.padding), SymIntArrayRef(geometry.dilation),
                           groups);
}

}  // namespace

TORCH_LIBRARY_IMPL(fused, Autograd, m) {
  m.impl("conv2d_relu", conv2d_relu_autograd);
  m.impl(
      "_channels_relu_backward",
      Step<&dispatch::ConvKernels<Formula>::relu_backward, &steps::channels_relu_backward>::call);
}

}  // namespace fused::autograd
