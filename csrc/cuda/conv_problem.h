#pragma once

// A convolution as it is asked for, and what tells it from others.

#include "core/conv.h"

#include <ATen/Context.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <functional>
#include <thread>

namespace fused::cuda {

using ConvKey = c10::SmallVector<int64_t, 32>;  // short enough for no allocation

struct ConvProblem {
  const Tensor &image, &weight;
  const OptionalTensor& bias;
  std::array<int64_t, 2> stride, padding, dilation;
  int64_t groups;
  const conv::Geometry& geometry;

  ConvProblem(const Tensor& image_, const Tensor& weight_, const OptionalTensor& bias_,
              const conv::Geometry& g)
      : image(image_),
        weight(weight_),
        bias(bias_),
        stride(ints(g.stride)),
        padding(ints(g.padding)),
        dilation(ints(g.dilation)),
        groups(g.groups.guard_int(__FILE__, __LINE__)),
        geometry(g) {}

  // Everything that may decide which kernel cuDNN, or ATen, chooses.
  ConvKey key() const {
    const auto& context = at::globalContext();
    const bool benchmark = context.benchmarkCuDNN();
    // With benchmark torch has cuDNN's kernels compete in each thread anew.
    const auto thread = std::hash<std::thread::id>()(std::this_thread::get_id());
    ConvKey key{image.get_device(),
                static_cast<int64_t>(image.scalar_type()),
                conv::format_of(image, weight) == at::MemoryFormat::ChannelsLast,
                has_value(bias),
                context.userEnabledCuDNN(),
                context.deterministicCuDNN() || context.deterministicAlgorithms(),
                context.allowTF32CuDNN(at::Float32Op::CONV),
                benchmark ? static_cast<int64_t>(thread) : 0,
                groups};
    for (const auto values : {image.sizes(), weight.sizes(), at::IntArrayRef(stride),
                              at::IntArrayRef(padding), at::IntArrayRef(dilation)}) {
      key.append(values.begin(), values.end());
    }
    return key;
  }

  // ATen's call of cuDNN's fused form.
  Tensor fused(const Tensor& x, const Tensor& w, const OptionalTensor& b) const {
    return at::cudnn_convolution_relu(x, w, b, stride, padding, dilation, groups);
  }

 private:
  static std::array<int64_t, 2> ints(const conv::Geometry::Pair& pair) {
    return {pair[0].guard_int(__FILE__, __LINE__), pair[1].guard_int(__FILE__, __LINE__)};
  }
};

}  // namespace fused::cuda
