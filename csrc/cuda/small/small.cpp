// Small networks run these in place of the linear operators' passes: a whole forward in one launch,
// and the layers of an ensemble's members in one.

#include "cuda/small/small.h"
#include "core/explain.h"
#include "core/policy.h"
#include "core/shapes.h"
#include "cuda/runtime/device.h"
#include "cuda/runtime/execute.h"
#include "cuda/tune/decide.h"
#include "dispatch/operators.h"
#include "gemm/choice.h"
#include "reference/linear.h"

#include <ATen/ceil_div.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>

namespace fused::cuda::small {
namespace {

using S = Shapes<Allocator>;

bool takes_small(PassCall& call, const Tensor& like) {
  complete(call, gemm_type(like.scalar_type()), like.get_device());
  const auto& p = call.problem;
  return !gemm::objection(p, *gemm::find_strategy(p.pass, "small"), available(p));
}

// Describes a chain, which reads the layers: they must outlive it.
PassCall as_chain(const std::vector<PassCall>& layers) {
  PassCall chain = layers[0];
  static_assert(kernels::SmallNetwork::most_layers == sizeof(chain.problem.further) / 8 + 1);
  chain.problem.pass = Pass::chain;
  for (size_t i = 1; i < layers.size(); ++i) {
    chain.problem.further[i - 1] = layers[i].problem.matmul.m;
  }
  chain.layers = &layers;
  return chain;
}

// The first member's matrix of [members, rows, cols], and the distance to the next one's.
struct Stacked {
  Tensor tensor;  // keeps it alive
  Matrix first;
  int64_t apart;

  explicit Stacked(const Tensor& given)
      : tensor(given.stride(2) == 1 && given.stride(1) >= given.size(2) ? given
                                                                        : given.contiguous()),
        first{tensor.size(1), tensor.size(2), tensor.stride(1), false, data_of(tensor)},
        apart(tensor.stride(0)) {}
};

constexpr auto of_all_members = "own small kernel of all members";

// Where members fill the GPU several times over, torch.bmm is faster: a step of 10 networks
// 24→256→256→1 with 256 tokens in fp32 took 165 us on an H100, torch's own 116; of 4, 82 and 85.
bool are_few(const PassCall& call, int64_t members) {
  constexpr int64_t tile = 16, most_for_each_multiprocessor = 12;
  const auto& p = call.problem.matmul;
  const int64_t tiles = members * at::ceil_div(p.m, tile) * at::ceil_div(p.n, tile);
  return tiles <=
         most_for_each_multiprocessor * at::cuda::getCurrentDeviceProperties()->multiProcessorCount;
}

bool is_ours(PassCall& call, const Tensor& like) {
  return like.numel() > 0 && takes_small(call, like) && are_few(call, like.size(0)) &&
         tune::is_small(call);
}

kernels::SmallProduct of_all(const PassCall& one, const Tensor& like,
                             const decltype(kernels::SmallProduct::apart)& apart) {
  auto product = small_product(one);
  product.members = static_cast<int>(like.size(0)), product.apart = apart;
  return product;
}

Tensor preactivation_gradient(const steps::LinearBackward& layer) {
  const auto& given = layer.grad_output;
  if (layer.activation == Activation::none || given.numel() == 0) return given;
  auto dz = empty(given.sizes(), given);
  const auto grad = plain_rows(given), saved = plain_rows(*layer.saved);
  one_pass(grad.matrix, saved.matrix, layer.saved->scalar_type() == at::kByte, layer.activation,
           gemm_type(dz.scalar_type()), dz.data_ptr(), {});
  return dz;
}

}  // namespace

std::vector<Tensor> mlp_in_one(const Tensor& input, at::TensorList weights,
                               const c10::List<OptionalTensor>& biases, Activation activation,
                               bool keeps) {
  const size_t count = weights.size();
  if (count < 2 || count > kernels::SmallNetwork::most_layers || policy() != Policy::automatic ||
      input.numel() == 0 || input.numel() > gemm::small::most_tokens * input.size(-1) ||
      !multiplies_as_torch(input)) {
    return {};
  }
  const c10::cuda::CUDAGuard guard(input.device());
  std::vector<Tensor> results, kept, added;
  std::vector<PassCall> layers;
  auto left = rows_of(input);
  for (size_t i = 0; i < count; ++i) {
    const auto right = rows_of(weights[i]);
    // A chain's key holds only whether the first layer has a bias.
    const bool is_alike = has_value(biases.get(i)) == has_value(biases.get(0));
    if (!is_alike || left.copy.defined() || right.copy.defined() ||
        right.matrix.rows > gemm::small::most_features) {
      return {};
    }
    const auto own = i + 1 == count ? Activation::none : activation;
    results.push_back(S::output(input, weights[i]));
    added.push_back(bias_for_epilogue(biases.get(i)));
    if (keeps && saved_for(own) == Saved::preactivation) {
      kept.push_back(S::output(input, weights[i]));
    }
    layers.push_back(make_call(Pass::fprop, left.matrix, transposed(right.matrix),
                               matrix_of(results.back()), data_of(added.back()), own,
                               kept.size() > i ? matrix_of(kept.back()) : Matrix(),
                               kept.size() > i ? Keeps::values : Keeps::nothing));
    if (!takes_small(layers.back(), input)) return {};
    left.matrix = layers.back().result;
  }
  const auto chain = as_chain(layers);
  if (!tune::is_small(chain)) return {};
  const explain::Row row("mlp", input, weights[0]);
  if (!tune::run(chain)) return {};
  results.insert(results.end(), kept.begin(), kept.end());
  return results;
}

Pair ensemble(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
              Activation activation) {
  reference::refuse_formula("ensemble_linear", input, "a weight for each member (vmap)");
  const c10::cuda::CUDAGuard guard(input.device());
  const Stacked x(input), w(weight);
  const auto added = bias_for_epilogue(bias);
  const bool keeps = saved_for(activation) == Saved::preactivation;
  auto output = S::rows(input, weight.size(1)),
       saved = keeps ? at::empty_like(output) : S::unwanted(input);
  auto call = make_call(Pass::fprop, x.first, transposed(w.first), Stacked(output).first,
                        data_of(added), activation, keeps ? Stacked(saved).first : Matrix(),
                        keeps ? Keeps::values : Keeps::nothing);
  if (!is_ours(call, output))
    return reference::LinearFormula::ensemble(input, weight, bias, activation);
  const auto apart = output.stride(0);
  explain::append(of_all_members);
  kernels::small_forward(of_all(call, output, {x.apart, w.apart, apart, output.size(2), apart}),
                         at::cuda::getCurrentCUDAStream());
  return {std::move(output), std::move(saved)};
}

Triple ensemble_backward(const steps::LinearBackward& layer) {
  const auto& wanted = layer.wanted;
  reference::refuse_formula("ensemble_linear's backward", layer.grad_output,
                            "a weight for each member (vmap)");
  const c10::cuda::CUDAGuard guard(layer.grad_output.device());
  const auto dz = preactivation_gradient(layer);
  const Stacked g(dz), w(wanted[0] ? layer.weight : dz), x(wanted[1] ? layer.input : dz);
  auto grad_input = S::grad_input(layer.input, wanted[0]);
  auto grad_weight = wanted[1] ? empty(layer.weight.sizes(), dz) : S::unwanted(dz);
  auto grad_bias = wanted[2] ? empty({dz.size(0), dz.size(2)}, dz) : S::unwanted(dz);
  bool is_whole = wanted[1] || !wanted[2];  // the bias's gradient comes with the weight's
  kernels::SmallGradients gradients;
  if (wanted[0]) {
    auto call = make_call(Pass::dgrad, g.first, w.first, Stacked(grad_input).first);
    is_whole = is_whole && is_ours(call, dz);
    gradients.of_input = of_all(call, dz, {g.apart, w.apart, grad_input.stride(0)});
  }
  if (wanted[1]) {
    auto call = make_call(Pass::wgrad, transposed(g.first), x.first, Stacked(grad_weight).first,
                          wanted[2] ? data_of(grad_bias) : nullptr);
    is_whole = is_whole && is_ours(call, dz);
    gradients.of_weight =
        of_all(call, dz, {g.apart, x.apart, grad_weight.stride(0), 0, 0, grad_bias.stride(0)});
  }
  if (!is_whole) {
    return reference::LinearFormula::linear_backward(
        {dz, layer.input, layer.weight, std::nullopt, Activation::none, wanted});
  }
  explain::append(of_all_members);
  kernels::small_backward(gradients, at::cuda::getCurrentCUDAStream());
  return {std::move(grad_input), std::move(grad_weight), std::move(grad_bias)};
}

TORCH_LIBRARY_IMPL(fused, CUDA, m) {
  m.impl(dispatch::MlpInOne::name, [](const Tensor& input, at::TensorList weights,
                                      const c10::List<OptionalTensor>& biases, int64_t number) {
    constexpr auto op = dispatch::MlpInOne::name;
    const auto activation = hidden_activation_of(op, number);
    check_mlp(op, weights, biases);
    const char* why = fused::objection(input, weights, biases);
    TORCH_CHECK(why == nullptr, op, ": expected a chain of layers for one input, got ",
                describe(input), " ", why);
    return mlp_in_one(input, weights, biases, activation, /*keeps=*/true);
  });
}

}  // namespace fused::cuda::small
