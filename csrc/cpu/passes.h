#pragma once

#include "core/aten_activation.h"

#include <ATen/OpMathType.h>
#include <ATen/Parallel.h>
#include <ATen/ceil_div.h>

#include <algorithm>

namespace fused::cpu {

// Blocks of rows, each one thread's own, so that what a step writes is in a cache for the next.
struct Blocks {
  int64_t rows, each, count;

  Blocks(int64_t rows, int64_t each) : rows(rows), each(each), count(at::ceil_div(rows, each)) {}

  // Calls fn(block, its first row, its rows), on all threads.
  template <typename Fn>
  void run(const Fn& fn) const {
    at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
      const at::AutoDispatchBelowADInplaceOrView below_autograd;  // not inherited by threads
      for (int64_t i = begin; i < end; ++i) fn(i, i * each, std::min(each, rows - i * each));
    });
  }
};

inline Tensor sum_of_parts(const Tensor& parts, const Tensor& like) {
  return parts.defined() ? parts.sum(0).to(like.scalar_type()) : at::empty({0}, like.options());
}

// ReLU's bit mask in one pass over memory each way; ATen's formulas take six. Its
// rows are padded to whole groups of bits.
inline constexpr int64_t group = mask_bits<int64_t>(1), group_bytes = group / 8;

template <typename T>
bool passes(T output) {
  return !(output <= 0);
}

// -inf and all numbers below 0 are below -1023 as integers, every NaN is above, of which compilers
// make vectors without the processor's help.
inline bool passes(c10::Half output) {
  const auto bits = static_cast<int16_t>(output.x);
  return bits > static_cast<int16_t>(0xfc00) && bits != 0;
}

// In two loops, of which compilers make vectors.
template <typename T>
void write_group(const T* output, int64_t count, uint8_t* mask) {
  uint8_t passing[group] = {};
  for (int64_t i = 0; i < count; ++i) passing[i] = passes(output[i]);
  for (int64_t i = 0; i < group_bytes; ++i) {
    unsigned byte = 0;
    for (int j = 0; j < 8; ++j) byte |= unsigned{passing[8 * i + j]} << j;
    mask[i] = static_cast<uint8_t>(byte);
  }
}

// A gradient is moved or not: T is an integer of its size. Compilers make vectors of two loops.
template <typename T>
void apply_group(T* dz, const T* grad, int64_t count, const uint8_t* mask) {
  T kept[group];
  for (int64_t i = 0; i < group_bytes; ++i) {
    for (int j = 0; j < 8; ++j) kept[8 * i + j] = static_cast<T>(-(mask[i] >> j & 1));
  }
  for (int64_t i = 0; i < count; ++i) dz[i] = grad[i] & kept[i];
}

// fn(first element, their count, first byte of the mask) for every group of contiguous rows.
template <typename Fn>
void for_groups(int64_t rows, int64_t features, const Fn& fn) {
  const int64_t groups_per_row = (features + group - 1) / group;
  const auto some = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / groups_per_row, first = (i - row * groups_per_row) * group;
      fn(row * features + first, std::min(group, features - first), i * group_bytes);
    }
  };
  at::parallel_for(0, rows * groups_per_row, at::internal::GRAIN_SIZE / group, some);
}

template <typename T>
void apply_as(const Tensor& dz, const Tensor& grad, const Tensor& mask) {
  auto* to = static_cast<T*>(dz.mutable_data_ptr());
  const auto* from = static_cast<const T*>(grad.const_data_ptr());
  const auto* bits = mask.const_data_ptr<uint8_t>();
  const int64_t features = dz.size(-1);
  for_groups(dz.numel() / features, features, [&](int64_t first, int64_t count, int64_t byte) {
    apply_group(to + first, from + first, count, bits + byte);
  });
}

// Writes 0 where output <= 0, torch's rule; both contiguous (reference/linear.h has the layout).
inline void write_relu_mask(const Tensor& mask, const Tensor& output) {
  if (output.numel() == 0) return;
  const int64_t features = output.size(-1), rows = output.numel() / features;
  const auto type = output.scalar_type();
  auto* to = mask.mutable_data_ptr<uint8_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, type, "write_relu_mask", [&] {
    const auto* from = output.const_data_ptr<scalar_t>();
    for_groups(rows, features, [&](int64_t first, int64_t count, int64_t byte) {
      write_group(from + first, count, to + byte);
    });
  });
}

inline void apply_relu_mask(const Tensor& dz, const Tensor& grad, const Tensor& mask) {
  if (dz.numel() == 0) return;
  switch (dz.element_size()) {
    case 8:
      return apply_as<uint64_t>(dz, grad, mask);
    case 4:
      return apply_as<uint32_t>(dz, grad, mask);
    default:
      return apply_as<uint16_t>(dz, grad, mask);
  }
}

// One pass over memory, by blocks: what has been written is summed while it is in a cache,
// of which three in fp32 stay there.
inline constexpr int64_t block_elements = 1 << 16;
// Beyond what all cores together keep at hand; below, whole passes are the quicker ones.
inline constexpr int64_t least_elements = 1 << 22;

// ATen converts what it adds up in another type in a pass of its own, so that 16 bits do not pay.
inline bool takes_one_pass(const Tensor& grad, const Tensor& saved, Activation activation) {
  const auto type = grad.scalar_type();
  return activation != Activation::none &&
         (saved.scalar_type() == type || saved.scalar_type() == at::kByte) &&
         at::toOpMathType(type) == type && grad.numel() >= least_elements;
}

// Writes dz; gives sums over parts of the rows, which depend on sizes alone, [parts, features], or
// an undefined tensor.
inline Tensor one_pass(const Tensor& dz, const Tensor& grad, const Tensor& saved,
                       Activation activation, bool sums_wanted) {
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

}  // namespace fused::cpu
