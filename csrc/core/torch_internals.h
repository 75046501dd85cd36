#pragma once

// Uses of torch beyond its public C++ interface, and differences between its releases. A difference
// is found by looking for names. tests/integration/test_torch_internals.py checks each of them.

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>
#include <vector>

namespace fused::internals {

using GraphNode = torch::autograd::Node;  // any node, of ours or not

// torch holds nodes by std::shared_ptr, from 2.13 on by c10::intrusive_ptr.
inline constexpr bool nodes_are_shared =
    std::is_same_v<decltype(torch::autograd::Edge::function), std::shared_ptr<GraphNode>>;

template <typename T>
using NodePtr = std::conditional_t<nodes_are_shared, std::shared_ptr<T>, c10::intrusive_ptr<T>>;
template <typename T>
using WeakNodePtr =
    std::conditional_t<nodes_are_shared, std::weak_ptr<T>, c10::weak_intrusive_ptr<T>>;

template <typename T, typename... Args>
NodePtr<T> make_node(Args&&... args) {
  if constexpr (nodes_are_shared) {
    // torch's deleter takes long chains apart without recursion; newer versions have none.
    return NodePtr<T>(new T(std::forward<Args>(args)...), [](T* node) { deleteNode(node); });
  } else {
    return c10::make_intrusive<T>(std::forward<Args>(args)...);
  }
}

// The node as a class of its hierarchy that it is known to be.
template <typename T, typename Pointer>
NodePtr<T> node_cast(const Pointer& node) {
  if constexpr (nodes_are_shared) {
    return std::static_pointer_cast<T>(node);
  } else {
    return NodePtr<T>::reclaim_copy(static_cast<T*>(node.get()));
  }
}

// Shows a finished node to torch.autograd.graph.node_creation_hook, from 2.14 on.
template <typename Pointer>
void announce(const Pointer& node) {
  if constexpr (requires { fire_node_creation_hooks(node); }) fire_node_creation_hooks(node);
}

// FSDP2's node before a module that it wraps: a function in Python, whose name is all there is.
inline bool is_fsdps(const GraphNode& node) {
  return node.name() == "RegisterPostBackwardFunctionBackward";
}

// torch.compile's node of a compiled backward, likewise.
inline bool is_compilers(const GraphNode& node) {
  return node.name() == "CompiledFunctionBackward";
}

// A node's own lock, under which AccumulateGrad adds.
inline std::mutex& mutex_of(GraphNode& node) {
  struct Open : GraphNode {
    static std::mutex& of(GraphNode& closed) { return closed.*(&Open::mutex_); }
  };
  return Open::of(node);
}

// About the run of the engine that this thread works for. run_keeps_graph is true outside of one.
bool run_keeps_graph();
bool is_captured(GraphNode* node);
// Tells whether the running node's edge to `leaf` is the only one in the run's graph. Torch does
// not tell which node a run began at: its edges count only if it has asked here itself.
bool has_the_only_edge(const GraphNode& running, const GraphNode& leaf);

using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::PackedArgs;
using torch::dynamo::autograd::SwapSavedVariables;

// Records a call of `run` in place of the node's backward, opaque where it is not traceable.
variable_list record_call(
    SwapSavedVariables& swap, const GraphNode& node,
    std::function<variable_list(const variable_list&, const std::vector<at::IValue>&)> run,
    const variable_list& grads, const std::vector<at::IValue>& values, bool is_traceable);

// By their counters of versions, which keep their addresses while they are held, as weak references
// to the tensors would be in the way of torch.utils.swap_tensors; views of one tensor share theirs.
using Identity = std::pair<const void*, const void*>;
Identity identity(const at::Tensor& tensor);

// The node that adds up a leaf's gradient, or none. Equal where they are of one node, also of one
// that is gone.
class Accumulator {
 public:
  explicit Accumulator(const at::Tensor& leaf);
  bool operator==(const Accumulator& other) const;

 private:
  WeakNodePtr<GraphNode> node_{NodePtr<GraphNode>()};
};

// An operator of torch's that not every build of it has, nor with this signature.
template <typename Signature>
std::optional<c10::TypedOperatorHandle<Signature>> find_operator(const char* name,
                                                                 const char* overload) {
  const auto op = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!op) return std::nullopt;
  return op->template typed<Signature>();
}

inline at::Float32Precision float32_products(at::Float32Backend backend) {
  return at::globalContext().float32Precision(backend, at::Float32Op::MATMUL);
}

// CUDA's products in fp32 may be nine in bf16 from 2.15 on; other releases have no such value.
template <typename Precision = at::Float32Precision>
bool float32_is_bf16x9() {
  if constexpr (requires { Precision::BF16X9; }) {
    return float32_products(at::Float32Backend::CUDA) == Precision::BF16X9;
  }
  return false;
}

}  // namespace fused::internals
