// The protocol of csrc/handover.h, kept and broken on purpose, through LibTorch.
// `handover_test NAME` runs one test and exits with 1 where it fails.

#include "autograd/handover.h"
#include "expect.h"
#include "fused_linear.h"

#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <atomic>
#include <cstdio>
#include <functional>
#include <map>
#include <string>
#include <thread>

using at::Tensor;
using fused::autograd::handover::Producer;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

namespace {

// As tests/stacks.py compares in fp64.
bool same(const Tensor& a, const Tensor& b) {
  return a.sizes() == b.sizes() &&
         (a - b).abs().max().item<double>() <= 1e-12 * (1 + b.abs().max().item<double>());
}

bool same(const variable_list& a, const variable_list& b) {
  bool result = a.size() == b.size();
  for (size_t i = 0; result && i < a.size(); ++i) result = same(a[i], b[i]);
  return result;
}

Tensor leaf(at::IntArrayRef sizes) { return torch::randn(sizes, torch::kDouble).requires_grad_(); }

Tensor derivative(const Tensor& z) {
  const auto variable = z.clone().requires_grad_();
  return torch::autograd::grad({torch::gelu(variable, "tanh").sum()}, {variable})[0];
}

// A GELU layer, whose derivative must be applied exactly once (ReLU's may be applied twice), and
// what a consumer of its output needs to deal with it: what the layer itself has saved.
struct Layer {
  Tensor x = leaf({3, 4}), w = leaf({5, 4}), b = leaf({5});
  Tensor y = fused::linear_gelu(x, w, b, "tanh");
  Tensor z = at::linear(x, w, b).detach();
  Tensor slope = derivative(z);

  variable_list leaves() const { return {x, w, b}; }
  Producer* node() const { return dynamic_cast<Producer*>(y.grad_fn().get()); }
};

// A consumer of a layer's output, y -> 2 y, that lets a test do what it likes in the backward.
struct Probe : Function<Probe> {
  static thread_local std::function<Tensor(const Tensor&)> action;

  static Tensor forward(AutogradContext*, const Tensor& y) { return y * 2; }
  static variable_list backward(AutogradContext*, const variable_list& grads) {
    return {action(grads[0] * 2)};
  }
};
thread_local std::function<Tensor(const Tensor&)> Probe::action;

int running_task() { return torch::autograd::get_current_graph_task_id(); }

Tensor plain(const Tensor& grad) { return grad; }

// Gradients of the layer's leaves for the roots probe(y) and, if given, y itself.
variable_list run(const Layer& layer, std::function<Tensor(const Tensor&)> action,
                  const Tensor& second_root = {}) {
  Probe::action = std::move(action);
  const auto out = Probe::apply(layer.y);
  variable_list roots{out}, grads{torch::cos(out.detach())};
  if (second_root.defined()) roots.push_back(layer.y), grads.push_back(second_root);
  return torch::autograd::grad(roots, layer.leaves(), grads, /*retain_graph=*/true);
}

// What an honest consumer does: passes dz on and says so.
Tensor honest(const Layer& layer, const Tensor& grad) {
  auto dz = grad * layer.slope;
  layer.node()->leave(running_task(), {dz, {dz.sum(0)}, {layer.z}});
  return dz;
}

TEST(an_honest_note_is_trusted) {
  const Layer layer;
  const auto want = run(layer, plain);
  EXPECT(same(run(layer, [&](const Tensor& grad) { return honest(layer, grad); }), want));
  EXPECT(layer.node()->waiting() == 0);
}

// Trust is really placed in a note: one with a wrong content gives a wrong result, which the
// comparison that all tests use does find. Without this, the tests above could pass by luck.
TEST(a_lie_is_believed_and_found) {
  const Layer layer;
  const auto want = run(layer, plain);
  const auto wrong_dz = run(layer, [&](const Tensor& grad) {
    auto dz = grad * layer.slope + 1e-6;
    layer.node()->leave(running_task(), {dz, {dz.sum(0)}, {layer.z}});
    return dz;
  });
  for (size_t i = 0; i < want.size(); ++i) EXPECT(!same(wrong_dz[i], want[i]));

  const auto bias = torch::randn({5}, torch::kDouble);
  const auto wrong_bias = run(layer, [&](const Tensor& grad) {
    auto dz = grad * layer.slope;
    layer.node()->leave(running_task(), {dz, {bias}, {layer.z}});
    return dz;
  });
  EXPECT(same(wrong_bias[0], want[0]) && same(wrong_bias[1], want[1]));
  EXPECT(!same(wrong_bias[2], want[2]) && same(wrong_bias[2], bias));

  // What is left for the derivative of the rest, where another gradient is added.
  const auto extra = torch::randn({3, 5}, torch::kDouble);
  const auto wrong_saved = run(
      layer,
      [&](const Tensor& grad) {
        auto dz = grad * layer.slope;
        layer.node()->leave(running_task(), {dz, {dz.sum(0)}, {layer.z * 2}});
        return dz;
      },
      extra);
  EXPECT(!same(wrong_saved, run(layer, plain, extra)));

  // Passing dz on without a word is as wrong.
  const auto silent = run(layer, [&](const Tensor& grad) { return grad * layer.slope; });
  EXPECT(!same(silent, want));
}

// Notes of other runs, earlier and later, and for other nodes, are of no account.
TEST(a_stale_note_is_ignored) {
  const Layer layer, other;
  const auto want = run(layer, plain);
  const auto lie = torch::randn({3, 5}, torch::kDouble), bias = torch::randn({5}, torch::kDouble);
  int earlier = -1;
  run(layer, [&](const Tensor& grad) {
    earlier = running_task();
    return grad;
  });
  EXPECT(earlier >= 0);
  for (int task : {-1, earlier, earlier + 1000}) {
    layer.node()->leave(task, {lie, {bias}, {layer.z}});
  }
  EXPECT(same(run(layer, plain), want));
  EXPECT(same(run(layer,
                  [&](const Tensor& grad) {
                    other.node()->leave(running_task(), {lie, {bias}, {other.z}});
                    layer.node()->leave(running_task() + 1, {lie, {bias}, {layer.z}});
                    return grad;
                  }),
              want));
  // And with a hand-over in that same run.
  EXPECT(same(run(layer, [&](const Tensor& grad) { return honest(layer, grad); }), want));
}

// The tensor that arrives is not the one that the note names: something was added to it.
TEST(another_gradient_was_added) {
  const Layer layer;
  const auto extra = torch::randn({3, 5}, torch::kDouble);
  const auto want = run(layer, plain, extra);
  const auto consumer = [&](const Tensor& grad) { return honest(layer, grad); };
  EXPECT(same(run(layer, consumer, extra), want));
  EXPECT(!same(want, run(layer, plain)));
  // By a hook that came after the consumer had looked.
  const auto handle = layer.y.register_hook([&](const Tensor& grad) { return grad + extra; });
  EXPECT(same(run(layer, consumer), want));
  layer.y.remove_hook(handle);
  EXPECT(layer.node()->waiting() == 0);
}

// The note's own reference keeps the engine from adding in place to the tensor that it names.
TEST(the_engine_does_not_add_in_place) {
  const Layer layer;
  const auto extra = torch::randn({3, 5}, torch::kDouble);
  const auto want = run(layer, plain, extra);
  Tensor before, after;
  const auto got = run(
      layer,
      [&](const Tensor& grad) {
        auto dz = honest(layer, grad);
        before = dz.clone(), after = dz.detach();  // shares the memory, not the object
        return dz;
      },
      extra);
  EXPECT(same(got, want));
  EXPECT(torch::equal(before, after));
}

// A run that is broken off takes the notes that it has left with it.
TEST(aborted_runs_leave_nothing) {
  const Layer layer;
  const auto w2 = leaf({6, 5}), b2 = leaf({6});
  const auto out = fused::linear(layer.y, w2, b2);
  variable_list leaves = layer.leaves();
  leaves.push_back(w2), leaves.push_back(b2);
  const auto backward = [&] {
    for (auto& t : leaves) t.mutable_grad() = Tensor();
    out.backward(torch::cos(out.detach()), /*retain_graph=*/true);
    variable_list grads;
    for (const auto& t : leaves) grads.push_back(t.grad());
    return grads;
  };
  fused::autograd::handover::set_enabled(false);
  const auto want = backward();
  fused::autograd::handover::set_enabled(true);
  EXPECT(same(backward(), want));
  EXPECT(layer.node()->waiting() == 0);

  const auto handle = w2.register_hook([](const Tensor& grad) -> Tensor {
    throw std::runtime_error("on purpose");
    return grad;
  });
  for (int i = 0; i < 10; ++i) {
    bool thrown = false;
    try {
      backward();
    } catch (const std::exception& error) {
      thrown = std::string(error.what()).find("on purpose") != std::string::npos;
    }
    EXPECT(thrown);
    EXPECT(layer.node()->waiting() == 0);
  }
  w2.remove_hook(handle);
  EXPECT(same(backward(), want));
  EXPECT(layer.node()->waiting() == 0);
}

TEST(notes_are_kept_by_node_and_run) {
  const Layer a, b;
  const auto t = torch::ones({1}), u = torch::zeros({1});
  EXPECT(!a.node()->take(1));
  a.node()->leave(1, {t, {}, {}});
  a.node()->leave(2, {u, {}, {}});
  EXPECT(a.node()->waiting() == 2);
  EXPECT(!b.node()->take(1));
  EXPECT(!a.node()->take(3));
  EXPECT(a.node()->take(2)->passed.is_same(u));
  EXPECT(!a.node()->take(2));
  EXPECT(a.node()->take(1)->passed.is_same(t));
  EXPECT(a.node()->waiting() + b.node()->waiting() == 0);
  // A note that nobody shares the tensor of is none of a run that is over: the engine lets go of
  // the tensor as soon as it has added another to it, while the note is still to be read.
  a.node()->leave(1, {torch::ones({1}), {}, {}});
  b.node()->leave(2, {torch::ones({1}), {}, {}});
  b.node()->leave(1, {torch::ones({1}), {}, {}});
  EXPECT(b.node()->take(2));
  EXPECT(a.node()->take(1));
  EXPECT(b.node()->take(1));
  EXPECT(a.node()->waiting() + b.node()->waiting() == 0);

  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int k = 0; k < 8; ++k) {
    threads.emplace_back([&, k] {
      const auto mine = torch::full({1}, k);
      for (int i = 0; i < 2000; ++i) {
        auto* node = i % 2 ? a.node() : b.node();
        node->leave(10 * k, {mine, {}, {}});
        const auto note = node->take(10 * k);
        if (!note || !note->passed.is_same(mine)) ++wrong;
      }
    });
  }
  for (auto& thread : threads) thread.join();
  EXPECT(wrong == 0);
  EXPECT(a.node()->waiting() + b.node()->waiting() == 0);
}

struct Watcher : torch::autograd::FunctionPreHook {
  variable_list operator()(const variable_list& grads) override { return grads; }
};

struct PostWatcher : torch::autograd::FunctionPostHook {
  variable_list operator()(const variable_list& out, const variable_list&) override { return out; }
};

// What stands in the way of a consumer whose input is layer.y, "" for nothing.
std::string asked(const Layer& layer, std::function<void(const Tensor& out)> prepare = {},
                  bool create_graph = false, variable_list inputs = {}) {
  std::string answer = "not asked";
  Probe::action = [&](const Tensor& grad) {
    const auto node = torch::autograd::get_current_node();
    const char* objection = fused::autograd::handover::objection(*node);
    answer = objection ? objection : "";
    return grad;
  };
  auto out = Probe::apply(layer.y);
  if (prepare) prepare(out);
  if (inputs.empty()) inputs = layer.leaves();
  torch::autograd::grad({out}, inputs, {torch::ones_like(out)}, true, create_graph);
  return answer;
}

TEST(objections) {
  EXPECT(asked({}) == "");
  {
    const Layer layer;
    fused::autograd::handover::set_enabled(false);
    EXPECT(!fused::autograd::handover::enabled());
    EXPECT(asked(layer) == "switched off");
    fused::autograd::handover::set_enabled(true);
    EXPECT(fused::autograd::handover::enabled() && asked(layer) == "");
    EXPECT(asked(layer, {}, true) == "create_graph");
    {
      torch::autograd::DetectAnomalyGuard anomaly(false);
      EXPECT(asked(layer) == "anomaly mode");
    }
    const auto node = Probe::apply(layer.y).grad_fn();
    const at::NoGradGuard no_grad;
    EXPECT(std::string(fused::autograd::handover::objection(*node)) ==
           "no run of the eager engine");
  }
  {
    const Layer layer;
    const auto handle = layer.y.register_hook([](const Tensor& grad) { return grad; });
    EXPECT(asked(layer) == "a hook on the tensor");
    layer.y.remove_hook(handle);
  }
  {
    const Layer layer;
    layer.y.retain_grad();
    EXPECT(asked(layer) == "retain_grad");
  }
  {
    const Layer layer;
    layer.y.grad_fn()->add_pre_hook(std::make_unique<Watcher>());
    EXPECT(asked(layer) == "a hook on the node");
  }
  {
    const Layer layer;
    layer.y.grad_fn()->add_post_hook(std::make_unique<PostWatcher>());
    EXPECT(asked(layer) == "a hook on the node");
  }
  {
    const Layer layer;
    EXPECT(asked(layer, {}, false, {layer.y, layer.x}) == "its gradient was asked for");
    EXPECT(asked(layer, {}, false, {layer.x}) == "");
  }
}

// The consumer's own hooks are shown the gradient of its input as well.
TEST(objection_to_a_hook_on_the_consumer) {
  const Layer layer;
  const auto answer = asked(layer, [](const Tensor& out) {
    out.grad_fn()->add_post_hook(std::make_unique<PostWatcher>());
  });
  EXPECT(answer.find("hook") != std::string::npos);
  // What is shown before it runs is what arrives there.
  EXPECT(asked(layer, [](const Tensor& out) {
           out.grad_fn()->add_pre_hook(std::make_unique<Watcher>());
         }) == "");
}

TEST(objection_to_other_consumers) {
  const Layer layer;
  std::vector<std::string> answers;
  Probe::action = [&](const Tensor& grad) {
    const auto node = torch::autograd::get_current_node();
    const char* objection = fused::autograd::handover::objection(*node);
    answers.push_back(objection ? objection : "");
    return grad;
  };
  const auto backward = [&](const Tensor& root) {
    answers.clear();
    torch::autograd::grad({root}, layer.leaves(), {}, true);
  };
  backward((Probe::apply(layer.y) + layer.y.cos()).sum());
  EXPECT(answers == std::vector<std::string>{"another consumer"});
  backward((Probe::apply(layer.y) + Probe::apply(layer.y)).sum());
  EXPECT((answers == std::vector<std::string>{"another consumer", "another consumer"}));
  // Another consumer that does not lie between the root and the leaves is none.
  const auto idle = layer.y.cos();
  backward(Probe::apply(layer.y).sum());
  EXPECT(answers == std::vector<std::string>{""});
  // The count is made anew for every run.
  backward((Probe::apply(layer.y) + layer.y.cos()).sum());
  EXPECT(answers == std::vector<std::string>{"another consumer"});
}

}  // namespace

int main(int, char** argv) {
  torch::manual_seed(0);
  torch::set_num_threads(1);
  return run_one(argv);
}
