// The node of fused::conv2d_relu, and the Autograd kernels. The backward reads the output for
// ReLU's mask, so that neither the pre-activation nor the bias is kept.

#include "autograd/arguments.h"
#include "autograd/double_backward.h"
#include "conv/kernels.h"
#include "fused_linear.h"

namespace fused::conv {
namespace {

using autograd::edge_of, autograd::saved_input, autograd::is_sharded;
using autograd::Node, autograd::SavedVariable, autograd::variable_list, autograd::Work;

struct State : Work {
  enum { input, weight, output, tensors };  // what is kept

  Geometry geometry;
};

Triple convolution_backward(const Tensor& dz, const Tensor& input, const Tensor& weight,
                            SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                            const SymInt& groups, std::array<bool, 3> wanted) {
  const std::array<SymInt, 1> bias_sizes{dz.sym_size(1)};
  return at::convolution_backward_symint(dz, input, weight, SymIntArrayRef(bias_sizes), stride,
                                         padding, dilation, /*transposed=*/false, no_padding,
                                         groups, wanted);
}

// That backward as an operator, whose results are all defined.
Triple conv2d_backward(const Tensor& dz, const Tensor& input, const Tensor& weight,
                       SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                       SymInt groups, std::array<bool, 3> wanted) {
  auto [grad_input, grad_weight, grad_bias] =
      convolution_backward(dz, input, weight, stride, padding, dilation, groups, wanted);
  for (auto* gradient : {&grad_input, &grad_weight, &grad_bias}) {
    if (!gradient->defined()) *gradient = at::empty({0}, dz.options());
  }
  return {grad_input, grad_weight, grad_bias};
}

template <typename ReluBackward>
Triple gradients(const State& state, const Tensor& grad, const ReluBackward& relu_backward) {
  const auto& g = state.geometry;
  const auto& wanted = state.wanted;
  // On the CPU the library sums the bias gradient while it computes the weight's.
  const bool summed_by_library = wanted[1] && grad.device().is_cpu();
  auto [dz, grad_bias] = relu_backward(batched(grad), batched(state.kept[State::output]),
                                       wanted[2] && !summed_by_library);
  if (!wanted[0] && !wanted[1]) return {Tensor(), Tensor(), grad_bias};
  const auto input = batched(state.kept[State::input]);
  const auto& weight = state.kept[State::weight];
  const std::array<bool, 3> mask{wanted[0], wanted[1], wanted[2] && summed_by_library};
  auto [grad_input, grad_weight, library_bias] =
      is_sharded(dz)
          ? Conv2dBackward::call(dz, input, weight, g.stride, g.padding, g.dilation, g.groups, mask)
          : convolution_backward(dz, input, weight, g.stride, g.padding, g.dilation, g.groups,
                                 mask);
  return {grad_input, grad_weight, summed_by_library ? library_bias : grad_bias};
}

Triple usual(const State& state, const Tensor& grad) {
  const autograd::KernelsOnly guard;
  return gradients(state, grad, steps::channels_relu_backward);
}

variable_list run(const State& state, const Tensor& grad) {
  auto [grad_input, grad_weight, grad_bias] = autograd::must_be_differentiable(grad, state.kept)
                                                  ? gradients(state, grad, Formula::relu_backward)
                                                  : usual(state, grad);
  if (state.wanted[0]) grad_input = like(grad, grad_input);
  return autograd::by_edge(state.wanted, grad_input, grad_weight, grad_bias);
}

class Conv2dReLUNode final : public Node {
 public:
  Conv2dReLUNode(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                 const Geometry& geometry)
      : Node({edge_of(input), edge_of(weight), edge_of(bias)}), geometry_(geometry) {}

  void keep(const Tensor& input, const Tensor& weight, const Tensor& output) {
    // Each product's gradient needs the shape of one and the values of the other.
    if (input.requires_grad() || weight.requires_grad()) {
      kept_[State::input] = saved_input(input, /*dimensions=*/4);
      kept_[State::weight] = SavedVariable(weight, /*is_output=*/false);
    }
    kept_[State::output] = SavedVariable(output, /*is_output=*/true);
  }

  std::string name() const override { return "FusedConv2dReluBackward"; }

 protected:
  variable_list gradients(const Tensor& grad) override { return run({work(), geometry_}, grad); }
  std::span<SavedVariable> kept() override { return kept_; }
  std::vector<int64_t> traits() const override {
    std::vector<int64_t> result;
    const auto add = [&](const SymInt& n) { result.push_back(n.guard_int(__FILE__, __LINE__)); };
    const auto& g = geometry_;
    for (const auto* pair : {&g.stride, &g.padding, &g.dilation}) add((*pair)[0]), add((*pair)[1]);
    add(g.groups);
    return result;
  }
  Backward backward() const override {
    return [numbers = traits()](Work work, const Tensor& grad) {
      const std::vector<SymInt> symbols(numbers.begin(), numbers.end());
      const SymIntArrayRef all = symbols;
      return run({std::move(work), {all.slice(0, 2), all.slice(2, 2), all.slice(4, 2), all[6]}},
                 grad);
    };
  }

 private:
  const Geometry geometry_;
  std::array<SavedVariable, State::tensors> kept_;
};

// The operator itself, for the kernels below.
Tensor plain(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
             const Geometry& g) {
  return conv2d_relu_symint(input, weight, bias, g.stride, g.padding, g.dilation, g.groups);
}

Tensor conv2d_relu_with_gradient(const Tensor& input, const Tensor& weight,
                                 const OptionalTensor& bias, const Geometry& g) {
  const auto node = autograd::make_node<Conv2dReLUNode>(input, weight, bias, g);
  Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView guard;
    output = plain(input, weight, bias, g);
  }
  autograd::set_history(output, node);
  node->keep(input, weight, output);
  autograd::announce(node);
  return output;
}

// ---- the Autograd kernels ----------------------------------------------------------------------

struct Autograd {
  static Tensor conv2d_relu(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            const Geometry& geometry) {
    const bool formula = autograd::wants_formula(input, weight, bias);
    if (!formula && !autograd::wants_gradient(input, weight, bias)) {
      const at::AutoDispatchBelowADInplaceOrView guard;
      return plain(input, weight, bias, geometry);
    }
    const char* why = objection(input, weight, bias);
    if (!why) check(input, weight, bias, geometry);
    if (formula || why) {
      return as_torch_does(why, input, weight, bias, geometry);
    }
    return conv2d_relu_with_gradient(input, weight, bias, geometry);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fused, CompositeExplicitAutograd, m) {
  m.impl("_conv2d_backward", conv2d_backward);
}

TORCH_LIBRARY_IMPL(fused, Autograd, m) {
  dispatch::put<Public, Autograd>(m);
  autograd::put_steps<Steps, Kernels<Formula>>(m);
  m.impl("_conv2d_backward", conv2d_backward);  // differentiable, as what it calls is
}

}  // namespace fused::conv
