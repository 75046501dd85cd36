#include "autograd/handover.h"

#include "core/environment.h"
#include "core/explain.h"

#include <torch/csrc/autograd/anomaly_mode.h>

#include <algorithm>
#include <memory>

namespace fused::autograd::handover {
namespace {

using internals::GraphNode;

std::atomic<bool>& switched_on() {
  static std::atomic<bool> value = number_of_environment("TORCH_FUSED_LINEAR_HANDOVER", 1, 1) != 0;
  return value;
}

int64_t version_of(const Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference() ? tensor._version() : 0;
}

const char* stands_between(const torch::autograd::Edge& edge) {
  if (explain::enabled() && edge.is_valid() && internals::is_fsdps(*edge.function)) {
    return "FSDP wraps the layer by itself";
  }
  return "the input is not a fused layer's output";
}

// Who sees the gradient that arrives at a node, or nullptr.
const char* watcher(torch::autograd::Node& node) {
  if (!node.tensor_pre_hooks().empty()) return "a hook on the tensor";
  if (!node.retains_grad_hooks().empty()) return "retain_grad";
  return node.pre_hooks().empty() && node.post_hooks().empty() ? nullptr : "a hook on the node";
}

}  // namespace

bool enabled() { return switched_on().load(std::memory_order_relaxed); }
void set_enabled(bool enabled) { switched_on() = enabled; }

Note::Note(Tensor passed, variable_list gradients, variable_list saved)
    : passed(std::move(passed)), gradients(std::move(gradients)), saved(std::move(saved)) {
  version_ = version_of(this->passed);
  for (const auto& tensor : this->saved) versions_.push_back(version_of(tensor));
}

bool Note::is_unchanged() const { return std::ranges::equal(saved, versions_, {}, version_of); }

bool Note::is_of(const Tensor& x) const { return x.is_same(passed) && version_of(x) == version_; }

void Producer::leave(int graph_task, Note note) {
  {
    const std::lock_guard lock(notes_mutex_);
    std::erase_if(notes_, [graph_task](const auto& known) { return known.first == graph_task; });
    notes_.emplace_back(graph_task, std::move(note));
    waiting_ = notes_.size();
  }
  if (graph_task == -1 || internals::current_run() != graph_task) return;
  // The engine drops the callback, which does nothing but be there, with the run, well ended or
  // not.
  const auto take_back = [producer = internals::WeakNodePtr<GraphNode>(getptr()),
                          graph_task](const void*) {
    if (const auto node = producer.lock()) static_cast<Producer&>(*node).take(graph_task);
  };
  internals::at_end_of_run([end = std::shared_ptr<const void>(nullptr, take_back)] {});
}

std::optional<Note> Producer::take(int graph_task) {
  if (waiting_ == 0) return std::nullopt;
  const std::lock_guard lock(notes_mutex_);
  const auto it = std::ranges::find(notes_, graph_task, &std::pair<int, Note>::first);
  if (it == notes_.end()) return std::nullopt;
  std::optional<Note> note(std::move(it->second));
  notes_.erase(it);
  --waiting_;
  return note;
}

std::pair<Work, std::optional<Note>> Producer::begin(const Tensor& grad, size_t lent) {
  // A hook may call the node by hand while the engine runs another.
  const bool is_running = torch::autograd::get_current_node().get() == this;
  auto note = is_running ? take(internals::current_run()) : std::nullopt;
  TORCH_CHECK(!note || (!watcher(*this) && note->is_of(grad)), "fused: a hook was put on a ",
              "layer's output during the backward, after the next layer's step, which has dealt ",
              "with its gradient; put it there before, or torch_fused_linear.handover(False)");
  // What has changed since it was unpacked for the note is unpacked again, for torch's own error.
  const bool has_saved = note && note->is_unchanged();
  auto all = unpack(0, has_saved ? lent : kept().size());
  if (has_saved) all.insert(all.end(), note->saved.begin(), note->saved.end());
  Work work{std::move(all), wanted_of(*this), next_edges(), getptr(), is_running};
  return {std::move(work), std::move(note)};
}

const char* objection(torch::autograd::Node& consumer) {
  if (!enabled()) return "switched off";
  if (at::GradMode::is_enabled()) return "create_graph";
  if (torch::autograd::AnomalyMode::is_enabled()) return "anomaly mode";
  if (internals::current_run() == -1) return "no run of the eager engine";

  auto& producer = *consumer.next_edge(0).function;
  if (const char* why = watcher(producer)) return why;
  if (!consumer.post_hooks().empty()) return "a hook on the node";  // it sees what is passed on
  if (internals::is_captured(&producer)) return "its gradient was asked for";
  if (producer.stream() != consumer.stream()) return "another stream";
  if (!internals::waits_for_one(&producer)) return "another consumer";
  return nullptr;
}

void Receiver::leave(Note note) const { node->leave(internals::current_run(), std::move(note)); }

void Search::remark() const {
  if (!explain::enabled()) return;
  explain::remark(receiver ? "handed over" : std::string("plain: ") + reason);
}

Search find_receiver(const Work& consumer) {
  if (!consumer.is_running) return {std::nullopt, "no run of the eager engine"};
  if (!consumer.wanted[0]) return {std::nullopt, "first layer: nothing to hand over"};
  const auto& edge = consumer.edges[0];
  auto* producer = dynamic_cast<Producer*>(edge.function.get());
  if (producer == nullptr) return {std::nullopt, stands_between(edge)};
  if (const char* why = producer->refusal()) return {std::nullopt, why};
  if (const char* why = objection(*consumer.node)) return {std::nullopt, why};
  // Unpacking may run the user's code (checkpoint computes the layer anew, with autograd): nothing
  // must be switched off around it.
  auto saved = producer->lend_saved();
  if (saved.empty()) return {std::nullopt, "its saved tensors were freed"};
  return {Receiver{producer, std::move(saved)}};
}

}  // namespace fused::autograd::handover
