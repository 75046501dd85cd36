#pragma once

// ReLU's bits, stored beside their result: a byte is about eight features of a token, which eight
// lanes of a warp hold.

#include "cuda/hopper/kernel.cuh"

namespace fused::cuda::hopper {

// Bit k of the i-th lane's bytes becomes bit i of the k-th's, of lanes that are four apart.
__device__ inline uint32_t transpose_bits(uint32_t bits, int i) {
  const auto exchange = [&](int distance, uint32_t lower) {
    const uint32_t theirs = __shfl_xor_sync(~0u, bits, 4 * distance);
    bits = i & distance ? (bits & ~lower) | (theirs & ~lower) >> distance
                        : (bits & lower) | (theirs & lower) << distance;
  };
  exchange(4, 0x0f0f0f0f);
  exchange(2, 0x33333333);
  exchange(1, 0x55555555);
  return bits;
}

template <typename Element>
struct BitsStore : fusion::Sm90VisitorImpl<> {
  static_assert(cute::size<0>(EpilogueTile{}) == 64 && cute::size<1>(EpilogueTile{}) == 64,
                "a thread holds 32 elements of a step: two features, eight apart, of 16 tokens");

  static constexpr int tile_features = gemm::hopper::tile_features,
                       tile_tokens = gemm::hopper::tile_tokens;
  static_assert(tile_tokens == cutlass::NumThreadsPerWarpGroup, "a thread stores a token's bits");

  struct SharedStorage {};
  struct Arguments {
    uint8_t* bits;
    int64_t bytes_per_row;  // of whole tiles
  };
  using Params = Arguments;

  template <typename Problem>
  static constexpr Params to_underlying_arguments(const Problem&, const Arguments& arguments,
                                                  void*) {
    return arguments;
  }
  template <typename Problem>
  static bool can_implement(const Problem&, const Arguments&) {
    return true;
  }
  template <typename Problem>
  static size_t get_workspace_size(const Problem&, const Arguments&) {
    return 0;
  }
  template <typename Problem>
  static cutlass::Status initialize_workspace(const Problem&, const Arguments&, void*, cudaStream_t,
                                              cutlass::CudaHostAdapter*) {
    return cutlass::Status::kSuccess;
  }

  CUTLASS_HOST_DEVICE BitsStore() {}
  CUTLASS_HOST_DEVICE BitsStore(const Params& params, const SharedStorage&) : params_(params) {}

  // `Places`: of a thread's elements, from its first of the tile.
  template <typename Places>
  struct Callbacks : fusion::EmptyConsumerStoreCallbacks {
    static constexpr int steps_down = tile_features / 64, steps_across = tile_tokens / 64;
    static constexpr int bytes_of_token = tile_features / 8;

    Params params;
    Places places;
    int thread;
    int feature, token;    // of the tile's first
    int features, tokens;  // of the whole result
    uint32_t bits[steps_down][steps_across] = {};

    template <typename Sum, int n>
    CUTLASS_DEVICE cutlass::Array<Element, n> visit(const cutlass::Array<Sum, n>&, int part,
                                                    int down, int across,
                                                    const cutlass::Array<Element, n>& results) {
      const auto step = places(cute::_, cute::_, cute::_, down, across);
      CUTLASS_PRAGMA_UNROLL
      for (int i = 0; i < n; ++i) {
        const auto [by_features, by_tokens] = step(part * n + i) - step(0);
        const int place = 2 * by_features + 2 * (by_tokens / 8) + by_tokens % 8;
        const bool passes = !(float(results[i]) <= 0.0f);  // torch's rule: not at 0, but at NaN
        bits[down][across] |= uint32_t{passes} << place;
      }
      return results;
    }

    // A token's bits leave as one vector, by way of shared memory that waits for results.
    template <typename Shared, typename Wait, typename Results>
    CUTLASS_DEVICE void reduce(Shared&& shared, const Wait& wait, int, int, bool is_last,
                               const Results&) {
      if (!is_last) return;
      auto* bytes = reinterpret_cast<uint8_t*>(cute::raw_pointer_cast(shared.data()));
      static_assert(cute::cosize_v<typename std::decay_t<Shared>::layout_type> * sizeof(Element) >=
                    tile_tokens * bytes_of_token);
      CUTLASS_PRAGMA_UNROLL
      for (int down = 0; down < steps_down; ++down) {
        CUTLASS_PRAGMA_UNROLL
        for (int across = 0; across < steps_across; ++across) {
          put(bytes, transpose_bits(bits[down][across], thread % 32 / 4), down, across);
        }
      }
      wait();
      const auto row = *reinterpret_cast<const uint4*>(bytes + thread * bytes_of_token);
      // A cluster has blocks beyond the last feature, too.
      if (token + thread < tokens && feature < features) {
        auto* to = params.bits + (token + thread) * params.bytes_per_row + feature / 8;
        *reinterpret_cast<uint4*>(to) = row;
      }
      wait();
    }

    // A lane has two bytes of each of two tokens, 32 apart, after the exchange.
    CUTLASS_DEVICE void put(uint8_t* bytes, uint32_t four, int down, int across) const {
      const int warp = thread / 32, lane = thread % 32, i = lane / 4;
      const int first = 64 * down + 16 * warp;  // of 16 features
      const int left = features - feature - first;
      const uint32_t exist = left <= 0 ? 0 : left <= 8 ? 0xff : 0xffff;
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int at = 64 * across + 32 * half + 8 * (i / 2) + 2 * (lane % 4) + i % 2;
        const uint32_t two = __byte_perm(four, 0, half == 0 ? 0x20 : 0x31);
        auto* to = bytes + at * bytes_of_token + first / 8;
        *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(two & exist);
      }
    }
  };

  template <bool by_source, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(const fusion::ConsumerStoreArgs<Args...>& args) {
    const auto& at = args.tile_coord_mnkl;
    const auto& sizes = args.problem_shape_mnkl;
    return Callbacks<decltype(args.tCcD)>{{},
                                          params_,
                                          args.tCcD,
                                          args.thread_idx,
                                          cute::get<0>(at) * tile_features,
                                          cute::get<1>(at) * tile_tokens,
                                          cute::get<0>(sizes),
                                          cute::get<1>(sizes)};
  }

 private:
  Params params_;
};

}  // namespace fused::cuda::hopper
