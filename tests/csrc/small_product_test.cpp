// The kernels for small networks on a CPU, thread by thread (cuda_on_cpu/mma.h), against plain
// loops: tiles that end early, rows of any length at any address, sums. What lies behind the rows
// is NaN where it is read from, and must be there again where it is written beside.
// `small_product_test NAME` runs one test and exits with 1 where it fails.

#include "cuda_on_cpu/mma.h"

#include "cuda/kernels/small_product.cuh"
#include "expect.h"

#include <cstring>
#include <random>

using fused::Activation;
using fused::gemm::Pass;
using namespace fused::cuda::kernels;

namespace {

constexpr int seed = 1;

// Rows that are `gap` elements apart, `offset` elements behind an aligned address.
template <typename T>
struct Rows {
  int rows, cols;
  int64_t ld;
  std::vector<T> memory;
  T* data;

  Rows(int rows, int cols, int gap, int offset)
      : rows(rows), cols(cols), ld(cols + gap), memory(rows * ld + offset + 32, T(NAN)) {
    auto address = reinterpret_cast<uintptr_t>(memory.data());
    data = memory.data() + (address % 16 ? (16 - address % 16) / sizeof(T) : 0) + offset;
  }
  T& at(int r, int c) { return data[r * ld + c]; }

  // Integers, so that all sums are exact.
  void draw(std::mt19937& random) {
    for (int r = 0; r < rows; ++r) {
      for (int c = 0; c < cols; ++c) at(r, c) = T(static_cast<float>(int(random() % 3) - 1));
    }
  }
  // Whether no other elements than those of the rows are numbers.
  bool is_whole() {
    size_t numbers = 0;
    for (auto value : memory) numbers += !std::isnan(static_cast<float>(value));
    return numbers == static_cast<size_t>(rows) * cols;
  }
};

struct Sizes {
  int rows, cols, inner, gap, offset;
  bool with = true;       // bias, aux and sums
  bool infinite = false;  // one of the right operand's elements
};

double act(Activation activation, double z) {
  return activate<Activation::none, false, double>(
      activation == Activation::relu        ? activate<Activation::relu, false, double>(z)
      : activation == Activation::gelu_erf  ? activate<Activation::gelu_erf, false, double>(z)
      : activation == Activation::gelu_tanh ? activate<Activation::gelu_tanh, false, double>(z)
      : activation == Activation::silu      ? activate<Activation::silu, false, double>(z)
                                            : z);
}

template <typename T>
bool equals(T got, double want) {
  if (!std::isfinite(want)) {
    return std::isnan(want) ? std::isnan(static_cast<float>(got)) : static_cast<float>(got) == want;
  }
  const double one_ulp = std::is_same_v<T, __half> ? 1.0 / 1024 : 1.0 / 128;
  return std::abs(static_cast<float>(got) - want) <= one_ulp * std::abs(want) + 1e-6;
}

// Each of the results, against loops in fp64.
template <typename T, Pass pass, Activation activation>
void compare(const Sizes& s) {
  std::mt19937 random(seed);
  constexpr bool forward = pass == Pass::fprop, of_weight = pass == Pass::wgrad;
  Rows<T> left(of_weight ? s.inner : s.rows, of_weight ? s.rows : s.inner, s.gap, s.offset);
  Rows<T> right(forward ? s.cols : s.inner, forward ? s.inner : s.cols, s.gap, s.offset);
  Rows<T> result(s.rows, s.cols, s.gap, s.offset), aux(s.rows, s.cols, s.gap, s.offset);
  Rows<T> bias(1, s.cols, 0, s.offset), sums(1, of_weight ? s.rows : s.cols, 0, s.offset);
  for (auto* drawn : {&left, &right, &bias}) drawn->draw(random);
  if (s.infinite) right.at(right.rows - 1, right.cols - 1) = T(INFINITY);
  const bool saves = forward && s.with && activation != Activation::none;
  const bool reads = pass == Pass::dgrad && activation != Activation::none;
  if (reads) aux.draw(random);

  SmallProduct p;
  p.pass = pass, p.activation = activation;
  p.rows = s.rows, p.cols = s.cols, p.inner = s.inner;
  p.left = left.data, p.ld_left = left.ld, p.right = right.data, p.ld_right = right.ld;
  p.result = result.data, p.ld_result = result.ld;
  if (forward && s.with) p.bias = bias.data;
  if (!forward && s.with) p.sums = sums.data;
  if (saves || reads) p.aux = aux.data, p.ld_aux = aux.ld;
  const auto run = [&](auto sums) {
    using Shape = SmallShape<pass, sums.value>;
    on_cpu(small_blocks<pass, sums.value>(p), Shape::threads, [&] {
      alignas(32) static unsigned char shared[Shape::bytes];
      if (threadIdx.x == 0) std::memset(shared, 0xff, Shape::bytes);  // NaN in all types
      __syncthreads();
      small_product_block<T, pass, activation, sums.value>(p, blockIdx.x, shared);
    });
  };
  // Gradients of weights with and without sums are one kernel's.
  if (of_weight || p.sums != nullptr) {
    run(std::true_type());
  } else {
    run(std::false_type());
  }

  std::vector<double> column_sums(s.cols), row_sums(s.rows);
  bool right_products = true, right_aux = true, right_sums = true;
  for (int r = 0; r < s.rows; ++r) {
    for (int c = 0; c < s.cols; ++c) {
      double product = p.bias != nullptr ? static_cast<float>(bias.at(0, c)) : 0;
      for (int k = 0; k < s.inner; ++k) {
        const auto a = of_weight ? left.at(k, r) : left.at(r, k);
        const auto b = forward ? right.at(c, k) : right.at(k, c);
        product += double(static_cast<float>(a)) * static_cast<float>(b);
      }
      if (saves) right_aux = right_aux && equals(aux.at(r, c), product);
      if (forward) product = act(activation, product);
      if constexpr (reads) {
        product = activation_gradient<activation, false, double>(product,
                                                                 static_cast<float>(aux.at(r, c)));
      }
      column_sums[c] += product;
      right_products = right_products && equals(result.at(r, c), product);
    }
    for (int k = 0; of_weight && k < s.inner; ++k) row_sums[r] += static_cast<float>(left.at(k, r));
  }
  const auto& expected = of_weight ? row_sums : column_sums;
  for (int i = 0; p.sums != nullptr && i < sums.cols; ++i) {
    right_sums = right_sums && equals(sums.at(0, i), expected[i]);
  }
  const bool whole = s.infinite || (result.is_whole() && (p.aux == nullptr || aux.is_whole()) &&
                                    (p.sums == nullptr || sums.is_whole()));
  if (!right_products || !right_aux || !right_sums || !whole) {
    std::printf(
        "%d x %d x %d, gap %d, offset %d, with %d, infinite %d: products %d, aux %d, sums %d, "
        "whole "
        "%d\n",
        s.rows, s.cols, s.inner, s.gap, s.offset, s.with, s.infinite, right_products, right_aux,
        right_sums, whole);
    ++failures;
  }
}

// Around the sides of tiles and vectors, and so many rows that a block has them in two turns.
template <Pass pass, Activation activation>
void compare_many() {
  std::mt19937 random(seed);
  const auto one_of = [&random](std::initializer_list<int> values) {
    return values.begin()[random() % values.size()];
  };
  for (int i = 0; i < 30; ++i) {
    const Sizes s{one_of({1, 15, 16, 64, 65, 130, 257, 512}),
                  one_of({1, 8, 10, 16, 17, 24, 40}),
                  one_of({1, 7, 16, 65, 136, 257, 520}),
                  one_of({0, 0, 3, 8}),
                  one_of({0, 0, 1, 8}),
                  one_of({0, 1, 1}) == 1,
                  one_of({0, 0, 1}) == 1};
    compare<__nv_bfloat16, pass, activation>(s);
    if (i % 3 == 0) compare<__half, pass, activation>(s);
  }
}

template <Pass pass>
void compare_activations() {
  const Sizes few{20, 9, 16, 0, 0};
  compare<__nv_bfloat16, pass, Activation::gelu_tanh>(few);
  compare<__nv_bfloat16, pass, Activation::gelu_erf>(few);
  compare<__nv_bfloat16, pass, Activation::silu>(few);
  compare<__half, pass, Activation::gelu_tanh>(few);
}

void forward() { compare_many<Pass::fprop, Activation::relu>(); }
void forward_without_activation() { compare_many<Pass::fprop, Activation::none>(); }
void forward_of_each_activation() { compare_activations<Pass::fprop>(); }
void input_gradient() { compare_many<Pass::dgrad, Activation::relu>(); }
void input_gradient_without_activation() { compare_many<Pass::dgrad, Activation::none>(); }
void input_gradient_of_each_activation() { compare_activations<Pass::dgrad>(); }
void weight_gradient() { compare_many<Pass::wgrad, Activation::none>(); }

const Tests tests = {
    {"forward", forward},
    {"forward_without_activation", forward_without_activation},
    {"forward_of_each_activation", forward_of_each_activation},
    {"input_gradient", input_gradient},
    {"input_gradient_without_activation", input_gradient_without_activation},
    {"input_gradient_of_each_activation", input_gradient_of_each_activation},
    {"weight_gradient", weight_gradient},
};

}  // namespace

int main(int, char** argv) { return run_one(tests, argv); }
