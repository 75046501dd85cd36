#include "handover.h"

#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <typeinfo>
#include <unordered_map>

namespace fused::handover {
namespace {

using torch::autograd::Node;

std::atomic<bool>& switched_on() {
  static std::atomic<bool> value = [] {
    const char* wish = std::getenv("TORCH_FUSED_LINEAR_HANDOVER");
    return wish == nullptr || std::strcmp(wish, "0") != 0;
  }();
  return value;
}

struct Notes {
  std::mutex mutex;
  std::map<std::pair<const Node*, int>, Note> waiting;
  std::atomic<size_t> count{0};  // lets a layer that has no note pass without the lock
};

Notes& notes() {
  static auto* value = new Notes;  // outlives the engine's threads
  return *value;
}

// A run that was broken off has dropped its gradients: only the note still holds them.
void sweep(std::vector<Note>& stale) {
  auto& waiting = notes().waiting;
  for (auto it = waiting.begin(); it != waiting.end();) {
    if (it->second.dz.use_count() == 1) {
      stale.push_back(std::move(it->second));
      it = waiting.erase(it);
    } else {
      ++it;
    }
  }
}

int64_t version_of(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference() ? tensor._version() : 0;
}

int edges_between(const Node& from, const Node* to) {
  int count = 0;
  for (const auto& edge : from.next_edges()) count += edge.function.get() == to;
  return count;
}

// Whether an edge of the running graph other than consumer's first leads to `producer`. Edges are
// counted once per run of the engine. The root of a graph is not among its nodes; where it is
// another consumer, two gradients arrive at the producer, which then sees that its note speaks of
// only one of them.
bool has_other_consumers(const Node* producer, const Node& consumer, int graph_task) {
  thread_local int counted_task = -1;
  thread_local std::unordered_map<const Node*, int> counts;
  const auto& nodes = *torch::autograd::get_current_graph_task_nodes_in_graph();
  if (counted_task != graph_task) {
    counts.clear();
    for (const auto* node : nodes) {
      for (const auto& edge : node->next_edges()) {
        // Only nodes of the producer's kind are ever asked for.
        const auto* target = edge.function.get();
        if (target != nullptr && typeid(*target) == typeid(*producer)) ++counts[target];
      }
    }
    counted_task = graph_task;
  }
  const int own = edges_between(consumer, producer);
  const bool counted = nodes.count(const_cast<Node*>(&consumer)) != 0;
  const auto it = counts.find(producer);
  const int all = it == counts.end() ? 0 : it->second;
  return own != 1 || all != (counted ? 1 : 0);
}

bool captured(Node* node) {
  const auto* exec_info = torch::autograd::get_current_graph_task_exec_info();
  if (exec_info == nullptr) return false;
  const auto it = exec_info->find(node);
  return it != exec_info->end() && it->second.captures_ != nullptr;
}

}  // namespace

bool enabled() { return switched_on().load(std::memory_order_relaxed); }
void set_enabled(bool enabled) { switched_on() = enabled; }

Note::Note(at::Tensor dz, at::Tensor grad_bias, torch::autograd::variable_list saved)
    : dz(std::move(dz)), grad_bias(std::move(grad_bias)), saved(std::move(saved)) {
  for (const auto& tensor : this->saved) versions_.push_back(version_of(tensor));
}

bool Note::is_unchanged() const {
  return std::ranges::equal(saved, versions_, {}, version_of);
}

void leave(const Node* producer, int graph_task, Note note) {
  std::vector<Note> stale;  // freed after the lock is
  const std::lock_guard lock(notes().mutex);
  sweep(stale);
  notes().waiting.insert_or_assign({producer, graph_task}, std::move(note));
  notes().count = notes().waiting.size();
}

std::optional<Note> take(const Node* producer, int graph_task) {
  if (notes().count == 0) return std::nullopt;
  std::vector<Note> stale;
  const std::lock_guard lock(notes().mutex);
  auto& waiting = notes().waiting;
  std::optional<Note> note;
  if (const auto it = waiting.find({producer, graph_task}); it != waiting.end()) {
    note = std::move(it->second);
    waiting.erase(it);
  }
  sweep(stale);
  notes().count = waiting.size();
  return note;
}

size_t waiting() { return notes().count; }

const char* objection(Node& consumer) {
  if (!enabled()) return "switched off";
  if (at::GradMode::is_enabled()) return "create_graph";
  if (torch::autograd::AnomalyMode::is_enabled()) return "anomaly mode";
  const int graph_task = torch::autograd::get_current_graph_task_id();
  if (graph_task == -1) return "no run of the eager engine";

  auto& producer = *consumer.next_edge(0).function;
  if (!producer.tensor_pre_hooks().empty()) return "a hook on the tensor";
  if (!producer.retains_grad_hooks().empty()) return "retain_grad";
  // A hook behind the consumer sees what it passes on, one around the producer what arrives.
  if (!consumer.post_hooks().empty() || !producer.pre_hooks().empty() ||
      !producer.post_hooks().empty()) {
    return "a hook on the node";
  }
  if (captured(&producer)) return "its gradient was asked for";
  if (producer.stream() != consumer.stream()) return "another stream";
  if (has_other_consumers(&producer, consumer, graph_task)) return "another consumer";
  return nullptr;
}

}  // namespace fused::handover
