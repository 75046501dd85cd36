#include "autograd/node.h"

#include "core/explain.h"
#include "dispatch/operators.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/TensorSubclassLikeUtils.h>

#include <algorithm>

namespace fused::autograd {

using internals::CompiledNodeArgs;
using internals::PackedArgs;
using internals::SwapSavedVariables;

namespace {

Tensor strided(const Tensor& grad) {
  const bool is_other = grad.is_sparse() || grad.is_sparse_csr() || grad.is_mkldnn();
  return is_other ? grad.to_dense() : grad;
}

}  // namespace

variable_list Node::apply(variable_list&& grads) {
  if (!grads[0].defined()) return variable_list(num_outputs());
  const HeldPolicy policy(is_batch_invariant_ ? Policy::batch_invariant : fused::policy());
  const explain::Remarks remarks;
  return gradients(strided(grads[0]));
}

std::vector<bool> wanted_of(const torch::autograd::Node& node) {
  std::vector<bool> result(node.num_outputs());
  for (size_t i = 0; i < result.size(); ++i) result[i] = node.task_should_compute_output(i);
  return result;
}

variable_list Node::unpack(size_t first, size_t last) {
  const std::lock_guard lock(mutex_);
  variable_list result;
  result.reserve(last - first);
  for (size_t index = first; index < last; ++index) result.push_back(read(index));
  return result;
}

Tensor Node::read(size_t index) {
  auto saved = kept()[index].unpack(getptr());
  if (!saved.defined() || std::ranges::find(bits_, index) == bits_.end()) return saved;
  const auto dtype = saved.scalar_type();
  TORCH_CHECK(
      dtype == at::kByte || is_supported(dtype), name(),
      ": expected ReLU's bits from the saved tensors' hooks in uint8, or in a floating dtype "
      "that holds them exactly, got ",
      dtype);
  return saved.to(at::kByte);
}

void Work::done_with(Tensor& tensor, size_t index) const {
  if (!releases) return;
  tensor.reset();
  static_cast<Node&>(*node).release(index);
}

void Node::release(size_t index) {
  const std::lock_guard lock(mutex_);
  kept()[index].reset_data();
}

void Node::release_variables() {
  const std::lock_guard lock(mutex_);
  for (auto& saved : kept()) saved.reset_data();
}

void Node::compiled_args(CompiledNodeArgs& args) const {
  args.collect(std::string(typeid(*this).name()));
  args.collect(traits());
  for (const auto& saved : kept()) args.collect(saved, /*is_output=*/true);
  const bool is_differentiable = at::GradMode::is_enabled();
  args.collect(is_differentiable);
  if (!is_differentiable) return;
  ends_.clear();
  for (const auto& edge : next_edges()) {
    ends_.push_back(edge.is_valid() ? at_edge(at::zeros({}), edge) : Tensor());
  }
  args.collect(ends_);
}

variable_list Node::apply_with_saved(const variable_list& grads, SwapSavedVariables& swap) {
  const bool is_differentiable = at::GradMode::is_enabled();
  for (auto& saved : kept()) swap.before(saved);
  if (is_differentiable) swap.before(ends_);
  PackedArgs packed;
  packed.pack(unpack());
  packed.pack(wanted_of(*this));
  packed.pack(is_differentiable ? ends_ : variable_list());
  const auto run = [backward = backward()](const variable_list& inputs,
                                           const std::vector<at::IValue>& values) {
    return detached(backward, inputs, values);
  };
  // A graph would not record the nodes that make gradients differentiable.
  auto result = internals::record_call(swap, *this, run, grads, packed.vec(),
                                       /*is_traceable=*/!is_differentiable);
  for (auto& saved : kept()) swap.after(saved);
  if (is_differentiable) swap.after(ends_);
  return result;
}

variable_list Node::detached(const Backward& backward, const variable_list& grads,
                             const std::vector<at::IValue>& packed) {
  PackedArgs args(packed);
  auto kept = args.unpack<variable_list>();
  auto wanted = args.unpack<std::vector<bool>>();
  edge_list edges;
  for (const auto& end : args.unpack<variable_list>()) edges.push_back(edge_of(end));
  edges.resize(wanted.size());
  if (!grads[0].defined()) return variable_list(wanted.size());
  const HeldPolicy policy;
  const explain::Remarks remarks;
  return backward({std::move(kept), std::move(wanted), edges}, strided(grads[0]));
}

SavedVariable saved_weight(const Tensor& weight) {
  namespace impl = torch::autograd::impl;
  if (!weight.defined() || at::isTensorSubclassLike(weight) || weight.is_inference() ||
      has_tangent(weight)) {
    return SavedVariable(weight, /*is_output=*/false);
  }
  Tensor now(weight.unsafeGetTensorImpl()->shallow_copy_and_detach(
      impl::version_counter(weight), /*allow_tensor_metadata_change=*/true));
  if (weight.requires_grad()) impl::set_gradient_edge(now, impl::gradient_edge(weight));
  return SavedVariable(now, /*is_output=*/false);
}

SavedVariable saved_input(const Tensor& input, int64_t dimensions) {
  const bool is_itself = !input.defined() || input.dim() == dimensions;
  return is_itself ? SavedVariable(input, /*is_output=*/false) : saved_weight(input);
}

Tensor at_edge(const Tensor& values, const torch::autograd::Edge& edge) {
  auto tensor = values.detach();
  if (edge.is_valid()) torch::autograd::impl::set_gradient_edge(tensor, edge);
  return tensor;
}

variable_list by_edge(const std::vector<bool>& wanted, Tensor input, Tensor weight, Tensor bias) {
  variable_list result(wanted.size());
  if (wanted[0]) result[0] = std::move(input);
  if (wanted[1]) result[1] = std::move(weight);
  if (wanted[2]) result[2] = std::move(bias);
  return result;
}

bool is_sharded(const Tensor& tensor) {
  return tensor.key_set().has(c10::DispatchKey::Python) &&
         dispatch::by_python<dispatch::IsSharded>(tensor);
}

bool are_kept_as_they_are() { return !at::SavedTensorDefaultHooks::get_hooks(); }

}  // namespace fused::autograd
