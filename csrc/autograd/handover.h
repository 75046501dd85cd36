#pragma once

// Layer-to-layer hand-over of gradients in eager mode.
//
// The gradient of a layer's output is produced by the next layer's backward. Where the next layer
// (the consumer) is ours, and nobody else looks at that gradient, the consumer applies this layer's
// activation derivative right behind its matrix product, or inside it, and sums this layer's bias
// gradient on the way. It passes dz on in place of dy (of a gated layer gate's) and leaves a note
// that says so.
//
// A hook that is put there by another hook, after the consumer has run, would see dz: it is an
// error, as is a write to what was passed on.

#include "autograd/node.h"
#include "autograd/recompute.h"

#include <atomic>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

namespace fused::autograd::handover {

bool enabled();
void set_enabled(bool enabled);

struct Note {
  Note(Tensor passed, variable_list gradients, variable_list saved);

  Tensor passed;            // what the consumer passed on
  variable_list gradients;  // what else it has computed, as the producer wants it
  variable_list saved;      // what the producer's act' is read from, already unpacked: checkpoint
                            // allows it to be unpacked only once

  // Whether nobody has written to what was saved since.
  bool is_unchanged() const;

  // Whether x, which has arrived, is what was passed, as it was.
  bool is_of(const Tensor& x) const;

 private:
  std::vector<int64_t> versions_;  // of what was saved
  int64_t version_;                // of what was passed
};

// A node that notes may be left for, each in one run of the engine.
class Producer : public Node {
 public:
  using Node::Node;

  // Why a consumer cannot apply its derivative, or nullptr.
  virtual const char* refusal() const = 0;

  // What its derivative is read from; none where it has been released.
  virtual variable_list lend_saved() = 0;

  // Where the derivative is that of one tensor, which a product can apply: the activation, and
  // whether the bias wants a gradient in this run. Else none.
  virtual std::pair<Activation, bool> derivative() const { return {Activation::none, false}; }

  // Applies the derivative. The result is what the consumer passes on and leaves. `output`, where
  // it is wanted, becomes what the layer gave, computed again.
  virtual Note derive(const Tensor& grad, variable_list saved, Tensor* output = nullptr) = 0;

  // With low memory: what its output can be computed from.
  virtual std::optional<KeptInput> lend_output() = 0;

  // The note goes with the run, if the run ends before it is taken.
  void leave(int graph_task, Note note);
  std::optional<Note> take(int graph_task);
  size_t waiting() const { return waiting_; }

 protected:
  // What a backward begins with. The kept tensors from `lent` on are those that come with a note.
  std::pair<Work, std::optional<Note>> begin(const Tensor& grad, size_t lent);

 private:
  std::mutex notes_mutex_;
  std::vector<std::pair<int, Note>> notes_;
  std::atomic<size_t> waiting_{0};  // lets a node without notes pass without the lock
};

// Why the gradient that `consumer` is about to pass along its first edge must stay the true one,
// or nullptr: then that edge's node, and nobody else, will receive it. Whether the node is one of
// ours is for the caller to know.
const char* objection(torch::autograd::Node& consumer);

// The producer's side of a hand-over, read before the consumer does its work.
struct Receiver {
  Producer* node;
  variable_list saved;

  void leave(Note note) const;
};

// Who takes over, or the reason in words why the plain way is taken.
struct Search {
  std::optional<Receiver> receiver;
  const char* reason = nullptr;

  // For the row that the node opens next.
  void remark() const;
};

// For a node that may pass a gradient along its first edge.
Search find_receiver(const Work& consumer);

}  // namespace fused::autograd::handover
