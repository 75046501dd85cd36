#pragma once

// ReLU's bits, stored beside the result that they are made of: a byte is about eight features of a
// token, which eight lanes of a warp hold.

#include "cuda/hopper/kernel.cuh"

namespace fused::cuda::hopper {

// Of lanes that are four apart: bit k of the i-th lane's bytes becomes bit i of the k-th's.
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

// Passes the result on.
template <typename Element>
struct BitsStore : fusion::Sm90VisitorImpl<> {
  static_assert(cute::size<0>(EpilogueTile{}) == 64 && cute::size<1>(EpilogueTile{}) == 64,
                "a thread holds 32 elements of a step: two features, eight apart, of 16 tokens");

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

  CUTLASS_DEVICE bool is_producer_load_needed() const { return false; }
  CUTLASS_DEVICE bool is_C_load_needed() const { return false; }

  template <class... Args>
  CUTLASS_DEVICE auto get_producer_load_callbacks(const fusion::ProducerLoadArgs<Args...>&) {
    return fusion::EmptyProducerLoadCallbacks{};
  }

  // `Places`: of a thread's elements, from its first of the tile.
  template <typename Places>
  struct Callbacks : fusion::EmptyConsumerStoreCallbacks {
    Params params;
    Places places;
    int feature, token;    // of the thread's first element
    int features, tokens;  // of the whole result
    uint32_t bits = 0;     // of a step

    CUTLASS_DEVICE Callbacks(const Params& params, const Places& places, int feature, int token,
                             int features, int tokens)
        : params(params),
          places(places),
          feature(feature),
          token(token),
          features(features),
          tokens(tokens) {}

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
        bits |= uint32_t{passes} << place;
      }
      return results;
    }

    // After the exchange a lane has two bytes of each of two tokens, 32 apart.
    CUTLASS_DEVICE void postreduce(int down, int across, int, bool) {
      const int lane = threadIdx.x % 32, i = lane / 4;
      const uint32_t bytes = transpose_bits(bits, i);
      bits = 0;
      const auto [by_features, by_tokens] = places(cute::_, cute::_, cute::_, down, across)(0);
      const int first = feature - i + by_features;  // of 16 features
      const uint32_t exist = first >= features ? 0 : first + 8 >= features ? 0xff : 0xffff;
      CUTLASS_PRAGMA_UNROLL
      for (int half = 0; half < 2; ++half) {
        const int at = token + by_tokens + 32 * half + 8 * (i / 2) + i % 2;
        if (at >= tokens) continue;
        const uint32_t two = __byte_perm(bytes, 0, half == 0 ? 0x20 : 0x31);
        auto* to = params.bits + at * params.bytes_per_row + first / 8;
        *reinterpret_cast<uint16_t*>(to) = static_cast<uint16_t>(two & exist);
      }
    }
  };

  template <bool by_source, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(const fusion::ConsumerStoreArgs<Args...>& args) {
    const int features = cute::get<0>(args.problem_shape_mnkl),
              tokens = cute::get<1>(args.problem_shape_mnkl);
    const auto [more_features, more_tokens] = args.residue_tCcD;
    return Callbacks<decltype(args.tCcD)>(params_, args.tCcD, features - more_features,
                                          tokens - more_tokens, features, tokens);
  }

 private:
  Params params_;
};

}  // namespace fused::cuda::hopper
