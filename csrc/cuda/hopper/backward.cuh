#pragma once

#include "cuda/hopper/kernel.cuh"

namespace fused::cuda::hopper {

template <gemm::Type type, Activation activation, bool transposed>
struct Backward {
  using Element = ElementOf<type>;
  // Saved values come as the product's source, so that the result takes their place in shared
  // memory.
  using Gradient = fusion::Sm90EVT<
      fusion::Sm90Compute<Each<Derivative<activation>>::template Of, float, float, nearest>,
      fusion::Sm90AccFetch, fusion::Sm90SrcFetch<Element>>;
  static constexpr bool nothing_if_null = true, into_one_row = false, leaves_out_padding = true;
  using Sums = fusion::Sm90ColReduction<cutlass::plus, cutlass::plus, cutlass::plus, 0, Tile, float,
                                        float, nearest, cute::Stride<cute::_1, cute::_0, int64_t>,
                                        4, nothing_if_null, into_one_row, leaves_out_padding>;
  using Fusion = fusion::Sm90EVT<
      fusion::Sm90Compute<cutlass::epilogue::thread::Identity, Element, float, nearest>,
      fusion::Sm90EVT<Sums, Gradient>>;
  using Kernel = hopper::Kernel<Element, transposed, Element, Fusion>;

  static cudaError_t run(const Product& p) {
    auto arguments = Kernel::arguments(p);
    arguments.epilogue.ptr_C = static_cast<const Element*>(p.aux);
    arguments.epilogue.dC = Kernel::columns(p.ld_aux);
    arguments.epilogue.thread = {{{{}, {}, {}}, {p.partials, 0.0f, {}}}, {}};
    return hopper::launch<typename Kernel::Gemm>(arguments, p);
  }
};

template <gemm::Type type, Activation activation, bool transposed>
constexpr Launch backward = Backward<type, activation, transposed>::run;

}  // namespace fused::cuda::hopper
