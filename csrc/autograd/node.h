#pragma once

// The base of our autograd nodes. A node owns its state: typed members, and saved tensors that are
// read and released under the node's lock.

#include "core/check.h"
#include "core/policy.h"
#include "core/torch_internals.h"
#include "cpu/packed_weights.h"

#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/variable.h>

#include <array>
#include <functional>
#include <span>
#include <vector>

namespace fused::autograd {

using internals::announce;
using internals::make_node;
using internals::node_cast;
using internals::NodePtr;
using torch::autograd::edge_list;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

// Returns the argument's gradient edge; invalid if the tensor is undefined.
inline torch::autograd::Edge edge_of(const Tensor& tensor) {
  if (tensor.defined() && tensor.requires_grad()) cpu::packed::drop(tensor);  // no longer frozen
  return tensor.defined() ? torch::autograd::impl::gradient_edge(tensor) : torch::autograd::Edge();
}
inline torch::autograd::Edge edge_of(const OptionalTensor& tensor) {
  return tensor ? edge_of(*tensor) : torch::autograd::Edge();
}

// The data of a backward apart from its node, because compiled autograd runs it without the node.
struct Work {
  variable_list kept;
  std::vector<bool> wanted;                  // by edge
  const edge_list& edges;                    // invalid if the gradients need not be differentiable
  NodePtr<torch::autograd::Node> node = {};  // none in compiled autograd
  bool releases = false;                     // the backward may free the tensors that it has read

  // Frees a saved tensor that the backward does not read again, here and in the node (at `index`),
  // unless the graph is run again.
  void done_with(Tensor& tensor, size_t index) const;
};

// Returns which gradients the running backward wants from a node, by edge.
std::vector<bool> wanted_of(const torch::autograd::Node& node);

class Node : public torch::autograd::Node {
 public:
  explicit Node(edge_list&& edges) : torch::autograd::Node(std::move(edges)) {}

  // Takes gradients of any layout, as torch's own nodes do: sparse ones by their values.
  variable_list apply(variable_list&& grads) final;

  // Returns the saved tensors [first, last). Throws torch's own errors if they have been released
  // or written to since.
  variable_list unpack(size_t first, size_t last);
  variable_list unpack() { return unpack(0, kept().size()); }

  // Frees one of them before the backward ends.
  void release(size_t index);

  void release_variables() override;
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const final;
  variable_list apply_with_saved(const variable_list& grads,
                                 torch::dynamo::autograd::SwapSavedVariables& swap) final;

 protected:
  using Backward = std::function<variable_list(Work, const Tensor& grad)>;

  Work work() { return {unpack(), wanted_of(*this), next_edges(), getptr(), runs_last()}; }

  // Returns whether the engine runs this node, not a call by hand, and will not run it again.
  bool runs_last() const {
    return torch::autograd::get_current_node().get() == this && !internals::run_keeps_graph();
  }

  // Remembers where ReLU's bits are saved, because hooks may return them in another dtype.
  void remember_bits(size_t index, const Tensor& tensor) {
    if (tensor.defined() && tensor.scalar_type() == at::kByte) bits_.push_back(index);
  }

  // Computes the gradients by edge from `grad`, the gradient of the node's one result.
  virtual variable_list gradients(const Tensor& grad) = 0;
  virtual std::span<SavedVariable> kept() = 0;
  // Returns the backward as a function without the node. Nodes with other functions have other
  // traits.
  virtual Backward backward() const = 0;
  virtual std::vector<int64_t> traits() const = 0;

 private:
  Tensor read(size_t index);
  std::span<const SavedVariable> kept() const { return const_cast<Node*>(this)->kept(); }
  static variable_list detached(const Backward& backward, const variable_list& grads,
                                const std::vector<at::IValue>& packed);

  // A batch-invariant forward has a batch-invariant backward, even if the policy has changed since.
  const bool is_batch_invariant_ = is_batch_invariant();
  std::vector<size_t> bits_;
  // Scalar variables at the next edges, by which a compiled graph identifies the edges.
  mutable variable_list ends_;
};

// Returns a weight as it is now. F.linear saves a view, which keeps its memory if `.data` puts
// another tensor into the parameter later.
SavedVariable saved_weight(const Tensor& weight);

// Returns an input likewise. torch saves the tensor itself if it has as many dimensions as the
// product (2) or the convolution (4) takes, else a view.
SavedVariable saved_input(const Tensor& input, int64_t dimensions = 2);

// Returns a variable with these values whose gradient goes to `edge`.
Tensor at_edge(const Tensor& values, const torch::autograd::Edge& edge);

// Makes the node the output's grad_fn.
using torch::autograd::set_history;

bool is_sharded(const Tensor& tensor);

// Returns whether no hooks on saved tensors are set. Hooks may change saved tensors, move them, or
// compute them again (checkpoint) by a forward that finds other conditions.
bool are_kept_as_they_are();

// While one lives, operators run their kernels without autograd and autocast.
struct KernelsOnly {
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast{c10::autocast_dispatch_keyset};
};

// The wanted gradients of a layer's input, weight and bias.
inline std::array<bool, 3> mask_of(const std::vector<bool>& wanted) {
  return {wanted[0], wanted[1], wanted[2]};
}

// A layer's gradients by edge, those that are wanted.
variable_list by_edge(const std::vector<bool>& wanted, Tensor input, Tensor weight, Tensor bias);

}  // namespace fused::autograd
