#pragma once

// The elements of a convolution's result as the sums that they are: which elements of image and
// weight are multiplied for each. Arithmetic only, for host and device.

#include <cstdint>

namespace fused::cuda::tune {

// Of four dimensions. Strides in elements.
struct Extents {
  int64_t sizes[4], strides[4];
};

struct ConvShape {
  Extents image;   // [batch, channels, height, width]
  Extents weight;  // [out, channels / groups, kernel height, kernel width]
  Extents result;  // [batch, out, height, width]
  int64_t stride[2], padding[2], dilation[2];
  int64_t groups;
};

struct Element {
  int64_t index[4];
};

constexpr int64_t elements_of(const Extents& e) {
  return e.sizes[0] * e.sizes[1] * e.sizes[2] * e.sizes[3];
}

// In the order of the dimensions, whatever the strides.
constexpr Element element_of(const Extents& e, int64_t number) {
  Element element{};
  for (int d = 3; d >= 0; --d) {
    element.index[d] = number % e.sizes[d];
    number /= e.sizes[d];
  }
  return element;
}

constexpr int64_t offset_of(const Extents& e, const Element& at) {
  int64_t offset = 0;
  for (int d = 0; d < 4; ++d) offset += at.index[d] * e.strides[d];
  return offset;
}

constexpr int64_t terms_of(const ConvShape& shape) {
  return shape.weight.sizes[1] * shape.weight.sizes[2] * shape.weight.sizes[3];
}

// A product in an element's sum: where its factors lie. In the padding the image's is 0.
struct Term {
  bool in_padding;
  int64_t image, weight;
};

constexpr Term term_of(const ConvShape& shape, const Element& result, int64_t number) {
  const auto& of_kernel = shape.weight.sizes;
  const int64_t column = number % of_kernel[3], row = number / of_kernel[3] % of_kernel[2];
  const int64_t channel = number / of_kernel[3] / of_kernel[2];
  const int64_t out = result.index[1];
  const int64_t group = out / (of_kernel[0] / shape.groups);
  const int64_t h = result.index[2] * shape.stride[0] - shape.padding[0] + row * shape.dilation[0];
  const int64_t w =
      result.index[3] * shape.stride[1] - shape.padding[1] + column * shape.dilation[1];
  if (h < 0 || h >= shape.image.sizes[2] || w < 0 || w >= shape.image.sizes[3]) {
    return {true, 0, 0};
  }
  return {false, offset_of(shape.image, {{result.index[0], group * of_kernel[1] + channel, h, w}}),
          offset_of(shape.weight, {{out, channel, row, column}})};
}

}  // namespace fused::cuda::tune
