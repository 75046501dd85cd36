// Valid programs of several threads over one graph, through LibTorch.

#include "core/policy.h"
#include "tensors.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <barrier>
#include <string>
#include <thread>
#include <vector>

namespace {

// Runs `work(k)` in threads that start together; how many threw something else than torch's error
// for a graph whose tensors another backward has freed.
template <typename Work>
int run_threads(int threads, const Work& work) {
  std::atomic<int> unexpected{0};
  std::barrier start(threads);
  std::vector<std::thread> running;
  for (int k = 0; k < threads; ++k) {
    running.emplace_back([&, k] {
      start.arrive_and_wait();
      try {
        work(k);
      } catch (const std::exception& error) {
        const std::string text = error.what();
        if (text.find("second time") == std::string::npos) {
          ++unexpected;
          std::printf("%s\n", text.c_str());
        }
      }
    });
  }
  for (auto& thread : running) thread.join();
  return unexpected;
}

// With low memory the second layer keeps what the first one has saved.
TEST(forward_beside_backward) {
  const auto x = leaf({8, 16}), w = leaf({16, 16}), w2 = leaf({16, 16});
  for (int i = 0; i < 300; ++i) {
    const auto y = fused::linear_gelu(x, w, {}, "tanh", "low");
    EXPECT(run_threads(4, [&](int k) {
             if (k == 0) {
               torch::autograd::grad({y.sum()}, {x, w});
             } else {
               fused::linear_gelu(y, w2, {}, "tanh", "low");
             }
           }) == 0);
  }
}

// Two heads on one output, and nobody keeps the graph: one of them may be told so.
TEST(two_heads_free_one_graph) {
  const auto x = leaf({8, 16}), w = leaf({16, 16}), w2 = leaf({16, 16}), w3 = leaf({16, 16});
  for (int i = 0; i < 300; ++i) {
    const auto y = fused::linear_gelu(x, w);
    const variable_list heads{fused::linear(y, w2).sum(), fused::linear(y, w3).sum()};
    EXPECT(run_threads(2, [&](int k) { torch::autograd::grad({heads[k]}, {x, w}); }) == 0);
  }
}

// Eight threads over one graph that is kept: every gradient is that of a lone run.
TEST(many_backwards_over_one_graph) {
  const auto x = leaf({4, 6}), b = leaf({6});
  std::vector<Tensor> weights;
  for (int i = 0; i < 4; ++i) weights.push_back(leaf({6, 6}));
  auto y = x;
  for (int i = 0; i < 3; ++i) {
    y = i % 2 ? fused::linear_relu(y, weights[i], b, "low")
              : fused::linear_gelu(y, weights[i], b, "none", "low");
  }
  y = fused::mlp(y, {weights[2], weights[3]}, c10::List<std::optional<Tensor>>({b, b}), "relu");
  variable_list leaves{x, b};
  leaves.insert(leaves.end(), weights.begin(), weights.end());
  const auto gradients = [&] {
    return torch::autograd::grad({y.cos().sum()}, leaves, {}, /*retain_graph=*/true);
  };
  const auto want = gradients();
  std::atomic<int> wrong{0};
  EXPECT(run_threads(8, [&](int) {
           for (int i = 0; i < 50; ++i) wrong += !same(gradients(), want);
         }) == 0);
  EXPECT(wrong == 0);
}

// A data loader's worker: the library was used before the process divided.
TEST(fork_after_use) {
  const auto x = leaf({4, 6}), w = leaf({6, 6});
  const auto step = [&] {
    return torch::autograd::grad({fused::linear(fused::linear_relu(x, w), w).sum()}, {x, w});
  };
  const auto want = step();
  const pid_t child = fork();
  if (child == 0) _exit(same(step(), want) ? 0 : 1);
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// A call sees one policy, though another thread changes it meanwhile.
TEST(policy_is_read_once) {
  using fused::Policy, fused::HeldPolicy;
  const auto before = fused::policy();
  {
    const HeldPolicy held;
    std::thread([] { fused::set_policy(Policy::eager); }).join();
    EXPECT(fused::policy() == before);
    {
      const HeldPolicy inner;  // of an operator within the call
    }
    EXPECT(fused::policy() == before);
    std::thread([] { EXPECT(fused::policy() == Policy::eager); }).join();
  }
  EXPECT(fused::policy() == Policy::eager);
  fused::set_policy(before);
}

}  // namespace
