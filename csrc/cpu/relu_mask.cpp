#include "cpu/relu_mask.h"

#include "core/activation.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <algorithm>

namespace fused::cpu {
namespace {

// A mask's rows are padded to whole groups of bits.
constexpr int64_t group = mask_bits<int64_t>(1), group_bytes = group / 8;

template <typename T>
bool passes(T output) {
  return !(output <= 0);
}

// As integers, -inf and all numbers below 0 are below -1023, and every NaN is above. Compilers turn
// such comparisons into vector instructions on every processor.
bool passes(c10::Half output) {
  const auto bits = static_cast<int16_t>(output.x);
  return bits > static_cast<int16_t>(0xfc00) && bits != 0;
}

// Two loops, because compilers vectorise these.
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

// Copies a gradient or writes 0. T is an integer of the gradient's size. Two loops, because
// compilers vectorise these.
template <typename T>
void apply_group(T* dz, const T* grad, int64_t count, const uint8_t* mask) {
  T kept[group];
  for (int64_t i = 0; i < group_bytes; ++i) {
    for (int j = 0; j < 8; ++j) kept[8 * i + j] = static_cast<T>(-(mask[i] >> j & 1));
  }
  for (int64_t i = 0; i < count; ++i) dz[i] = grad[i] & kept[i];
}

// Calls fn(first element, number of elements, first byte of the mask) for each group of contiguous
// rows.
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

}  // namespace

void write_relu_mask(const Tensor& mask, const Tensor& output) {
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

void apply_relu_mask(const Tensor& dz, const Tensor& grad, const Tensor& mask) {
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

}  // namespace fused::cpu
