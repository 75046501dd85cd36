#pragma once

// The shape, dtype and strides of every result, which Meta promises and CPU and CUDA allocate.

#include "core/activation.h"
#include "fused_linear.h"

#include <ATen/ATen.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <optional>
#include <type_traits>

namespace fused {

using OptionalType = std::optional<at::ScalarType>;

struct ConcreteAllocator {
  using Int = int64_t;
  static at::IntArrayRef sizes(const Tensor& tensor) { return tensor.sizes(); }
  static Tensor empty(at::IntArrayRef sizes, const Tensor& like, OptionalType dtype = {}) {
    return at::empty(sizes, like.options().dtype(dtype.value_or(like.scalar_type())));
  }
};

struct SymbolicAllocator {
  using Int = c10::SymInt;
  static c10::SymIntArrayRef sizes(const Tensor& tensor) { return tensor.sym_sizes(); }
  static Tensor empty(c10::SymIntArrayRef sizes, const Tensor& like, OptionalType dtype = {}) {
    return at::empty_symint(sizes, like.options().dtype(dtype.value_or(like.scalar_type())));
  }
};

// Tells whether torch's backward gives a weight's gradient by columns, as of any weight that is not
// contiguous. A placeholder (autograd/double_backward.h) has strides of 0.
inline bool grad_lies_by_columns(const Tensor& weight) {
  const auto outer = weight.sym_stride(0), inner = weight.sym_stride(1);
  if (inner == 1) return outer != weight.sym_size(1);
  return !(inner == 0 && outer == 0);
}

// Tells whether an input's rows are the columns of a contiguous matrix; its gradient lies likewise.
inline bool lies_by_columns(const Tensor& input) {
  const auto dim = input.dim();
  if (dim < 2 || input.sym_stride(dim - 2) != 1 || input.is_contiguous()) return false;
  for (int64_t d = 0; d + 2 < dim; ++d) {
    if (input.sym_size(d) != 1) return false;
  }
  return input.sym_stride(dim - 1) == input.sym_size(dim - 2);
}

template <class Allocator>
struct Shapes {
  using Int = typename Allocator::Int;

  // [*, features], with the leading dimensions of `like`
  static Tensor rows(const Tensor& like, const Int& features, OptionalType dtype = {}) {
    c10::SmallVector<Int, 5> sizes(Allocator::sizes(like).begin(), Allocator::sizes(like).end());
    sizes.back() = features;
    return Allocator::empty(sizes, like, dtype);
  }

  static Int features(const Tensor& tensor) { return Allocator::sizes(tensor).back(); }

  static Tensor output(const Tensor& input, const Tensor& weight) {
    return rows(input, Allocator::sizes(weight).front());
  }

  static Tensor mask(const Tensor& output) {
    return rows(output, mask_bytes(features(output)), at::kByte);
  }

  // The padding of the rows is hidden in the strides.
  static Tensor preactivation(const Tensor& output) {
    const auto wanted = features(output), padded = padded_features(wanted);
    const auto buffer = rows(output, padded);
    if constexpr (std::is_same_v<Int, int64_t>) {
      if (wanted == padded) return buffer;  // symbols are not compared
    }
    return buffer.narrow_symint(-1, 0, wanted);
  }

  // The tensor that a forward for training gives beside the output.
  static Tensor aux(const Tensor& output, Activation activation) {
    return saved_for(activation) == Saved::output ? mask(output) : preactivation(output);
  }

  static Tensor vector(const Tensor& like, const Int& features, bool wanted = true) {
    const std::array<Int, 1> sizes{wanted ? features : Int(0)};
    return Allocator::empty(sizes, like);
  }
  static Tensor unwanted(const Tensor& like) { return vector(like, 0, false); }

  static Tensor grad_input(const Tensor& input, bool wanted) {
    return wanted ? rows(input, features(input)) : unwanted(input);
  }
  // The gradient of a layer's input, in the layout that torch would give it.
  static Tensor grad_layer_input(const Tensor& input, bool wanted) {
    if (!wanted || !lies_by_columns(input)) return grad_input(input, wanted);
    const auto sizes = Allocator::sizes(input);
    const std::array<Int, 2> columns{sizes[input.dim() - 1], sizes[input.dim() - 2]};
    return Allocator::empty(columns, input).t().view_symint(input.sym_sizes());
  }
  static Tensor grad_weight(const Tensor& weight, bool wanted) {
    if (!wanted) return unwanted(weight);
    const auto sizes = Allocator::sizes(weight);
    if (!grad_lies_by_columns(weight)) return Allocator::empty(sizes, weight);
    const std::array<Int, 2> columns{sizes[1], sizes[0]};
    return Allocator::empty(columns, weight).t();
  }
  static Tensor grad_bias(const Tensor& weight, bool wanted) {
    return vector(weight, Allocator::sizes(weight).front(), wanted);
  }
};

// Puts zeros into the padding of the rows, so that saved tensors compare equal.
inline Tensor with_zero_padding(const Tensor& rows) {
  const auto features = rows.size(-1), padded = padded_features(features);
  if (features != padded) {
    auto sizes = rows.sizes().vec();
    sizes.back() = padded;
    rows.as_strided(sizes, rows.strides()).narrow(-1, features, padded - features).zero_();
  }
  return rows;
}

}  // namespace fused
