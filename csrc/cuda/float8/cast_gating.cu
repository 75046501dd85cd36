// Casts of a gated layer's h, and of the gradients of gate and up.

#include "cuda/float8/cast.cuh"

namespace fused::cuda::float8 {
namespace {

template <typename Fn>
void with_both(const Size& size, Activation activation, const Fn& fn) {
  with_type(size.type, [&](auto element) {
    with_activation(activation, [&](auto constant) {
      if constexpr (decltype(constant)::value != Activation::none) fn(element, constant);
    });
  });
}

}  // namespace

void cast_gating(const Size& size, Activation activation, const Values& gate, const Values& up,
                 const Target& target, void* scratch, cudaStream_t stream) {
  with_both(size, activation, [&](auto element, auto constant) {
    using T = decltype(element);
    const Gated<T, constant.value> source{Matrix<T>(gate), Matrix<T>(up)};
    run<__NV_E4M3, false>(size, source, {{target}}, false, scratch, stream);
  });
}

void cast_gating_backward(const Size& size, Activation activation, const Values& grad,
                          const Values& gate, const Values& up, const Target& gate_target,
                          const Target& up_target, bool together, const Hidden& hidden,
                          void* scratch, cudaStream_t stream) {
  with_both(size, activation, [&](auto element, auto constant) {
    using T = decltype(element);
    const GatedGradient<T, constant.value> source{Matrix<T>(grad), Matrix<T>(gate), Matrix<T>(up)};
    run<__NV_E5M2, true>(size, source, {{gate_target, up_target}}, together, scratch, stream,
                         hidden);
  });
}

}  // namespace fused::cuda::float8
