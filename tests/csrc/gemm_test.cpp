// csrc/gemm without a GPU.

#include "expect.h"
#include "gemm/problem.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <sstream>
#include <vector>

using namespace fused;
using namespace fused::gemm;

namespace {

double gelu(double z) {
  return 0.5 * z * (1 + std::tanh(0.7978845608028654 * (z + 0.044715 * z * z * z)));
}

double gelu_slope(double z) {
  const double h = 1e-6;
  return (gelu(z + h) - gelu(z - h)) / (2 * h);
}

// Computes a problem as cuBLASLt does, on the CPU and in double: column-major throughout, straight
// from the library's documentation. Our mapping of torch's matrices is held against it.
void matmul(const Problem& p, const Operands& operands) {
  const auto* a = static_cast<const double*>(operands.a);
  const auto* b = static_cast<const double*>(operands.b);
  auto* d = static_cast<double*>(operands.d);
  auto* bias = static_cast<double*>(operands.bias);
  auto* aux = static_cast<double*>(operands.aux);
  auto* bits = static_cast<uint8_t*>(operands.aux);
  const auto at_a = [&](int64_t i, int64_t l) {
    return p.transpose_a ? a[l + i * p.lda] : a[i + l * p.lda];
  };
  const auto at_b = [&](int64_t l, int64_t j) {
    return p.transpose_b ? b[j + l * p.ldb] : b[l + j * p.ldb];
  };
  const auto byte = [&](int64_t i, int64_t j) -> uint8_t& {
    return bits[j * p.ld_aux / 8 + i / 8];
  };

  std::vector<double> bias_gradient(p.m);
  for (int64_t j = 0; j < p.n; ++j) {
    for (int64_t i = 0; i < p.m; ++i) {
      double z = 0;
      for (int64_t l = 0; l < p.k; ++l) z += at_a(i, l) * at_b(l, j);
      const auto bit = static_cast<uint8_t>(1u << (i & 7));
      switch (p.epilogue) {
        case Epilogue::bias:
          z += bias[i];
          break;
        case Epilogue::relu_bias:
          z = std::max(z + bias[i], 0.0);
          break;
        case Epilogue::relu_aux_bias:
          z += bias[i];
          byte(i, j) = z >= 0 ? byte(i, j) | bit : byte(i, j) & ~bit;
          z = std::max(z, 0.0);
          break;
        case Epilogue::gelu_aux_bias:
          z += bias[i];
          aux[i + j * p.ld_aux] = z;
          z = gelu(z);
          break;
        case Epilogue::drelu_bgrad:
          z = byte(i, j) & bit ? z : 0;
          break;
        case Epilogue::dgelu_bgrad:
          z *= gelu_slope(aux[i + j * p.ld_aux]);
          break;
        default:
          break;
      }
      bias_gradient[i] += z;
      d[i + j * p.ldd] = z;
    }
  }
  if (p.epilogue == Epilogue::drelu_bgrad || p.epilogue == Epilogue::dgelu_bgrad) {
    for (int64_t i = 0; i < p.m; ++i) bias[i] = bias_gradient[i];
  }
  if (p.epilogue == Epilogue::bgradb) {
    for (int64_t j = 0; j < p.n; ++j) {
      bias[j] = 0;
      for (int64_t l = 0; l < p.k; ++l) bias[j] += at_b(l, j);
    }
  }
}

// A row-major matrix with room behind every row, which must stay as it was.
struct Rows {
  static constexpr double canary = 12345;
  int64_t rows, cols, ld;
  std::vector<double> values;

  Rows(int64_t rows, int64_t cols, int64_t extra, std::mt19937* random = nullptr)
      : rows(rows), cols(cols), ld(cols + extra), values(rows * ld, canary) {
    std::normal_distribution<double> normal;
    if (random) {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < cols; ++c) at(r, c) = normal(*random);
      }
    }
  }
  double& at(int64_t r, int64_t c) { return values[r * ld + c]; }
  Matrix matrix() { return {rows, cols, ld, false, values.data()}; }
  Matrix transposed() { return {cols, rows, ld, true, values.data()}; }
  bool padding_untouched() {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = cols; c < ld; ++c) {
        if (at(r, c) != canary) return false;
      }
    }
    return true;
  }
};

bool close(double a, double b) { return std::abs(a - b) < 1e-6 * (1 + std::abs(b)); }

struct Shape {
  int64_t rows, in, out;
};
constexpr Shape shapes[] = {{1, 1, 1}, {2, 3, 1}, {5, 7, 9}, {3, 4, 129}, {4, 2, 257}};
const Settings settings{0, 90, Math::full, SplitK::allowed, 1 << 20};

Problem run(const Matrix& left, const Matrix& right, const Matrix& result, Epilogue epilogue,
            void* bias = nullptr, void* aux = nullptr, int64_t ld_aux = 0) {
  const auto problem =
      matmul_problem(left, right, result, epilogue, Type::f64, bias, aux, ld_aux, settings);
  matmul(problem, {right.data, left.data, result.data, bias, aux});
  return problem;
}

// y = act(x Wᵀ + b), with what is saved, against three plain loops.
TEST(forward_mapping) {
  std::mt19937 random(0);
  for (auto [rows, in, out] : shapes) {
    for (auto activation : {Activation::none, Activation::relu, Activation::gelu_tanh}) {
      Rows x(rows, in, 2, &random), w(out, in, 3, &random), b(1, out, 0, &random), y(rows, out, 5);
      const bool aux = activation != Activation::none;
      Rows z(rows, padded_features(out), 0);
      std::vector<uint8_t> mask(rows * mask_bits(out) / 8, 0xff);
      const auto epilogue = *find_epilogue(Pass::fprop, activation, true, aux);
      const bool relu = activation == Activation::relu;
      const auto problem = run(x.matrix(), w.transposed(), y.matrix(), epilogue, b.values.data(),
                               relu ? static_cast<void*>(mask.data()) : z.values.data(),
                               relu ? mask_bits(out) : z.ld);
      EXPECT(problem.m == out && problem.n == rows && problem.k == in);
      EXPECT(problem.transpose_a && !problem.transpose_b);
      EXPECT(!objection(problem, 130100) || !aux);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t o = 0; o < out; ++o) {
          double expected = b.at(0, o);
          for (int64_t i = 0; i < in; ++i) expected += x.at(r, i) * w.at(o, i);
          if (relu) {
            const bool bit = mask[r * mask_bits(out) / 8 + o / 8] >> (o % 8) & 1;
            EXPECT(bit == (expected >= 0));
            expected = std::max(expected, 0.0);
          } else if (activation == Activation::gelu_tanh) {
            EXPECT(close(z.at(r, o), expected));
            expected = gelu(expected);
          }
          EXPECT(close(y.at(r, o), expected));
        }
        // Bits beyond the width are left as they were: one more column does not spill over.
        if (relu && out % 8 != 0) {
          EXPECT(mask[r * mask_bits(out) / 8 + out / 8] >> (out % 8) == 0xff >> (out % 8));
        }
      }
      EXPECT(y.padding_untouched());
    }
  }
}

// dz_prev = (dz W) · act'(prev) and its column sums: the next layer's input gradient.
TEST(input_gradient_mapping) {
  std::mt19937 random(1);
  for (auto [rows, in, out] : shapes) {
    for (auto activation : {Activation::none, Activation::relu, Activation::gelu_tanh}) {
      Rows dz(rows, out, 1, &random), w(out, in, 2, &random), dx(rows, in, 0), db(1, in, 0);
      Rows z(rows, padded_features(in), 0, &random);
      const int64_t row_bytes = mask_bits(in) / 8;
      std::vector<uint8_t> mask(rows * row_bytes);
      for (auto& byte : mask) byte = random();
      const bool aux = activation != Activation::none, relu = activation == Activation::relu;
      const auto epilogue = *find_epilogue(Pass::dgrad, activation, aux, aux);
      run(dz.matrix(), w.matrix(), dx.matrix(), epilogue, db.values.data(),
          relu ? static_cast<void*>(mask.data()) : z.values.data(), relu ? row_bytes * 8 : z.ld);
      for (int64_t i = 0; i < in; ++i) {
        double sum = 0;
        for (int64_t r = 0; r < rows; ++r) {
          double expected = 0;
          for (int64_t o = 0; o < out; ++o) expected += dz.at(r, o) * w.at(o, i);
          if (relu && !(mask[r * row_bytes + i / 8] >> (i % 8) & 1)) expected = 0;
          if (activation == Activation::gelu_tanh) expected *= gelu_slope(z.at(r, i));
          EXPECT(close(dx.at(r, i), expected));
          sum += expected;
        }
        if (aux) EXPECT(close(db.at(0, i), sum));
      }
    }
  }
}

// dW = dzᵀ x, and the column sums of dz from BGRADB.
TEST(weight_gradient_mapping) {
  std::mt19937 random(2);
  for (auto [rows, in, out] : shapes) {
    Rows dz(rows, out, 1, &random), x(rows, in, 4, &random), dw(out, in, 0), db(1, out, 0);
    const auto problem =
        run(dz.transposed(), x.matrix(), dw.matrix(),
            *find_epilogue(Pass::wgrad, Activation::none, true, false), db.values.data());
    EXPECT(problem.transpose_b && !problem.transpose_a);
    for (int64_t o = 0; o < out; ++o) {
      double sum = 0;
      for (int64_t r = 0; r < rows; ++r) sum += dz.at(r, o);
      EXPECT(close(db.at(0, o), sum));
      for (int64_t i = 0; i < in; ++i) {
        double expected = 0;
        for (int64_t r = 0; r < rows; ++r) expected += dz.at(r, o) * x.at(r, i);
        EXPECT(close(dw.at(o, i), expected));
      }
    }
  }
}

TEST(epilogue_table_is_consistent) {
  std::set<std::tuple<Pass, Activation, bool, bool>> keys;
  for (const auto& row : epilogue_table) {
    EXPECT(keys.emplace(row.pass, row.activation, row.bias, row.aux).second);
    // The library's own coding: 2 and 32 are the activations, 4 a bias, 128 an aux buffer, 8 and
    // 64 the derivatives, 16 a bias gradient.
    const auto bits = static_cast<uint32_t>(row.epilogue);
    EXPECT(((bits & 128) != 0) == row.aux);
    EXPECT(((bits & (4 | 16 | 512)) != 0) == row.bias);
    const bool relu = bits & (2 | 8), gelu = bits & (32 | 64);
    EXPECT(relu == (row.activation == Activation::relu));
    EXPECT(gelu == (row.activation == Activation::gelu_tanh));
    EXPECT(((bits & (8 | 64)) != 0) == is_backward_activation(row.epilogue));
    EXPECT(name(row.epilogue) == std::string(row.name));
  }
  for (auto pass : {Pass::fprop, Pass::dgrad, Pass::wgrad}) {
    for (bool bias : {false, true}) {
      for (bool aux : {false, true}) {
        EXPECT(!find_epilogue(pass, Activation::gelu_erf, bias, aux));
      }
    }
  }
  EXPECT(mask_bits(1) == 128 && mask_bits(128) == 128 && mask_bits(129) == 256);
  EXPECT(padded_features(1) == 8 && padded_features(8) == 8 && padded_features(785) == 792);
}

const Problem sample{0,          90,         Epilogue::relu_bias,
                     Type::bf16, Math::full, SplitK::allowed,
                     true,       false,      64,
                     32,         16,         16,
                     16,         64,         128,
                     true,       true,       true,
                     true,       true,       1 << 20};

// Every field is part of the key.
std::vector<Problem> variations() {
  std::vector<Problem> result(23, sample);
  result[0].device = 1;
  result[21].to_f32 = true;
  result[22].adds = true;
  result[1].epilogue = Epilogue::gelu_bias;
  result[2].type = Type::f16;
  result[3].math = Math::tf32;
  result[4].split_k = SplitK::forbidden;
  result[5].transpose_a = false;
  result[6].transpose_b = true;
  result[7].m++, result[8].n++, result[9].k++;
  result[10].lda++, result[11].ldb++, result[12].ldd++, result[13].ld_aux++;
  result[14].aligned_a = result[15].aligned_b = result[16].aligned_d = false;
  result[17].aligned_bias = result[18].aligned_aux = false;
  result[19].workspace_limit++;
  result[20].arch = 80;
  return result;
}

TEST(every_field_is_part_of_the_key) {
  const ProblemHash hash;
  std::set<size_t> hashes{hash(sample)};
  for (const auto& other : variations()) {
    EXPECT(!(other == sample));
    hashes.insert(hash(other));
  }
  EXPECT(hashes.size() == variations().size() + 1);
  EXPECT(sample == Problem(sample) && hash(sample) == hash(Problem(sample)));
  std::ostringstream text;
  text << sample;
  EXPECT(text.str().find("RELU_BIAS bf16 m=64 n=32 k=16 TN") == 0);
  alignas(256) char buffer[512];
  EXPECT(is_aligned(buffer) && is_aligned(buffer + 48) && !is_aligned(buffer + 8));
}

TEST(objections) {
  const auto refused = [](auto change, size_t version = 130100) {
    auto problem = sample;
    change(problem);
    return objection(problem, version) != nullptr;
  };
  EXPECT(!refused([](Problem&) {}));
  EXPECT(refused([](Problem& p) { p.k = 0; }));
  EXPECT(refused([](Problem& p) { p.n = 0; }));
  EXPECT(refused([](Problem& p) { p.k = 1, p.epilogue = Epilogue::dgelu_bgrad; }));
  EXPECT(refused([](Problem& p) { p.k = 1, p.epilogue = Epilogue::drelu; }));
  EXPECT(!refused([](Problem& p) { p.k = 1; }));
  EXPECT(!refused([](Problem& p) { p.n = 1; }));
  EXPECT(refused([](Problem& p) { p.n = 1; }, 120800));
  EXPECT(refused([](Problem& p) { p.lda = (int64_t{1} << 30) + 1; }));
  EXPECT(!refused([](Problem& p) { p.lda = int64_t{1} << 30; }));
  EXPECT(refused([](Problem& p) { p.epilogue = Epilogue::bgradb; }));
  EXPECT(!refused([](Problem& p) { p.epilogue = Epilogue::bgradb, p.transpose_b = true; }));
  const auto mask = [](Problem& p) { p.epilogue = Epilogue::relu_aux_bias; };
  EXPECT(!refused(mask));
  EXPECT(refused([&](Problem& p) { mask(p), p.ld_aux = 64; }));
  EXPECT(refused([&](Problem& p) { mask(p), p.ld_aux = 192; }));
  EXPECT(refused([&](Problem& p) { mask(p), p.aligned_aux = false; }));
  EXPECT(refused([](Problem& p) { p.epilogue = Epilogue::gelu_aux_bias, p.ld_aux = 68; }));
}

}  // namespace
