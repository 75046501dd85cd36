// The kernels of the public operators, the same for every backend: which way a call goes.

#include "core/explain.h"
#include "float8/blocks.h"
#include "float8/define.h"
#include "float8/node.h"
#include "float8/support.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <algorithm>

namespace fused::float8 {
namespace {

// ---- an operator's arguments as a block --------------------------------------------------------

template <class Op>
struct Block;

template <>
struct Block<Linear> {
  static Chain of(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                  std::string_view text) {
    const auto activation = parse_activation(Linear::name, text);
    return {Linear::name, input, {weight}, {bias}, activation, activation != Activation::none};
  }
};

template <>
struct Block<Mlp> {
  static Chain of(const Tensor& input, at::TensorList weights,
                  const c10::List<OptionalTensor>& biases, std::string_view text) {
    check_mlp(Mlp::name, weights, biases);
    return {Mlp::name,
            input,
            weights.vec(),
            {biases.begin(), biases.end()},
            parse_hidden_activation(Mlp::name, text),
            /*activates_last=*/false};
  }
};

template <>
struct Block<GatedMlp> {
  static Gated of(const Tensor& input, const Tensor& gate, const OptionalTensor& up,
                  const Tensor& down, const OptionalTensor& gate_bias,
                  const OptionalTensor& up_bias, const OptionalTensor& down_bias,
                  std::string_view text) {
    return {GatedMlp::name,
            input,
            gate,
            up,
            down,
            gate_bias,
            up_bias,
            down_bias,
            parse_hidden_activation(GatedMlp::name, text)};
  }
};

template <class Op, typename... Args>
auto checked_block(const Args&... args) {
  const auto block = Block<Op>::of(args...);
  block.check();
  return block;
}

// ---- the kernels -------------------------------------------------------------------------------

template <class Any>
Tensor in_own_dtype(const Any& block, const std::string& why) {
  const explain::Remarks remarks;
  explain::remark(why);
  return block.in_own_dtype();
}

// A transform of torch.func's and forward-mode AD would want the casts' derivatives.
template <class Any>
void refuse_transforms(const Any& block) {
  TORCH_CHECK_NOT_IMPLEMENTED(!autograd::inside_torch_func(), block.op,
                              ": torch.func's transforms are not implemented for FP8. Use "
                              "precision='default'");
  for (const auto& tensor : block.tensors()) {
    TORCH_CHECK_NOT_IMPLEMENTED(!has_value(tensor) || !has_tangent(*tensor), block.op,
                                ": forward-mode AD is not implemented for FP8. Use "
                                "precision='default'");
  }
}

template <class Op, typename Signature = typename Op::Signature>
struct Ways;

template <class Op, typename... Args>
struct Ways<Op, Tensor(Args...)> {
  static Tensor with_autograd(Args... args) {
    const auto block = checked_block<Op>(args...);
    refuse_transforms(block);
    const auto all = block.tensors();
    const auto trains = [](const auto& tensor) { return autograd::wants_gradient(tensor); };
    if (std::ranges::none_of(all, trains)) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;
      return Op::call(args...);
    }
    const auto& weights = block.weights();
    if (const auto why = objection(block.input, weights, std::ranges::any_of(weights, trains))) {
      return in_own_dtype(block, *why);
    }
    return block.with_gradient();
  }

  static Tensor without(Args... args) {
    const auto block = checked_block<Op>(args...);
    const auto why = objection(block.input, block.weights(), /*wants_weight_gradient=*/false);
    return why ? in_own_dtype(block, *why) : block.forward();
  }

  // As torchao does: only the input is cast, as the weights go to FP8 from the dtype they have.
  template <c10::DeviceType device>
  static Tensor under_autocast(Args... args) {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return with_cast_input(
        [](const Tensor& input) {
          const auto dtype = at::autocast::get_autocast_dtype(device);
          return at::autocast::cached_cast(dtype, input, device);
        },
        args...);
  }

  static Tensor under_vmap(Args...) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, Op::name,
                                ": vmap is not implemented for FP8. Use "
                                "precision='default'");
  }

 private:
  template <typename Cast, typename... Rest>
  static Tensor with_cast_input(const Cast& cast, const Tensor& input, const Rest&... rest) {
    return Op::call(cast(input), rest...);
  }
};

template <typename Fn>
void for_each_operator(const Fn& fn) {
  dispatch::for_each_row<Public>([&](auto row) { fn.template operator()<decltype(row)>(); });
}

}  // namespace

void define(torch::Library& m, const std::vector<at::Tag>& tags) {
  dispatch::for_each_row<Public>([&](auto row) { m.def(decltype(row)::schema, tags); });
  dispatch::for_each_row<Steps>([&](auto row) { m.def(decltype(row)::schema, tags); });
}

TORCH_LIBRARY_IMPL(fused, Autograd, m) {
  for_each_operator([&]<class Op>() { m.impl(Op::name, Ways<Op>::with_autograd); });
}
TORCH_LIBRARY_IMPL(fused, CompositeExplicitAutograd, m) {
  for_each_operator([&]<class Op>() { m.impl(Op::name, Ways<Op>::without); });
}
TORCH_LIBRARY_IMPL(fused, AutocastCUDA, m) {
  for_each_operator(
      [&]<class Op>() { m.impl(Op::name, Ways<Op>::template under_autocast<c10::kCUDA>); });
}
TORCH_LIBRARY_IMPL(fused, AutocastCPU, m) {
  for_each_operator(
      [&]<class Op>() { m.impl(Op::name, Ways<Op>::template under_autocast<c10::kCPU>); });
}
TORCH_LIBRARY_IMPL(fused, FuncTorchBatched, m) {
  for_each_operator([&]<class Op>() { m.impl(Op::name, Ways<Op>::under_vmap); });
}

}  // namespace fused::float8
