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

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function.h>

#include <optional>

namespace fused::autograd::handover {

bool enabled();
void set_enabled(bool enabled);

struct Note {
  Note(at::Tensor dz, at::Tensor grad_bias, torch::autograd::variable_list saved);

  at::Tensor dz;         // what the consumer passed on. Holding it keeps the engine from adding
                         // another gradient to it in place, which would go unseen.
  at::Tensor grad_bias;  // [out] or undefined
  torch::autograd::variable_list saved;  // the producer's, already unpacked: checkpoint allows
                                         // each to be unpacked only once

  // Whether nobody has written to the saved tensors since.
  bool is_unchanged() const;

 private:
  std::vector<int64_t> versions_;
};

// Left for one node in one run of the engine.
void leave(const torch::autograd::Node* producer, int graph_task, Note note);
std::optional<Note> take(const torch::autograd::Node* producer, int graph_task);

// How many notes wait. A run of the engine takes its notes with it when it ends, or is broken off.
size_t waiting();

// Why the gradient that `consumer` is about to pass along its first edge must stay the true one,
// or nullptr: then that edge's node, and nobody else, will receive it. Whether the node is one of
// ours is for the caller to know.
const char* objection(torch::autograd::Node& consumer);

}  // namespace fused::autograd::handover
