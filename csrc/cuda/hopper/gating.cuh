#pragma once

#include "cuda/hopper/kernel.cuh"

namespace fused::cuda::hopper {

template <Activation activation>
struct GradUp {
  CUTLASS_DEVICE static float of(float grad, float gate) {
    return grad * quick::activate<activation>(gate);
  }
};

template <Activation activation>
struct Hidden {
  CUTLASS_DEVICE static float of(float gate, float up) {
    return quick::activate<activation>(gate) * up;
  }
};

template <Activation activation>
struct GradGate {
  CUTLASS_DEVICE static float of(float grad, float gate, float up) {
    return quick::gradient<activation>(grad * up, gate);
  }
};

// The product is the gradient of h, which reaches no memory.
template <gemm::Type type, Activation activation, bool transposed>
struct Gating {
  using Element = ElementOf<type>;
  // Five tensors go through shared memory, which is worth more as further stages of the operands.
  using EpilogueTile = cute::Shape<cute::_64, cute::_32>;
  using Descriptor = epilogue::collective::detail::EpilogueDescriptor<Tile, EpilogueTile, Element,
                                                                      Element, EpilogueSchedule>;
  using Load = epilogue::collective::detail::AuxLoadDescriptor<Descriptor, Columns, Element>;
  using Up =
      fusion::Sm90AuxLoad<Load::Stages, EpilogueTile, Element, typename Load::Stride,
                          typename Load::SmemLayoutAtom, typename Load::CopyOpS2R, vector, false>;
  using Stored = epilogue::collective::detail::AuxStoreDescriptor<Descriptor, Columns, Element>;
  static constexpr bool nothing_if_null = true;
  using Store = fusion::Sm90AuxStore<Stored::Stages, EpilogueTile, Element, nearest,
                                     typename Stored::Stride, typename Stored::SmemLayoutAtom,
                                     typename Stored::CopyOpR2S, vector, nothing_if_null>;

  template <template <Activation> class Function, typename Result>
  using Compute =
      fusion::Sm90Compute<Each<Function<activation>>::template Of, Result, float, nearest>;

  // Each step's operands, by their places.
  using Fusion = fusion::Sm90TopologicalVisitor<
      float,
      cute::tuple<cute::seq<>, cute::seq<>, cute::seq<>, cute::seq<0, 1>, cute::seq<3>,
                  cute::seq<1, 2>, cute::seq<5>, cute::seq<0, 1, 2>>,
      fusion::Sm90AccFetch,           // 0: gradient of h
      fusion::Sm90SrcFetch<Element>,  // 1: gate
      Up,                             // 2
      Compute<GradUp, float>, Store,  // 3, 4
      Compute<Hidden, float>, Store,  // 5, 6
      Compute<GradGate, Element>>;    // 7: the result
  using Kernel = hopper::Kernel<Element, transposed, Element, Fusion, Wide, EpilogueTile>;

  static cudaError_t run(const Product& p) {
    auto arguments = Kernel::arguments(p);
    arguments.epilogue.ptr_C = static_cast<const Element*>(p.aux);
    arguments.epilogue.dC = Kernel::columns(p.ld_aux);
    const auto& g = p.gating;
    const auto store = [](void* data, int64_t ld) {
      return typename Store::Arguments{static_cast<Element*>(data), Kernel::columns(ld)};
    };
    arguments.epilogue.thread = {
        {},
        {},
        {static_cast<const Element*>(g.up), Element(0), Kernel::columns(g.ld_up)},
        {},
        store(g.grad_up, p.ldd),
        {},
        store(g.hidden, p.m),
        {}};
    return hopper::launch<typename Kernel::Gemm>(arguments, p);
  }
};

template <gemm::Type type, Activation activation, bool transposed>
constexpr Launch gating = Gating<type, activation, transposed>::run;

}  // namespace fused::cuda::hopper
