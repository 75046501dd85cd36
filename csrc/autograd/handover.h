#pragma once

// Layer-to-layer hand-over of gradients in eager mode.
//
// The gradient of a layer's output is produced by the next layer's backward. Where the next layer
// (the consumer) is ours, and nobody else looks at that gradient, the consumer applies this layer's
// activation derivative right behind its matrix product, or inside it, and sums this layer's bias
// gradient on the way. It passes dz on in place of dy and leaves a note that says so. The producer
// trusts a note only if the gradient that arrives is the very tensor that the note names. If
// another gradient was added to it on the way, the producer applies its derivative to the
// difference. (That happens where the tensor is itself a root of the backward, or the root consumes
// it beside the consumer: roots are not among the nodes that can be searched. The difference costs
// one rounding.)
//
// A hook that is put on the tensor by another hook, after the consumer has run, sees dz.

#include "autograd/node.h"

#include <atomic>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace fused::autograd::handover {

bool enabled();
void set_enabled(bool enabled);

struct Note {
  Note(Tensor dz, Tensor grad_bias, Tensor saved);

  Tensor dz;         // what the consumer passed on. Holding it keeps the engine from adding another
                     // gradient to it in place, which would go unseen.
  Tensor grad_bias;  // [out] or undefined
  Tensor saved;      // what the producer's act' is read from, already unpacked: checkpoint allows
                     // it to be unpacked only once

  // Whether nobody has written to it since.
  bool is_unchanged() const;

 private:
  int64_t version_;
};

// A node that notes may be left for, each in one run of the engine.
class Producer : public Node {
 public:
  using Node::Node;

  // The note goes with the run, if the run ends before it is taken.
  void leave(int graph_task, Note note);
  std::optional<Note> take(int graph_task);
  size_t waiting() const { return waiting_; }

 private:
  std::vector<std::pair<int, Note>>::iterator find(int graph_task);

  std::mutex notes_mutex_;
  std::vector<std::pair<int, Note>> notes_;
  std::atomic<size_t> waiting_{0};  // lets a node without notes pass without the lock
};

// Why the gradient that `consumer` is about to pass along its first edge must stay the true one,
// or nullptr: then that edge's node, and nobody else, will receive it. Whether the node is one of
// ours is for the caller to know.
const char* objection(torch::autograd::Node& consumer);

}  // namespace fused::autograd::handover
