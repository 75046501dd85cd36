#pragma once

// A product on Hopper's tensor cores, of CUTLASS 3's collectives: two warp groups compute tiles of
// 128 x 128 in turns ("pingpong"), so that one's epilogue runs while the other multiplies.

#include "cuda/hopper/product.h"
#include "cuda/kernels/launch.cuh"

#include <cutlass/array.h>
#include <cutlass/cutlass.h>
#include <cutlass/device_kernel.h>
#include <cutlass/epilogue/thread/activation.h>
#include <cutlass/gemm/kernel/gemm_universal_decl.h>
#include <cutlass/half.h>
#include <cutlass/cluster_launch.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/fusion/sm90_callbacks_tma_warpspecialized.hpp>
#include <cutlass/gemm/collective/builders/sm90_gmma_builder.inl>
#include <cutlass/gemm/collective/collective_builder_decl.hpp>
#include <cutlass/gemm/collective/collective_mma_decl.hpp>
#include <cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp>
#include <cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_cooperative.hpp>
#include <cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_pingpong.hpp>
#include <cutlass/gemm/kernel/tile_scheduler.hpp>

namespace fused::cuda::hopper {

namespace epilogue = cutlass::epilogue;
namespace fusion = cutlass::epilogue::fusion;

template <gemm::Type type>
using ElementOf =
    std::conditional_t<type == gemm::Type::bf16, cutlass::bfloat16_t, cutlass::half_t>;

#ifndef FUSED_HOPPER_SHAPES  // build_tools/tune_hopper.py tries others
using Tile = cute::Shape<cute::Int<gemm::hopper::tile_features>,
                         cute::Int<gemm::hopper::tile_tokens>, cute::_64>;
using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
// Each step ends with a barrier and a store: few large ones.
using EpilogueTile = cute::Shape<cute::_64, cute::_64>;
using Schedule = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
using EpilogueSchedule = cutlass::epilogue::TmaWarpSpecialized;
#endif
// How a product is parted: what a block computes at a time, and the blocks that share operands.
struct Wide {
  using Tile = hopper::Tile;
  using Cluster = hopper::Cluster;
  using Part = EpilogueTile;
};
// For few tokens: more blocks, and more steps under way in each. Along k the steps are the same, so
// that each sum has the same bits.
struct Narrow {
  using Tile = cute::Shape<cute::Int<gemm::hopper::narrow_features>,
                           cute::Int<gemm::hopper::narrow_tokens>, cute::_64>;
  using Cluster = cute::Shape<cute::_1, cute::_1, cute::_1>;
  using Part = cute::Shape<cute::_64, cute::_32>;
};

using Columns = cutlass::layout::ColumnMajor;
using Rows = cutlass::layout::RowMajor;
inline constexpr auto nearest = cutlass::FloatRoundStyle::round_to_nearest;
inline constexpr int vector = 8;  // elements of 16 bytes

// Sets what all kernels have in common.
template <typename Gemm>
cudaError_t launch(typename Gemm::Arguments arguments, const Product& p) {
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGemm;
  arguments.hw_info.sm_count = p.processors;
  auto& along = arguments.scheduler.raster_order;
  along = static_cast<std::remove_reference_t<decltype(along)>>(p.order.along);
  arguments.scheduler.max_swizzle_size = p.order.swizzle;
  const void* kernel = reinterpret_cast<const void*>(cutlass::device_kernel<Gemm>);
  static kernels::PerDevice has_memory;
  if (!has_memory([kernel] {
        return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    Gemm::SharedStorageSize) == cudaSuccess;
      })) {
    return cudaErrorInvalidValue;
  }
  auto params = Gemm::to_underlying_arguments(arguments, nullptr);
  void* given[] = {&params};
  using Shape = typename Gemm::CollectiveMainloop::DispatchPolicy::ClusterShape;
  const dim3 cluster(cute::size<0>(Shape{}), cute::size<1>(Shape{}), 1);
  const auto status = cutlass::ClusterLauncher::launch(
      Gemm::get_grid_shape(params), cluster, Gemm::get_block_shape(), Gemm::SharedStorageSize,
      p.stream, kernel, given);
  return status == cutlass::Status::kSuccess ? cudaSuccess : cudaErrorLaunchFailure;
}

// Operand B, and A where it is transposed, are read along k.
template <bool along_k>
auto stride_of(int64_t ld) {
  if constexpr (along_k) {
    return cute::make_stride(ld, cute::_1{}, int64_t{0});
  } else {
    return cute::make_stride(cute::_1{}, ld, int64_t{0});
  }
}

template <typename Element, bool transposed, int epilogue_bytes, typename Shape = Wide>
using MainloopOf = typename cutlass::gemm::collective::CollectiveBuilder<
    cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element,
    std::conditional_t<transposed, Rows, Columns>, vector, Element, Columns, vector, float,
    typename Shape::Tile, typename Shape::Cluster,
    cutlass::gemm::collective::StageCountAutoCarveout<epilogue_bytes>, Schedule>::CollectiveOp;

template <typename Mainloop, typename Epilogue>
using GemmOf = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop,
                                                    Epilogue, cutlass::gemm::PersistentScheduler>;

template <typename Element, bool transposed, typename Source, typename Fusion,
          typename Shape = Wide, typename Part = typename Shape::Part>
struct Kernel {
  using Epilogue = typename epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, typename Shape::Tile,
      typename Shape::Cluster, Part, float, float, Source, Columns, vector, Element, Columns,
      vector, EpilogueSchedule, Fusion>::CollectiveOp;
  static constexpr int epilogue_bytes = sizeof(typename Epilogue::SharedStorage);
  using Gemm = GemmOf<MainloopOf<Element, transposed, epilogue_bytes, Shape>, Epilogue>;
  using StrideD = typename Gemm::StrideD;

  static StrideD columns(int64_t ld) { return stride_of<false>(ld); }

  // The caller sets what the epilogue fuses.
  static auto arguments(const Product& p) {
    typename Gemm::Arguments arguments{};
    arguments.problem_shape = {p.m, p.n, p.k, 1};
    arguments.mainloop = {static_cast<const Element*>(p.a), stride_of<transposed>(p.lda),
                          static_cast<const Element*>(p.b), stride_of<true>(p.ldb)};
    arguments.epilogue.ptr_D = static_cast<Element*>(p.d);
    arguments.epilogue.dD = columns(p.ldd);
    return arguments;
  }
};

// One half of a block does this while the other multiplies: it must not take longer.
template <Activation activation>
struct Activate {
  CUTLASS_DEVICE static float of(float z) { return quick::activate<activation>(z); }
};

// saved is the output for ReLU, else the pre-activation.
template <Activation activation>
struct Derivative {
  CUTLASS_DEVICE static float of(float grad, float saved) {
    return quick::gradient<activation>(grad, saved);
  }
};

// Makes Function::of of elements a template of one parameter, the array, for Sm90Compute.
template <typename Function>
struct Each {
  template <typename T>
  struct Of {};  // of one element: asked for its arguments, of which there are none
  template <int n>
  struct Of<cutlass::Array<float, n>> {
    using Values = cutlass::Array<float, n>;
    template <typename... Operands>
    CUTLASS_DEVICE Values operator()(const Operands&... operands) const {
      Values result;
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < n; ++i) result[i] = Function::of(operands[i]...);
      return result;
    }
  };
};

}  // namespace fused::cuda::hopper
