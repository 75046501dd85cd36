#include "cpu_relu_mask.h"

#include "gemm/epilogue.h"

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>

#include <algorithm>

namespace fused {
namespace {

// The mask's rows are padded to whole groups of bits.
constexpr int64_t group = gemm::mask_bits<int64_t>(1), group_bytes = group / 8;

template <typename T>
bool passes(T output) {
  return !(output <= 0);
}

// By its bits: -inf and all numbers below 0 are below -1023 as integers, every NaN is above.
// Compilers make vectors of this, and of the conversion to fp32 only where the processor has it.
bool passes(c10::Half output) {
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

template <typename T>
void write_rows(const T* output, int64_t rows, int64_t features, uint8_t* mask) {
  const int64_t groups_per_row = (features + group - 1) / group;
  const auto write = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / groups_per_row, first = (i - row * groups_per_row) * group;
      write_group(output + row * features + first, std::min(group, features - first),
                  mask + i * group_bytes);
    }
  };
  at::parallel_for(0, rows * groups_per_row, at::internal::GRAIN_SIZE / group, write);
}

}  // namespace

void write_relu_mask(const Tensor& mask, const Tensor& output) {
  if (output.numel() == 0) return;
  const int64_t features = output.size(-1), rows = output.numel() / features;
  const auto type = output.scalar_type();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, type, "write_relu_mask", [&] {
    write_rows(output.const_data_ptr<scalar_t>(), rows, features, mask.mutable_data_ptr<uint8_t>());
  });
}

}  // namespace fused
