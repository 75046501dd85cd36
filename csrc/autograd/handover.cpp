#include "autograd/handover.h"

#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <typeinfo>
#include <unordered_map>

namespace fused::autograd::handover {
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
  // By run of the engine, then by producer. A run's entry lives as long as the run.
  std::map<int, std::map<const Node*, Note>> waiting;
  std::atomic<size_t> count{0};  // lets a layer that has no note pass without the lock
};

Notes& notes() {
  static auto* value = new Notes;  // outlives the engine's threads
  return *value;
}

// Held by the run of the engine: when that ends, well or not, its notes go.
struct EndOfRun {
  int graph_task;

  explicit EndOfRun(int graph_task) : graph_task(graph_task) {}
  EndOfRun(const EndOfRun&) = delete;
  EndOfRun& operator=(const EndOfRun&) = delete;
  ~EndOfRun() {
    std::map<const Node*, Note> left;  // freed after the lock is
    const std::lock_guard lock(notes().mutex);
    const auto it = notes().waiting.find(graph_task);
    if (it == notes().waiting.end()) return;
    left = std::move(it->second);
    notes().count -= left.size();
    notes().waiting.erase(it);
  }
};

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

bool Note::is_unchanged() const { return std::ranges::equal(saved, versions_, {}, version_of); }

void leave(const Node* producer, int graph_task, Note note) {
  auto& waiting = notes().waiting;
  bool first_of_run;
  {
    const std::lock_guard lock(notes().mutex);
    const auto [run, inserted] = waiting.try_emplace(graph_task);
    first_of_run = inserted;
    notes().count += run->second.insert_or_assign(producer, std::move(note)).second;
  }
  // A callback does nothing but be there: the engine drops it with the run.
  const bool running =
      graph_task != -1 && torch::autograd::get_current_graph_task_id() == graph_task;
  if (first_of_run && running) {
    torch::autograd::Engine::get_default_engine().queue_callback(
        [end = std::make_shared<EndOfRun>(graph_task)] {});
  }
}

std::optional<Note> take(const Node* producer, int graph_task) {
  if (notes().count == 0) return std::nullopt;
  const std::lock_guard lock(notes().mutex);
  const auto run = notes().waiting.find(graph_task);
  if (run == notes().waiting.end()) return std::nullopt;
  const auto it = run->second.find(producer);
  if (it == run->second.end()) return std::nullopt;
  std::optional<Note> note(std::move(it->second));
  run->second.erase(it);
  --notes().count;
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

}  // namespace fused::autograd::handover
