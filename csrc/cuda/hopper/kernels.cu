// build_tools/parts.py compiles each FUSED_KIND, FUSED_TYPE and FUSED_TRANSPOSED apart, as each
// takes a minute.

#include "cuda/hopper/backward.cuh"
#include "cuda/hopper/forward.cuh"
#include "cuda/hopper/gating.cuh"
#include "cuda/hopper/glu.cuh"

namespace fused::cuda::hopper {

template <>
Launch kernel_of<Kind::FUSED_KIND, gemm::Type::FUSED_TYPE, FUSED_TRANSPOSED>(
    Activation activation) {
  return with_activation(activation, [](auto constant) -> Launch {
    constexpr Activation act = decltype(constant)::value;
    constexpr bool gated = Kind::FUSED_KIND == Kind::gating || Kind::FUSED_KIND == Kind::glu;
    constexpr bool has_none =
        Kind::FUSED_KIND == Kind::forward || Kind::FUSED_KIND == Kind::narrow_forward;
    if constexpr ((act == Activation::none && !has_none) || (gated && act == Activation::relu)) {
      return nullptr;
    } else {
      return FUSED_KIND<gemm::Type::FUSED_TYPE, act, FUSED_TRANSPOSED>;
    }
  });
}

}  // namespace fused::cuda::hopper
