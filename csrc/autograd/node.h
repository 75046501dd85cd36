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

// The argument's gradient edge; invalid if the tensor is undefined.
inline torch::autograd::Edge edge_of(const Tensor& tensor) {
  if (tensor.defined() && tensor.requires_grad()) cpu::packed::drop(tensor);  // no longer frozen
  return tensor.defined() ? torch::autograd::impl::gradient_edge(tensor) : torch::autograd::Edge();
}
inline torch::autograd::Edge edge_of(const OptionalTensor& tensor) {
  return tensor ? edge_of(*tensor) : torch::autograd::Edge();
}

// The data of a backward, without its node: compiled autograd runs a backward without the node.
struct Work {
  variable_list kept;
  std::vector<bool> wanted;  // by edge
  const edge_list& edges;    // invalid where the gradients need not be differentiable
  NodePtr<torch::autograd::Node> node = {};  // none in compiled autograd
  bool releases = false;                     // the backward may free what it has read

  // Frees a saved tensor that the backward reads no more, unless the graph is run again: the
  // backward's own, and the node's at `index`.
  void done_with(Tensor& tensor, size_t index) const;
};

// The gradients that the running backward wants of a node, by edge.
std::vector<bool> wanted_of(const torch::autograd::Node& node);

class Node : public torch::autograd::Node {
 public:
  explicit Node(edge_list&& edges) : torch::autograd::Node(std::move(edges)) {}

  // Takes gradients of any layout, as torch's own nodes do: sparse ones by their values.
  variable_list apply(variable_list&& grads) final;

  // The saved tensors [first, last). Throws torch's own errors where they have been released, or
  // written to since.
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

  // The engine runs this node, which nobody has called by hand, and will not run it again.
  bool runs_last() const {
    return torch::autograd::get_current_node().get() == this && !internals::run_keeps_graph();
  }

  // Hooks may give ReLU's bits back in another dtype; remembers where they are.
  void remember_bits(size_t index, const Tensor& tensor) {
    if (tensor.defined() && tensor.scalar_type() == at::kByte) bits_.push_back(index);
  }

  // The gradients by edge, of `grad`, that of the node's one result.
  virtual variable_list gradients(const Tensor& grad) = 0;
  virtual std::span<SavedVariable> kept() = 0;
  // The backward as a function without the node. Nodes that differ in it have different traits.
  virtual Backward backward() const = 0;
  virtual std::vector<int64_t> traits() const = 0;

 private:
  Tensor read(size_t index);
  std::span<const SavedVariable> kept() const { return const_cast<Node*>(this)->kept(); }
  static variable_list detached(const Backward& backward, const variable_list& grads,
                                const std::vector<at::IValue>& packed);

  // The backward of a batch-invariant forward is one, too, whatever the policy is by then.
  const bool is_batch_invariant_ = is_batch_invariant();
  std::vector<size_t> bits_;
  // Scalars at the next edges, by which a compiled graph knows them.
  mutable variable_list ends_;
};

// A weight as it is now. The view that F.linear keeps has the same memory still when `.data` has
// put another tensor into the parameter.
SavedVariable saved_weight(const Tensor& weight);

// An input likewise: torch keeps the tensor itself where it has as many dimensions as the product
// (2) or the convolution (4) takes, else a view.
SavedVariable saved_input(const Tensor& input, int64_t dimensions = 2);

// A variable with these values whose gradient goes to `edge`.
Tensor at_edge(const Tensor& values, const torch::autograd::Edge& edge);

// Makes an output the node's.
using torch::autograd::set_history;

bool is_sharded(const Tensor& tensor);

// No hooks on saved tensors are set, which may act on them, keep them elsewhere, or make them again
// (checkpoint) by a forward that finds other facts.
bool are_kept_as_they_are();

// Kernels alone, in the dtypes that they are given.
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
