#pragma once

// The parts that the FP8 nodes share.

#include "autograd/arguments.h"
#include "autograd/node.h"
#include "float8/steps.h"

#include <torch/csrc/autograd/functions/basic_ops.h>

#include <string>
#include <utility>
#include <vector>

namespace fused::float8 {

using autograd::Node;
using autograd::requires_grad;
using autograd::SavedVariable;
using autograd::variable_list;
using autograd::Work;

// An input or a weight that was written to since the forward makes the backward fail, as it does
// for torch's own layers. The node keeps FP8 copies, so it remembers versions instead of tensors.
class Versions {
 public:
  void remember(const std::string& what, const Tensor& tensor);
  void check(const char* op) const;

 private:
  struct Seen {
    std::string what;
    c10::VariableVersion counter;
    uint32_t version;
  };
  std::vector<Seen> seen_;
};

// Saves FP8 copies and the tensors that activations' derivatives are read from. `Form` holds a
// node's constants, has `op`, and computes `backward(Work, grad)` and `traits()`.
template <class Form>
class BlockNode final : public Node {
 public:
  BlockNode(torch::autograd::edge_list&& edges, const Form& form)
      : Node(std::move(edges)), form_(form) {}

  void keep(const variable_list& tensors, Versions versions) {
    kept_.reserve(tensors.size());
    for (const auto& tensor : tensors) {
      remember_bits(kept_.size(), tensor);
      kept_.emplace_back(tensor, /*is_output=*/false);
    }
    versions_ = std::move(versions);
  }

  std::string name() const override {
    return std::string("Fused_") + form_.op + "_" + fused::name(form_.activation) + "_Backward";
  }

 protected:
  variable_list gradients(const Tensor& grad) override {
    versions_.check(form_.op);
    return run(work(), form_, grad);
  }
  std::span<SavedVariable> kept() override { return kept_; }
  std::vector<int64_t> traits() const override { return form_.traits(); }
  Backward backward() const override {
    return
        [form = form_](Work work, const Tensor& grad) { return run(std::move(work), form, grad); };
  }

 private:
  static variable_list run(Work work, const Form& form, const Tensor& grad);

  const Form form_;
  std::vector<SavedVariable> kept_;
  Versions versions_;
};

// Returns the gradients with a node whose backward raises, for create_graph.
variable_list differentiable_once(const char* op, variable_list gradients, const Tensor& grad,
                                  const torch::autograd::edge_list& edges);

template <class Form>
variable_list BlockNode<Form>::run(Work work, const Form& form, const Tensor& grad) {
  TORCH_CHECK_NOT_IMPLEMENTED(!has_tangent(grad), form.op,
                              ": forward-mode AD over the backward is not implemented");
  const auto& edges = work.edges;
  variable_list result;
  {
    const autograd::KernelsOnly guard;
    result = form.backward(std::move(work), grad);
  }
  if (!at::GradMode::is_enabled()) return result;
  return differentiable_once(form.op, std::move(result), grad, edges);
}

// Makes a node with these saved tensors the output's grad_fn.
template <class Form>
void record(const Tensor& output, const std::vector<OptionalTensor>& inputs, const Form& form,
            const variable_list& kept, Versions versions) {
  torch::autograd::edge_list edges;
  for (const auto& tensor : inputs) edges.push_back(autograd::edge_of(tensor));
  const auto node = autograd::make_node<BlockNode<Form>>(std::move(edges), form);
  autograd::set_history(output, node);
  node->keep(kept, std::move(versions));
  autograd::announce(node);
}

// Returns the rows as [*, features] with grad's leading dimensions.
Tensor like_rows_of(const Tensor& grad, const Tensor& rows);

}  // namespace fused::float8
