// Gated layers through LibTorch: sizes that no block divides, halves of one weight, views, every
// subset of gradients. They are for the sanitizers, which see what a wrong size would touch; that
// values are right is tested in Python.

#include "tensors.h"

#include <random>
#include <thread>
#include <vector>

namespace {

constexpr const char* activations[] = {"relu", "gelu_tanh", "gelu_erf", "silu"};

struct Case {
  int64_t tokens, in, hidden;
  bool stacked, bias;
  std::string activation;
  unsigned wanted;  // a bit for each tensor
};

// A tensor whose rows are apart, every second time.
Tensor draw(std::mt19937& random, int64_t rows, int64_t cols) {
  if (random() % 2) return torch::randn({rows, cols}, torch::kDouble);
  return torch::randn({rows, cols + 3}, torch::kDouble).narrow(1, 2, cols);
}

void step(const Case& c, std::mt19937& random) {
  const size_t weights = c.stacked ? 1 : 2;
  variable_list leaves{draw(random, c.tokens, c.in)};
  for (size_t i = 0; i < weights; ++i) {
    leaves.push_back(draw(random, c.stacked ? 2 * c.hidden : c.hidden, c.in));
  }
  for (size_t i = 0; c.bias && i < weights; ++i) {
    leaves.push_back(torch::randn({leaves[1].size(0)}, torch::kDouble));
  }
  variable_list wanted;
  for (size_t i = 0; i < leaves.size(); ++i) {
    if (c.wanted >> i & 1) wanted.push_back(leaves[i].requires_grad_());
  }
  const auto &x = leaves[0], &gate = leaves[1];
  std::optional<Tensor> up, gate_bias, up_bias;
  if (c.bias) gate_bias = leaves[1 + weights];
  if (!c.stacked) up = leaves[2];
  if (!c.stacked && c.bias) up_bias = leaves[4];

  const auto y = fused::linear_glu(x, gate, up, gate_bias, up_bias, c.activation);
  if (wanted.empty()) return;
  torch::autograd::grad({y}, wanted, {draw(random, c.tokens, c.hidden)});
}

void try_some(unsigned seed, int count) {
  std::mt19937 random(seed);
  const auto pick = [&random](std::initializer_list<int64_t> from) {
    return *(from.begin() + random() % from.size());
  };
  for (int i = 0; i < count; ++i) {
    step({pick({0, 1, 2, 7, 33, 300}), pick({1, 3, 16}), pick({1, 5, 24, 129, 700}),
          random() % 2 == 0, random() % 2 == 0, activations[random() % 4],
          static_cast<unsigned>(random() % 32)},
         random);
  }
}

TEST(sizes_and_gradients) { try_some(1, 300); }

TEST(several_threads) {
  std::vector<std::thread> threads;
  for (unsigned k = 0; k < 4; ++k) threads.emplace_back([k] { try_some(10 + k, 60); });
  for (auto& thread : threads) thread.join();
}

// Blocks of rows are shared by torch's own threads.
TEST(torchs_threads) {
  at::set_num_threads(4);
  std::mt19937 random(3);
  for (const char* activation : activations) {
    step({4000, 8, 96, true, true, activation, 31}, random);
    step({4000, 8, 96, false, true, activation, 31}, random);
  }
}

}  // namespace
