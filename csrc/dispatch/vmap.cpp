// torch's rules batch the formula under vmap; a weight for each example makes an ensemble's layers.

#include "dispatch/gated_kernels.h"
#include "dispatch/linear_kernels.h"
#include "gemm/small.h"

#include <ATen/autocast_mode.h>
#include <ATen/functorch/BatchedTensorImpl.h>

namespace fused::dispatch {
namespace {

namespace functorch = at::functorch;

struct Vmapped : reference::LinearFormula {
  static Tensor forward(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                        Activation activation) {
    const auto* weights = functorch::maybeGetBatchedImpl(weight);
    const bool is_nested =
        level_of(input) > 1 || level_of(weight) > 1 || (has_value(bias) && level_of(*bias) > 1);
    // Autocast comes after vmap, and knows the formula.
    if (weights == nullptr || is_nested || is_traced(input) || weights->value().numel() == 0 ||
        !is_small(input, weight) || at::autocast::is_autocast_enabled(input.device().type())) {
      return LinearFormula::forward(input, weight, bias, activation);
    }
    const c10::impl::ExcludeDispatchKeyGuard no_vmap(c10::DispatchKey::FuncTorchBatched);
    const auto members = weights->value().size(weights->bdim());
    const auto inputs = stacked(input, members);
    const auto outputs = std::get<0>(EnsembleLinear::call(
        inputs.reshape({members, -1, inputs.size(-1)}), stacked(weight, members),
        has_value(bias) ? OptionalTensor(stacked(*bias, members)) : std::nullopt,
        number(activation)));
    auto sizes = inputs.sizes().vec();
    sizes.back() = outputs.size(2);
    return functorch::makeBatched(outputs.view(sizes), 0, weights->level());
  }

 private:
  // The level of the innermost transform that batches it; 1 is the outermost, 0 none.
  static int64_t level_of(const Tensor& tensor) {
    const auto* batched = functorch::maybeGetBatchedImpl(tensor);
    return batched == nullptr ? 0 : batched->level();
  }

  static bool is_small(const Tensor& input, const Tensor& weight) {
    return input.numel() > 0 && input.numel() <= gemm::small::most_tokens * input.size(-1) &&
           std::max(weight.size(0), weight.size(1)) <= gemm::small::most_features;
  }

  // [members, *]; where the tensor is no member's own, it is every member's.
  static Tensor stacked(const Tensor& tensor, int64_t members) {
    if (const auto* batched = functorch::maybeGetBatchedImpl(tensor)) {
      return batched->value().movedim(batched->bdim(), 0);
    }
    auto sizes = tensor.sizes().vec();
    sizes.insert(sizes.begin(), members);
    return tensor.expand(sizes);
  }
};

}  // namespace

TORCH_LIBRARY_IMPL(fused, FuncTorchBatched, m) {
  register_linear<Vmapped>(m);
  register_gated<reference::GluFormula>(m);
}

}  // namespace fused::dispatch
