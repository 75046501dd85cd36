#include "cpu/one_pass.h"

#include "core/aten_activation.h"
#include "cpu/blocks.h"
#include "cpu/relu_mask.h"

#include <ATen/OpMathType.h>

#include <algorithm>

namespace fused::cpu {
namespace {

// A block's results are summed while they are in the cache, which holds three such blocks in fp32.
constexpr int64_t block_elements = 1 << 16;
// More than the caches of all cores hold. For smaller tensors separate sweeps are faster.
constexpr int64_t least_elements = 1 << 22;

}  // namespace

// 16 bits do not pay, because ATen converts values in a sweep of its own before it adds them up.
bool takes_one_pass(const Tensor& grad, const Tensor& saved, Activation activation) {
  const auto type = grad.scalar_type();
  return activation != Activation::none &&
         (saved.scalar_type() == type || saved.scalar_type() == at::kByte) &&
         at::toOpMathType(type) == type && grad.numel() >= least_elements;
}

Tensor one_pass(const Tensor& dz, const Tensor& grad, const Tensor& saved, Activation activation,
                bool sums_wanted) {
  const int64_t rows = dz.size(0), features = dz.size(1);
  const Blocks blocks(rows, std::clamp<int64_t>(block_elements / features, 1, rows));
  Tensor sums;
  if (sums_wanted) sums = at::empty({blocks.count, features}, dz.options().dtype(at::kDouble));
  blocks.run([&](int64_t block, int64_t first, int64_t count) {
    const auto some = [&](const Tensor& tensor) { return tensor.narrow(0, first, count); };
    if (saved.scalar_type() == at::kByte) {
      apply_relu_mask(some(dz), some(grad), some(saved));
    } else {
      activation_gradient_out(some(dz), some(grad), some(saved), activation);
    }
    if (!sums_wanted) return;
    auto sum = sums.select(0, block);
    at::sum_out(sum, some(dz), 0, /*keepdim=*/false, at::kDouble);
  });
  return sums;
}

Tensor sum_of_parts(const Tensor& parts, const Tensor& like) {
  return parts.defined() ? parts.sum(0).to(like.scalar_type()) : at::empty({0}, like.options());
}

}  // namespace fused::cpu
