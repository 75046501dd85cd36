#pragma once

// Both products of a gated layer and h = act(gate) ⊙ up in one kernel: the upper half of a tile's
// rows is of gate's weight, the lower of up's, so that a thread holds both values of an element.

#include "cuda/hopper/kernel.cuh"

#include <cute/arch/copy_sm90.hpp>
#include <cutlass/epilogue/collective/detail.hpp>

namespace fused::cuda::hopper {

inline constexpr int half_features = gemm::hopper::tile_features / 2;
inline constexpr int tokens_of_tile = gemm::hopper::tile_tokens;

template <typename Base>
struct TwoWeights : Base {
  using Value = typename Base::InternalElementA;
  using Stride = typename Base::StrideA;
  using Half = cute::Shape<cute::Int<half_features>, decltype(cute::get<2>(Tile{}))>;
  using SmemHalf = decltype(cute::tile_to_shape(typename Base::SmemLayoutAtomA{}, Half{}));
  static_assert(cute::size<1>(Cluster{}) == 1, "blocks of a cluster share operand B alone");

  template <typename Shape>
  static auto tma_of(const void* data, const Shape& shape, const Stride& stride) {
    return cute::make_tma_copy(
        cute::SM90_TMA_LOAD{},
        cute::make_tensor(static_cast<const Value*>(data), cute::make_layout(shape, stride)),
        SmemHalf{}, Half{}, cute::_1{});
  }
  using Shape = cute::Shape<int, int, int>;
  using Tma = decltype(tma_of(nullptr, Shape{}, Stride{}));

  struct Arguments : Base::Arguments {
    const void* up;
    Stride d_up;
    int features;
  };
  struct Params : Base::Params {
    Tma gate, up;
  };

  template <typename Problem>
  static Params to_underlying_arguments(const Problem& problem, const Arguments& arguments,
                                        void* workspace) {
    const Shape shape{arguments.features, cute::get<2>(problem), 1};
    return {Base::to_underlying_arguments(problem, arguments, workspace),
            tma_of(arguments.ptr_A, shape, arguments.dA),
            tma_of(arguments.up, shape, arguments.d_up)};
  }

  CUTLASS_DEVICE static void prefetch_tma_descriptors(const Params& params) {
    cute::prefetch_tma_descriptor(params.gate.get_tma_descriptor());
    cute::prefetch_tma_descriptor(params.up.get_tma_descriptor());
    cute::prefetch_tma_descriptor(params.tma_load_b.get_tma_descriptor());
  }

  template <typename Problem>
  CUTLASS_DEVICE auto load_init(const Problem& problem, const Params& params) const {
    const auto& [m, n, k, l] = problem;
    const auto tiles = [&](const Tma& tma) {
      const auto shape = cute::make_shape(m / 2, k, l);
      return cute::local_tile(tma.get_tma_tensor(shape), Half{},
                              cute::make_coord(cute::_, cute::_));
    };
    return cute::make_tuple(tiles(params.gate), cute::get<1>(Base::load_init(problem, params)),
                            tiles(params.up));
  }

  template <typename Inputs, typename Coordinates, typename Along>
  CUTLASS_DEVICE void load(const Params& params, typename Base::MainloopPipeline pipeline,
                           typename Base::PipelineState stage, const Inputs& inputs,
                           const Coordinates& at, Along k, int steps, int, uint32_t rank,
                           typename Base::TensorStorage& shared) {
    using cute::_;
    if (!cute::elect_one_sync()) return;
    const auto smem_a =
        cute::make_tensor(cute::make_smem_ptr(shared.smem_A.data()), typename Base::SmemLayoutA{});
    const auto smem_b =
        cute::make_tensor(cute::make_smem_ptr(shared.smem_B.data()), typename Base::SmemLayoutB{});
    const auto from = [&](const auto& tiles, int row) {
      return params.gate.get_slice(0).partition_S(tiles(_, _, row, _, cute::get<3>(at)));
    };
    const auto to = [&](int part) {
      const auto rows = cute::local_tile(smem_a, Half{}, cute::make_coord(part, 0));
      return params.gate.get_slice(0).partition_D(rows);
    };
    const int row = cute::get<0>(at);
    const auto from_gate = from(cute::get<0>(inputs), row),
               from_up = from(cute::get<2>(inputs), row);
    const auto to_gate = to(0), to_up = to(1);
    const auto slice_b = params.tma_load_b.get_slice(rank);
    const auto from_b =
        slice_b.partition_S(cute::get<1>(inputs)(_, _, cute::get<1>(at), _, cute::get<3>(at)));
    const auto to_b = slice_b.partition_D(smem_b);
    constexpr uint16_t all_blocks = (1u << cute::size(Cluster{})) - 1;
    CUTLASS_PRAGMA_NO_UNROLL
    for (; steps > 0; --steps, ++k, ++stage) {
      pipeline.producer_acquire(stage);
      auto* barrier = pipeline.producer_get_barrier(stage);
      const int s = stage.index();
      cute::copy(params.gate.with(*barrier), from_gate(_, _, _, *k), to_gate(_, _, _, s));
      cute::copy(params.up.with(*barrier), from_up(_, _, _, *k), to_up(_, _, _, s));
      cute::copy(params.tma_load_b.with(*barrier, all_blocks), from_b(_, _, _, *k),
                 to_b(_, _, _, s));
    }
  }
};

template <Activation activation, typename Element>
class GatedStore {
 public:
  using Block = cute::Shape<cute::Int<half_features>, cute::Int<tokens_of_tile>>;
  using SmemBlock =
      decltype(cute::tile_to_shape(cute::GMMA::Layout_MN_SW128_Atom<Element>{}, Block{}));
  static_assert(half_features * sizeof(Element) == 128, "a token's features are a swizzled row");
  // CUTLASS's kernel asks for these names.
  using ElementC = void;
  using ElementD = Element;
  using StrideC = cute::Stride<cute::_1, int64_t, int64_t>;
  using StrideD = StrideC;

  // The results use this memory one after the other. The memory saved holds more stages of the
  // operands.
  struct alignas(1024) SharedStorage {
    Element data[half_features * tokens_of_tile];
  };

  static auto tma_of(void* data, int features, int tokens, int64_t ld) {
    const auto layout =
        cute::make_layout(cute::make_shape(features, tokens), cute::make_stride(cute::_1{}, ld));
    return cute::make_tma_copy(cute::SM90_TMA_STORE{},
                               cute::make_tensor(static_cast<Element*>(data), layout), SmemBlock{},
                               Block{}, cute::_1{});
  }
  using Tma = decltype(tma_of(nullptr, 0, 0, 0));

  struct Arguments {
    const Element *gate_bias, *up_bias;  // or nullptr
    Element *gate, *up, *hidden;         // gate and up: or nullptr
    int64_t ld_gate, ld_up, ld_hidden;
    int features, tokens;
  };
  struct Params : Arguments {
    Tma to_gate, to_up, to_hidden;

    CUTLASS_DEVICE bool keeps() const { return this->gate != nullptr; }
  };

  template <typename Problem>
  static Params to_underlying_arguments(const Problem&, const Arguments& a, void*) {
    const auto tma = [&a](Element* data, int64_t ld) {
      return tma_of(data, a.features, a.tokens, ld);
    };
    const auto hidden = tma(a.hidden, a.ld_hidden);
    return {a, a.gate ? tma(a.gate, a.ld_gate) : hidden, a.up ? tma(a.up, a.ld_up) : hidden,
            hidden};
  }
  template <typename Problem>
  static size_t get_workspace_size(const Problem&, const Arguments&) {
    return 0;
  }

  CUTLASS_DEVICE explicit GatedStore(const Params& params) : params_(params) {}

  // One warp group, of a tile's sums.
  template <typename Problem, typename Shape, typename At, typename Sums, typename Mma,
            typename Residue>
  CUTLASS_DEVICE void operator()(Problem, Shape, At at, const Sums& sums, Mma, Residue, int thread,
                                 char* memory) {
    auto& shared = *reinterpret_cast<SharedStorage*>(memory);
    const int warp = thread / 32, lane = thread % 32;
    // A thread's sums are of two features, eight apart, and of pairs of tokens.
    const int feature = cute::get<0>(at) * half_features + 16 * warp + lane / 4;
    float gate_bias[2], up_bias[2];
    CUTLASS_PRAGMA_UNROLL
    for (int i = 0; i < 2; ++i) {
      gate_bias[i] = at_or_zero(params_.gate_bias, feature + 8 * i);
      up_bias[i] = at_or_zero(params_.up_bias, feature + 8 * i);
    }
    const auto gates = sums(cute::_, 0, 0), ups = sums(cute::_, 1, 0);
    const auto gate = [&](int i, int q) { return Element(gates(i) + gate_bias[q]); };
    const auto up = [&](int i, int q) { return Element(ups(i) + up_bias[q]); };
    const auto hidden = [&](int i, int q) {
      return Element(quick::activate<activation>(float(gate(i, q))) * float(up(i, q)));
    };
    if (params_.keeps()) {
      write(gate, params_.to_gate, at, thread, shared);
      write(up, params_.to_up, at, thread, shared);
    }
    write(hidden, params_.to_hidden, at, thread, shared);
  }

 private:
  CUTLASS_DEVICE float at_or_zero(const Element* bias, int feature) const {
    return bias != nullptr && feature < params_.features ? float(bias[feature]) : 0.0f;
  }

  // Stores value(place among a thread's sums, which of its two features) of all.
  template <typename Value, typename At>
  CUTLASS_DEVICE void write(const Value& value, const Tma& tma, const At& at, int thread,
                            SharedStorage& shared) const {
    const int warp = thread / 32, lane = thread % 32;
    // Where this lane's row of eight features of a transposed 8 x 8 matrix begins.
    const int chunk = 2 * warp + lane / 8 % 2, token = lane % 8 + lane / 16 * 8;
    Element* place = shared.data + token * half_features + (chunk ^ token % 8) * 8;
    CUTLASS_PRAGMA_UNROLL
    for (int j = 0; j < tokens_of_tile / 8; j += 2) {
      uint32_t matrices[4];
      CUTLASS_PRAGMA_UNROLL
      for (int q = 0; q < 4; ++q) {
        cutlass::Array<Element, 2> pair;
        CUTLASS_PRAGMA_UNROLL
        for (int c = 0; c < 2; ++c) pair[c] = value(4 * (j + q / 2) + 2 * (q % 2) + c, q % 2);
        matrices[q] = reinterpret_cast<const uint32_t&>(pair);
      }
      cute::SM90_U16x8_STSM_T::copy(
          matrices[0], matrices[1], matrices[2], matrices[3],
          *reinterpret_cast<cute::uint128_t*>(place + j * 8 * half_features));
    }
    cute::tma_store_fence();
    wait_for_all();
    if (thread == 0) {
      const auto shape = cute::make_shape(params_.features, params_.tokens);
      const auto block = cute::local_tile(tma.get_tma_tensor(shape), Block{}, cute::take<0, 2>(at));
      const auto values = cute::make_tensor(cute::make_smem_ptr(shared.data), SmemBlock{});
      const auto slice = tma.get_slice(0);
      cute::copy(tma, slice.partition_S(values), slice.partition_D(block));
      cute::tma_store_arrive();
      cute::tma_store_wait<0>();
    }
    wait_for_all();  // what is written next takes the place of these
  }
  CUTLASS_DEVICE static void wait_for_all() {
    cutlass::arch::NamedBarrier::sync(cutlass::NumThreadsPerWarpGroup,
                                      cutlass::arch::ReservedNamedBarriers::EpilogueBarrier);
  }

  const Params& params_;
};

template <gemm::Type type, Activation activation, bool transposed>
struct Glu {
  using Element = ElementOf<type>;
  using Epilogue =
      epilogue::collective::detail::Sm90TmaWarpSpecializedAdapter<GatedStore<activation, Element>>;
  static constexpr int epilogue_bytes = sizeof(typename Epilogue::SharedStorage);
  using Mainloop = TwoWeights<MainloopOf<Element, transposed, epilogue_bytes>>;
  using Gemm = GemmOf<Mainloop, Epilogue>;

  static cudaError_t run(const Product& p) {
    typename Gemm::Arguments arguments{};
    // As if the weights were one of whole tiles.
    const int tiles = static_cast<int>(gemm::hopper::tiles(p.m, half_features));
    arguments.problem_shape = {2 * tiles * half_features, p.n, p.k, 1};
    auto& mainloop = arguments.mainloop;
    mainloop.ptr_A = static_cast<const Element*>(p.a), mainloop.dA = stride_of<transposed>(p.lda);
    mainloop.ptr_B = static_cast<const Element*>(p.b), mainloop.dB = stride_of<true>(p.ldb);
    mainloop.up = p.up.weight, mainloop.d_up = stride_of<transposed>(p.up.ld);
    mainloop.features = p.m;
    const auto result = [](void* data) { return static_cast<Element*>(data); };
    arguments.epilogue = {static_cast<const Element*>(p.bias),
                          static_cast<const Element*>(p.up.bias),
                          result(p.aux),
                          result(p.up.preactivation),
                          result(p.d),
                          p.ld_aux,
                          p.ld_aux,
                          p.ldd,
                          p.m,
                          p.n};
    return launch<Gemm>(arguments, p);
  }
};

template <gemm::Type type, Activation activation, bool transposed>
constexpr Launch glu = Glu<type, activation, transposed>::run;

}  // namespace fused::cuda::hopper
