#include "core/torch_internals.h"

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <cstring>
#include <mutex>
#include <unordered_map>

namespace fused::internals {
namespace {

// Compares the owners of shared pointers, as nodes may be gone; torch's own weak pointer holds the
// memory. A template, as either has only one of them.
template <typename Pointer>
bool is_same(const Pointer& a, const Pointer& b) {
  if constexpr (requires { a.owner_before(b); }) {
    return !a.owner_before(b) && !b.owner_before(a);
  } else {
    return a == b;
  }
}

}  // namespace

bool run_keeps_graph() { return torch::autograd::get_current_graph_task_keep_graph(); }

bool has_the_only_edge(const GraphNode& running, const GraphNode& leaf) {
  // Counted once for each run, whose graph does not change.
  struct Counts {
    int run = -1;
    bool has_root = false;
    std::unordered_map<const GraphNode*, size_t> edges;

    void add(const GraphNode& node) {
      for (const auto& edge : node.next_edges()) {
        if (edge.is_valid()) ++edges[edge.function.get()];
      }
    }
  };
  static thread_local Counts counts;
  const int run = torch::autograd::get_current_graph_task_id();
  const auto* nodes = torch::autograd::get_current_graph_task_nodes_in_graph();
  if (run == -1 || nodes == nullptr) return false;
  if (counts.run != run) {
    counts = {run, false, {}};
    for (const auto* node : *nodes) counts.add(*node);
  }
  // The node that the run began at is not among them.
  if (!counts.has_root && !nodes->contains(const_cast<GraphNode*>(&running))) {
    counts.has_root = true;
    counts.add(running);
  }
  const auto found = counts.edges.find(&leaf);
  return found != counts.edges.end() && found->second == 1;
}

bool is_captured(GraphNode* node) {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  if (wanted == nullptr) return false;
  const auto it = wanted->find(node);
  return it != wanted->end() && it->second.captures_ != nullptr;
}

variable_list record_call(
    SwapSavedVariables& swap, const GraphNode& node,
    std::function<variable_list(const variable_list&, const std::vector<at::IValue>&)> run,
    const variable_list& grads, const std::vector<at::IValue>& values, bool is_traceable) {
  using namespace torch::dynamo::autograd;
  std::vector<at::TypePtr> schema;
  for (const auto& value : values) {
    schema.push_back(value.isTensor() ? at::TypePtr(at::TensorType::get()) : value.type());
  }
  const auto& compiler = getPyCompilerInterface();
  const auto function =
      compiler->bind_function(swap.get_py_compiler(), typeid(node).name(), std::move(run), schema,
                              /*is_custom_function=*/true, is_traceable);
  const auto metadata =
      IValuePacker<std::vector<std::optional<torch::autograd::InputMetadata>>>::pack(
          get_input_metadata(node.next_edges()));
  return compiler->call_function(swap.get_py_compiler(), "apply_functional", function, grads,
                                 values, metadata);
}

Identity identity(const at::Tensor& tensor) {
  const auto* impl = tensor.unsafeGetTensorImpl();
  const c10::VariableVersion& counter = impl->version_counter();
  const void* address;
  static_assert(sizeof(counter) == sizeof(address));  // a pointer that nobody gives us
  std::memcpy(&address, &counter, sizeof(address));
  return {address, impl};
}

Accumulator::Accumulator(const at::Tensor& leaf) {
  auto* meta = torch::autograd::impl::get_autograd_meta(leaf);
  if (meta == nullptr) return;
  const std::lock_guard lock(meta->mutex_);
  node_ = meta->grad_accumulator_;
}

bool Accumulator::operator==(const Accumulator& other) const { return is_same(node_, other.node_); }

}  // namespace fused::internals
