// The protocol of csrc/handover.h, kept and broken on purpose, through LibTorch.

#include "autograd/handover.h"
#include "tensors.h"

#include <torch/csrc/autograd/graph_task.h>

#include <functional>
#include <string>

using fused::autograd::handover::Producer;
using torch::autograd::AutogradContext;
using torch::autograd::Function;

namespace {

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

// Gradients of the layer's leaves for the root probe(y).
variable_list run(const Layer& layer, std::function<Tensor(const Tensor&)> action) {
  Probe::action = std::move(action);
  const auto out = Probe::apply(layer.y);
  return torch::autograd::grad({out}, layer.leaves(), {torch::cos(out.detach())},
                               /*retain_graph=*/true);
}

// What a consumer does: passes dz on and says so, or something that is off.
Tensor passed_on(const Layer& layer, const Tensor& grad, double off = 0, const Tensor& bias = {}) {
  auto dz = grad * layer.slope + off;
  layer.node()->leave(running_task(), {dz, {bias.defined() ? bias : dz.sum(0)}, {layer.z}});
  return dz;
}

// Trust is really placed in a note: one with a wrong content gives a wrong result, which the
// comparison that all tests use does find.
TEST(a_note_is_believed) {
  const Layer layer;
  const auto bias = torch::randn({5}, torch::kDouble);
  const auto want = run(layer, plain);
  EXPECT(same(run(layer, [&](const Tensor& grad) { return passed_on(layer, grad); }), want));
  EXPECT(layer.node()->waiting() == 0);

  const auto dz = run(layer, [&](const Tensor& grad) { return passed_on(layer, grad, 1e-6); });
  for (size_t i = 0; i < want.size(); ++i) EXPECT(!same(dz[i], want[i]));

  const auto other =
      run(layer, [&](const Tensor& grad) { return passed_on(layer, grad, 0, bias); });
  EXPECT(same(other[0], want[0]) && same(other[1], want[1]));
  EXPECT(!same(other[2], want[2]) && same(other[2], bias));

  // Passing dz on without a word is as wrong.
  EXPECT(!same(run(layer, [&](const Tensor& grad) { return grad * layer.slope; }), want));
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
  EXPECT(same(run(layer, [&](const Tensor& grad) { return passed_on(layer, grad); }), want));
}

// What arrives is not what the note names: a hook changed it after the consumer had looked.
TEST(another_gradient_arrives) {
  for (const bool is_written : {false, true}) {
    const Layer layer;
    std::string told;
    try {
      run(layer, [&](const Tensor& grad) {
        const Tensor dz = passed_on(layer, grad);
        return is_written ? dz.mul_(2) : dz * 2;
      });
    } catch (const c10::Error& error) {
      told = error.what();
    }
    EXPECT(told.find("during the backward") != std::string::npos && layer.node()->waiting() == 0);
  }
}

// A run that is broken off takes the notes that it has left with it.
TEST(aborted_runs_leave_nothing) {
  const Layer layer;
  const auto want = run(layer, plain);
  for (int i = 0; i < 10; ++i) {
    std::string message;
    try {
      run(layer, [&](const Tensor& grad) -> Tensor {
        passed_on(layer, grad);
        EXPECT(layer.node()->waiting() == 1);
        throw std::runtime_error("on purpose");
      });
    } catch (const std::exception& error) {
      message = error.what();
    }
    EXPECT(message.find("on purpose") != std::string::npos && layer.node()->waiting() == 0);
  }
  EXPECT(same(run(layer, [&](const Tensor& grad) { return passed_on(layer, grad); }), want));
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
}

}  // namespace
