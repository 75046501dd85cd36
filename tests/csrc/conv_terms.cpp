// Every element of a convolution's result by its terms (csrc/cuda/tune/conv_terms.h), for Python.

#include "cuda/tune/conv_terms.h"

using namespace fused::cuda::tune;

extern "C" void sum_terms(const ConvShape* shape, const double* image, const double* weight,
                          double* result, double* magnitudes) {
  for (int64_t number = 0; number < elements_of(shape->result); ++number) {
    const auto element = element_of(shape->result, number);
    double sum = 0, magnitude = 0;
    for (int64_t k = 0; k < terms_of(*shape); ++k) {
      const auto term = term_of(*shape, element, k);
      if (term.in_padding) continue;
      const double product = image[term.image] * weight[term.weight];
      sum += product;
      magnitude += product < 0 ? -product : product;
    }
    result[offset_of(shape->result, element)] = sum;
    magnitudes[offset_of(shape->result, element)] = magnitude;
  }
}
