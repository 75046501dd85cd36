// The kernels for small networks on a CPU, thread by thread (cuda_on_cpu/mma.h), against plain
// loops: tiles that end early, rows of any length at any address, sums. What lies behind the rows
// is NaN where it is read from, and must be there again where it is written beside.

#include "cuda_on_cpu/mma.h"

#include "cuda/small/kernels/small_product.cuh"
#include "expect.h"

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
  // Returns whether only the rows' elements are numbers.
  bool is_whole() {
    size_t numbers = 0;
    for (auto value : memory) numbers += !std::isnan(static_cast<float>(value));
    return numbers == static_cast<size_t>(rows) * cols;
  }
};

struct Sizes {
  int rows, cols, inner, gap, offset;
  int cluster;    // blocks that share a column's sums
  bool with;      // bias, aux and sums
  bool infinite;  // one of the right operand's elements
};

template <typename T>
bool equals(T got, double want) {
  if (!std::isfinite(want)) {
    return std::isnan(want) ? std::isnan(static_cast<float>(got)) : static_cast<float>(got) == want;
  }
  const double one_ulp = std::is_same_v<T, float>    ? 1e-6
                         : std::is_same_v<T, __half> ? 1.0 / 1024
                                                     : 1.0 / 128;
  return std::abs(static_cast<float>(got) - want) <= one_ulp * std::abs(want) + 1e-5;
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
  using Shape = SmallShape<T, pass>;
  const int blocks_down = (s.rows + Shape::rows - 1) / Shape::rows;
  if (pass == Pass::dgrad && s.with) p.cluster = std::min(s.cluster, blocks_down);
  on_cpu(
      small_blocks<T, pass>(p), Shape::threads, Shape::bytes,
      [&](unsigned char* shared) { SmallBlock<T, pass, activation>(p, blockIdx.x, shared).run(); },
      std::max(p.cluster, 1));

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
      if (forward) product = activate<activation, false, double>(product);
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
        "%d x %d x %d of %zu bytes, gap %d, offset %d, cluster %d, with %d, infinite %d: "
        "products %d, aux %d, sums %d, whole %d\n",
        s.rows, s.cols, s.inner, sizeof(T), s.gap, s.offset, s.cluster, s.with, s.infinite,
        right_products, right_aux, right_sums, whole);
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
  for (int i = 0; i < 15; ++i) {
    const Sizes s{one_of({1, 15, 16, 64, 65, 130, 257, 512}),
                  one_of({1, 8, 10, 16, 17, 24, 40}),
                  one_of({1, 7, 16, 65, 136, 257, 520}),
                  one_of({0, 0, 3, 8}),
                  one_of({0, 0, 1, 8}),
                  one_of({1, 2, 4}),
                  one_of({0, 1, 1}) == 1,
                  one_of({0, 0, 1}) == 1};
    compare<float, pass, activation>(s);
    if (i % 2 == 0) compare<__nv_bfloat16, pass, activation>(s);
    if (i % 5 == 0) compare<__half, pass, activation>(s);
  }
}

// ---- layers in one launch ---------------------------------------------------------------------

// Each layer's results against loops over what the layer before it has left.
template <typename T, Activation activation>
void compare_network(int tokens, std::vector<int> features, unsigned cluster, bool with, int gap) {
  std::mt19937 random(seed);
  const int count = static_cast<int>(features.size()) - 1;
  std::vector<Rows<T>> results, weights, biases, auxes;
  results.emplace_back(tokens, features[0], gap, 1).draw(random);
  SmallNetwork network;
  network.count = count;
  for (int i = 0; i < count; ++i) {
    const int in = features[i], out = features[i + 1];
    weights.emplace_back(out, in, gap, i), biases.emplace_back(1, out, 0, 0);
    weights.back().draw(random), biases.back().draw(random);
    results.emplace_back(tokens, out, gap, 0), auxes.emplace_back(tokens, out, gap, 0);
  }
  for (int i = 0; i < count; ++i) {
    auto& p = network.layers[i];
    p.activation = i + 1 < count ? activation : Activation::none;
    p.rows = tokens, p.cols = features[i + 1], p.inner = features[i];
    p.left = results[i].data, p.ld_left = results[i].ld;
    p.right = weights[i].data, p.ld_right = weights[i].ld;
    p.result = results[i + 1].data, p.ld_result = results[i + 1].ld;
    if (with) p.bias = biases[i].data, p.aux = auxes[i].data, p.ld_aux = auxes[i].ld;
  }
  using Shape = SmallShape<T, Pass::fprop>;
  on_cpu(
      tiles(tokens) * cluster, Shape::threads, Shape::bytes,
      [&](unsigned char* shared) {
        small_network_block<T, activation>(network, blockIdx.x, cluster, shared);
      },
      cluster);
  for (int i = 0; i < count; ++i) {
    const bool hidden = i + 1 < count;
    bool right = results[i + 1].is_whole();
    for (int r = 0; r < tokens; ++r) {
      for (int c = 0; c < features[i + 1]; ++c) {
        double z = with ? static_cast<float>(biases[i].at(0, c)) : 0;
        for (int k = 0; k < features[i]; ++k) {
          z += double(static_cast<float>(results[i].at(r, k))) *
               static_cast<float>(weights[i].at(c, k));
        }
        if (hidden && with) right = right && equals(auxes[i].at(r, c), z);
        if (hidden) z = activate<activation, false, double>(z);
        right = right && equals(results[i + 1].at(r, c), z);
      }
    }
    if (right) continue;
    std::printf("layer %d of %zu bytes, %d tokens, cluster %u, with %d, gap %d: wrong\n", i,
                sizeof(T), tokens, cluster, with, gap);
    ++failures;
  }
}

// ---- errors against fp64 beside those of eager's way
// ---------------------------------------------

// The root mean square of errors, each as a part of what rounding may cost there.
struct Errors {
  double squares = 0;
  int count = 0;
  void add(double difference, double unit) { squares += std::pow(difference / unit, 2), ++count; }
  double mean() const { return std::sqrt(squares / count); }
};

// An input's gradient behind an activation, and its column sums. Eager rounds the product, the
// derivative times it, and the sum of what is stored; its functions are taken as exact.
template <typename T, Activation activation>
void compare_errors(int rows, int cols, int inner) {
  using Shape = SmallShape<T, Pass::dgrad>;
  std::mt19937 random(seed);
  const auto uniform = [&random](Rows<T>& to, double most) {
    for (int r = 0; r < to.rows; ++r) {
      for (int c = 0; c < to.cols; ++c) {
        to.at(r, c) = T(static_cast<float>(std::uniform_real_distribution(-most, most)(random)));
      }
    }
  };
  Rows<T> grad(rows, inner, 0, 0), weight(inner, cols, 0, 0), saved(rows, cols, 0, 0);
  Rows<T> result(rows, cols, 0, 0), sums(1, cols, 0, 0);
  uniform(grad, 1), uniform(weight, 3 / std::sqrt(inner)), uniform(saved, 4);

  SmallProduct p;
  p.pass = Pass::dgrad, p.activation = activation;
  p.rows = rows, p.cols = cols, p.inner = inner;
  p.left = grad.data, p.ld_left = grad.ld, p.right = weight.data, p.ld_right = weight.ld;
  p.result = result.data, p.ld_result = result.ld;
  p.aux = saved.data, p.ld_aux = saved.ld, p.sums = sums.data;
  p.cluster = (rows + Shape::rows - 1) / Shape::rows;
  on_cpu(
      small_blocks<T, Pass::dgrad>(p), Shape::threads, Shape::bytes,
      [&](unsigned char* shared) {
        SmallBlock<T, Pass::dgrad, activation>(p, blockIdx.x, shared).run();
      },
      p.cluster);

  const auto rounded = [](double x) -> double {
    return static_cast<float>(T(static_cast<float>(x)));
  };
  const double unit = std::is_same_v<T, __half> ? 0x1p-11 : 0x1p-8;
  Errors ours, eager, our_sums, eager_sums;
  for (int c = 0; c < cols; ++c) {
    double sum = 0, magnitude_of_sum = 0, stored_sum = 0;
    for (int r = 0; r < rows; ++r) {
      double product = 0, magnitude = 0;
      for (int k = 0; k < inner; ++k) {
        const double term =
            double(static_cast<float>(grad.at(r, k))) * static_cast<float>(weight.at(k, c));
        product += term, magnitude += std::abs(term);
      }
      const double slope =
          activation_gradient<activation, false, double>(1, static_cast<float>(saved.at(r, c)));
      const double exact = product * slope, stored = rounded(rounded(product) * slope);
      // Where the derivative is nearly 0 its own error in fp32 counts.
      const double scale = unit * std::abs(slope) * magnitude + 0x1p-18 * std::abs(product);
      ours.add(static_cast<float>(result.at(r, c)) - exact, scale);
      eager.add(stored - exact, scale);
      sum += exact, magnitude_of_sum += std::abs(exact), stored_sum += stored;
    }
    our_sums.add(static_cast<float>(sums.at(0, c)) - sum, unit * magnitude_of_sum);
    eager_sums.add(rounded(stored_sum) - sum, unit * magnitude_of_sum);
  }
  constexpr double promised = 1.1;
  if (ours.mean() <= promised * eager.mean() && our_sums.mean() <= promised * eager_sums.mean()) {
    return;
  }
  std::printf("%d x %d x %d, activation %d: errors %g (eager %g), of sums %g (eager %g)\n", rows,
              cols, inner, static_cast<int>(activation), ours.mean(), eager.mean(), our_sums.mean(),
              eager_sums.mean());
  ++failures;
}

template <typename T>
void compare_all_errors(int rows, int cols, int inner) {
  compare_errors<T, Activation::relu>(rows, cols, inner);
  compare_errors<T, Activation::gelu_tanh>(rows, cols, inner);
  compare_errors<T, Activation::gelu_erf>(rows, cols, inner);
  compare_errors<T, Activation::silu>(rows, cols, inner);
}

TEST(input_gradient_is_as_exact_as_eager) {
  compare_all_errors<__nv_bfloat16>(256, 64, 64);
  compare_all_errors<__half>(256, 64, 64);
  compare_all_errors<__nv_bfloat16>(256, 256, 10);
  compare_all_errors<__half>(64, 128, 256);
}

TEST(network) {
  compare_network<float, Activation::relu>(40, {17, 40, 33, 6}, 2, true, 0);
  compare_network<float, Activation::silu>(16, {64, 64, 64}, 4, true, 0);
  compare_network<float, Activation::relu>(33, {300, 20, 1}, 1, false, 3);
  compare_network<__nv_bfloat16, Activation::gelu_erf>(40, {17, 70, 64, 33, 9}, 4, true, 1);
  compare_network<__nv_bfloat16, Activation::relu>(20, {16, 16, 16}, 8, false, 0);
  compare_network<__half, Activation::relu>(9, {24, 100, 8}, 2, true, 0);
}

TEST(forward) { compare_many<Pass::fprop, Activation::relu>(); }
TEST(forward_without_activation) { compare_many<Pass::fprop, Activation::none>(); }
TEST(input_gradient) { compare_many<Pass::dgrad, Activation::relu>(); }
TEST(input_gradient_without_activation) { compare_many<Pass::dgrad, Activation::none>(); }
TEST(weight_gradient) { compare_many<Pass::wgrad, Activation::none>(); }

}  // namespace
