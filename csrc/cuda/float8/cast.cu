// Casts of tensors and gradients, and of activations.

#include "cuda/float8/cast.cuh"

namespace fused::cuda::float8 {

bool have_code() {
  using Any = Plain<__nv_bfloat16>;
  return kernels::compiled_arch(cast_kernel<Any, __NV_E4M3>) * 10 >= FUSED_FLOAT8_ARCH;
}

int64_t scratch_bytes(const Size& size, int targets) {
  return Scratch(size, targets, nullptr).bytes(size, targets);
}

void cast(const Size& size, const Values& input, bool gradient, const Target& target, void* scratch,
          cudaStream_t stream) {
  with_type(size.type, [&](auto element) {
    const Plain<decltype(element)> source{Matrix<decltype(element)>(input)};
    const auto with = [&](auto kind, auto sums) {
      run<kind.value, sums.value>(size, source, {{target}}, false, scratch, stream);
    };
    using E4m3 = std::integral_constant<__nv_fp8_interpretation_t, __NV_E4M3>;
    using E5m2 = std::integral_constant<__nv_fp8_interpretation_t, __NV_E5M2>;
    const bool sums = target.sums != nullptr;
    if (gradient) {
      return sums ? with(E5m2(), std::true_type()) : with(E5m2(), std::false_type());
    }
    return sums ? with(E4m3(), std::true_type()) : with(E4m3(), std::false_type());
  });
}

void cast_activation(const Size& size, Activation activation, const Values& z, const Target& target,
                     void* scratch, cudaStream_t stream) {
  with_type(size.type, [&](auto element) {
    using T = decltype(element);
    with_activation(activation, [&](auto constant) {
      const Activated<T, constant.value> source{Matrix<T>(z)};
      run<__NV_E4M3, false>(size, source, {{target}}, false, scratch, stream);
    });
  });
}

}  // namespace fused::cuda::float8
