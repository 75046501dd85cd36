#pragma once

// relu(conv2d(input, weight) + bias): its arguments, its checks and the shape of its results.

#include "core/check.h"

#include <array>
#include <vector>

namespace fused::conv {

using c10::SymInt;
using c10::SymIntArrayRef;

inline constexpr const char* op_name = "conv2d_relu";

inline const std::array<SymInt, 2> no_padding{0, 0};

// How the kernel moves over the image; of each pair the first is for the height.
struct Geometry {
  using Pair = std::array<SymInt, 2>;

  Geometry(SymIntArrayRef stride_, SymIntArrayRef padding_, SymIntArrayRef dilation_,
           const SymInt& groups_)
      : stride(pair("stride", stride_)),
        padding(pair("padding", padding_)),
        dilation(pair("dilation", dilation_)),
        groups(groups_) {
    check_least("stride", stride, 1);
    check_least("padding", padding, 0);
    check_least("dilation", dilation, 1);
    TORCH_CHECK(groups >= 1, op_name, ": groups must be at least 1, got ", groups);
  }

  Pair stride, padding, dilation;
  SymInt groups;

 private:
  static Pair pair(const char* what, SymIntArrayRef values) {
    TORCH_CHECK(values.size() == 1 || values.size() == 2, op_name, ": ", what,
                " must be one number or a pair (height, width), got ", values);
    return {values.front(), values.back()};
  }

  static void check_least(const char* what, const Pair& values, int64_t least) {
    TORCH_CHECK(values[0] >= least && values[1] >= least, op_name, ": ", what, " must be at least ",
                least, ", got ", SymIntArrayRef(values));
  }
};

// [channels, height, width] is a batch of one.
inline Tensor batched(const Tensor& image) { return image.dim() == 3 ? image.unsqueeze(0) : image; }
inline Tensor like(const Tensor& input, Tensor result) {
  return input.dim() == 3 ? result.squeeze(0) : result;
}

// A result is channels-last where the image or the kernel is, as of cuDNN and oneDNN.
inline at::MemoryFormat format_of(const Tensor& image, const Tensor& weight) {
  const auto last = at::MemoryFormat::ChannelsLast;
  return image.suggest_memory_format() == last || weight.suggest_memory_format() == last
             ? last
             : at::MemoryFormat::Contiguous;
}
inline at::MemoryFormat format_of(const Tensor& image) { return format_of(image, image); }

// image [batch, channels, height, width], weight [out, channels / groups, kernel height, width]
// -> [batch, out, height, width]
inline std::vector<SymInt> output_sizes(const Tensor& image, const Tensor& weight,
                                        const Geometry& g) {
  std::vector<SymInt> sizes{image.sym_size(0), weight.sym_size(0)};
  for (int d = 0; d < 2; ++d) {
    const auto reach = g.dilation[d] * (weight.sym_size(d + 2) - 1) + 1;
    sizes.push_back((image.sym_size(d + 2) + 2 * g.padding[d] - reach) / g.stride[d] + 1);
  }
  return sizes;
}

// Why no kernel of ours takes these, whatever their shapes, or nullptr.
inline const char* objection(const Tensor& input, const Tensor& weight,
                             const OptionalTensor& bias) {
  if (const char* why = fused::objection(input)) return why;
  if (const char* why = fused::objection(weight)) return why;
  return has_value(bias) ? fused::objection(*bias) : nullptr;
}

inline void check(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                  const Geometry& g) {
  check_floating(op_name, input);
  check_dtype_and_device(op_name, "weight", weight, input);
  TORCH_CHECK(input.dim() == 3 || input.dim() == 4, op_name,
              ": input must have shape [batch, channels, height, width] or [channels, "
              "height, width], got ",
              input.sym_sizes());
  const auto channels = input.sym_size(-3);
  TORCH_CHECK(weight.dim() == 4, op_name,
              ": weight must have shape [out_channels, channels / groups, kernel_height, "
              "kernel_width], got ",
              weight.sym_sizes());
  for (int d = 0; d < 4; ++d) {
    TORCH_CHECK(weight.sym_size(d) >= 1, op_name,
                ": weight must have at least one element along each dimension, got ",
                weight.sym_sizes());
  }
  TORCH_CHECK(weight.sym_size(1) * g.groups == channels, op_name,
              ": weight must have shape [out_channels, channels / groups, ...] to match ", channels,
              " channels of input ", input.sym_sizes(), " in ", g.groups, " groups, got ",
              weight.sym_sizes());
  TORCH_CHECK(weight.sym_size(0) % g.groups == 0, op_name, ": groups must divide the ",
              weight.sym_size(0), " out_channels of weight, got ", g.groups);
  for (int d = 0; d < 2; ++d) {
    const auto size = input.sym_size(d - 2) + 2 * g.padding[d];
    const auto reach = g.dilation[d] * (weight.sym_size(d + 2) - 1) + 1;
    TORCH_CHECK(size >= reach, op_name, ": input must have, with its padding, a ",
                d == 0 ? "height" : "width", " of at least the dilated kernel's, ", reach, ", got ",
                size);
    // Torch refuses padding alone as well, but where there is no image.
    TORCH_CHECK(!TORCH_GUARD_OR_FALSE(input.sym_size(d - 2).sym_eq(0)) || input.sym_size(0) == 0,
                op_name, ": input must have at least one pixel, got ", input.sym_sizes());
  }
  if (has_value(bias)) check_bias(op_name, *bias, weight);
}

inline void check_backward(const char* op, const Tensor& grad_output, const Tensor& output) {
  check_floating(op, grad_output);
  check_dtype_and_device(op, "output", output, grad_output);
  TORCH_CHECK(grad_output.dim() == 4, op,
              ": grad_output must have shape [batch, channels, height, width], got ",
              grad_output.sym_sizes());
  TORCH_CHECK(output.sym_sizes() == grad_output.sym_sizes(), op,
              ": output must have the shape of grad_output, ", grad_output.sym_sizes(), ", got ",
              output.sym_sizes());
}

inline Tensor empty(SymIntArrayRef sizes, const Tensor& like, at::MemoryFormat format) {
  return at::empty_symint(sizes, like.options().memory_format(format));
}

}  // namespace fused::conv
