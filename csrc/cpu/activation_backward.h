#pragma once

// act'(saved) · grad and its column sums in one pass over memory: block by block, so that what has
// just been written is summed while it is in a cache.

#include "core/aten_activation.h"
#include "cpu/relu_mask.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>

#include <algorithm>

namespace fused::cpu {

// Three of them, in fp32, stay in the cache that a core has to itself.
inline constexpr int64_t block_elements = 1 << 16;
// Beyond what all cores together keep at hand; below, whole passes are the quicker ones.
inline constexpr int64_t least_elements = 1 << 22;

inline void gradient_into(const Tensor& dz, const Tensor& grad, const Tensor& saved,
                          Activation activation) {
  if (saved.scalar_type() == at::kByte) {
    apply_relu_mask(dz, grad, saved);
  } else {
    activation_gradient_out(dz, grad, saved, activation);
  }
}

// Not worth it for few elements, nor in 16 bits: what ATen adds up in another type it converts in a
// pass of its own.
inline bool takes_one_pass(const Tensor& grad, const Tensor& saved, Activation activation) {
  const auto type = grad.scalar_type();
  return activation != Activation::none &&
         (saved.scalar_type() == type || saved.scalar_type() == at::kByte) &&
         at::toOpMathType(type) == type && grad.numel() >= least_elements;
}

// Writes dz; all are [rows, features], but a bit mask. -> sums over parts of the rows, [parts,
// features]; undefined where not wanted. The parts depend on sizes alone.
inline Tensor one_pass(const Tensor& dz, const Tensor& grad, const Tensor& saved,
                       Activation activation, bool sums_wanted) {
  const int64_t rows = dz.size(0), features = dz.size(1);
  const int64_t block = std::clamp<int64_t>(block_elements / features, 1, rows);
  const int64_t blocks = (rows + block - 1) / block;
  Tensor sums;
  if (sums_wanted) sums = at::empty({blocks, features}, dz.options().dtype(at::kDouble));
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;  // not inherited by threads
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i * block, count = std::min(block, rows - first);
      const auto some = [&](const Tensor& tensor) { return tensor.narrow(0, first, count); };
      gradient_into(some(dz), some(grad), some(saved), activation);
      if (!sums_wanted) continue;
      auto sum = sums.select(0, i);
      at::sum_out(sum, some(dz), 0, /*keepdim=*/false, at::kDouble);
    }
  });
  return sums;
}

}  // namespace fused::cpu
