// Casts of an activation's gradient.

#include "cuda/float8/cast.cuh"

namespace fused::cuda::float8 {

void cast_activation_backward(const Size& size, Activation activation, const Values& grad,
                              const Values& z, bool mask, const Target& target,
                              const Hidden& hidden, void* scratch, cudaStream_t stream) {
  with_type(size.type, [&](auto element) {
    using T = decltype(element);
    const auto with = [&](const auto& source) {
      run<__NV_E5M2, true>(size, source, {{target}}, false, scratch, stream, hidden);
    };
    if (mask) return with(Masked<T>{Matrix<T>(grad), Matrix<uint8_t>(z)});
    with_activation(activation, [&](auto constant) {
      if constexpr (constant.value != Activation::none) {
        with(Gradient<T, constant.value>{Matrix<T>(grad), Matrix<T>(z)});
      }
    });
  });
}

}  // namespace fused::cuda::float8
