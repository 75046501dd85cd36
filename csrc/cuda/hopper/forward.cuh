#pragma once

#include "cuda/hopper/bits.cuh"

namespace fused::cuda::hopper {

// Stores beside act(product + bias), if `aux`, the pre-activation or ReLU's bits.
template <gemm::Type type, Activation activation, bool transposed, bool aux, typename Shape = Wide>
struct Forward {
  using Tile = typename Shape::Tile;
  using Element = ElementOf<type>;
  static constexpr bool stores_bits = aux && activation == Activation::relu,
                        stores_preactivation = aux && !stores_bits;
  using Bias = fusion::Sm90ColBroadcast<0, Tile, Element, float,
                                        cute::Stride<cute::_1, cute::_0, int64_t>, vector, true>;
  using Biased = fusion::Sm90EVT<fusion::Sm90Compute<cutlass::plus, float, float, nearest>, Bias,
                                 fusion::Sm90AccFetch>;

  using Descriptor = epilogue::collective::detail::EpilogueDescriptor<Tile, EpilogueTile, void,
                                                                      Element, EpilogueSchedule>;
  using Store = epilogue::collective::detail::AuxStoreDescriptor<Descriptor, Columns, Element>;
  using Stored =
      fusion::Sm90EVT<fusion::Sm90AuxStore<Store::Stages, EpilogueTile, Element, nearest,
                                           typename Store::Stride, typename Store::SmemLayoutAtom,
                                           typename Store::CopyOpR2S, vector, false>,
                      Biased>;

  using Preactivation = std::conditional_t<stores_preactivation, Stored, Biased>;
  using Active = fusion::Sm90EVT<
      fusion::Sm90Compute<Each<Activate<activation>>::template Of, Element, float, nearest>,
      Preactivation>;
  using Fusion =
      std::conditional_t<stores_bits, fusion::Sm90EVT<BitsStore<Element>, Active>, Active>;
  using Kernel = hopper::Kernel<Element, transposed, void, Fusion, Shape>;

  static cudaError_t run(const Product& p) {
    auto arguments = Kernel::arguments(p);
    const typename Bias::Arguments bias{static_cast<const Element*>(p.bias), Element(0), {}};
    if constexpr (stores_bits) {
      arguments.epilogue.thread = {{{bias, {}, {}}, {}},
                                   {static_cast<uint8_t*>(p.aux), p.ld_aux / 8}};
    } else if constexpr (stores_preactivation) {
      const typename Kernel::StrideD stride = Kernel::columns(p.ld_aux);
      arguments.epilogue.thread = {{{bias, {}, {}}, {static_cast<Element*>(p.aux), stride}}, {}};
    } else {
      arguments.epilogue.thread = {{bias, {}, {}}, {}};
    }
    return hopper::launch<typename Kernel::Gemm>(arguments, p);
  }
};

template <gemm::Type type, Activation activation, bool transposed>
constexpr Launch forward = Forward<type, activation, transposed, false>::run;

template <gemm::Type type, Activation activation, bool transposed>
constexpr Launch narrow_forward = Forward<type, activation, transposed, false, Narrow>::run;

template <gemm::Type type, Activation activation, bool transposed>
constexpr Launch saving_forward = Forward<type, activation, transposed, true>::run;

}  // namespace fused::cuda::hopper
