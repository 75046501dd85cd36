#pragma once

// The autograd node of one layer. The activation is a value: one class serves them all.

#include "autograd/handover.h"
#include "core/activation.h"
#include "core/memory.h"

#include <array>

namespace fused::autograd {

// A layer of which a gradient is wanted.
Tensor linear_with_gradient(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                            Activation activation, Memory memory);

class LinearNode final : public handover::Producer {
 public:
  enum Edge { input_edge, weight_edge, bias_edge };

  LinearNode(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
             Activation activation, Memory memory);

  // Saves what the backward needs, no more than torch keeps for the layer and its activation.
  void keep(const Tensor& input, const Tensor& weight, const Tensor& output, const Tensor& saved);

  const char* refusal() const override;
  variable_list lend_saved() override;
  std::pair<Activation, bool> derivative() const override;
  handover::Note derive(const Tensor& grad, variable_list saved, Tensor* output) override;
  std::optional<KeptInput> lend_output() override;

  std::string name() const override;

 protected:
  variable_list gradients(const Tensor& grad) override;
  std::span<SavedVariable> kept() override { return kept_; }
  std::vector<int64_t> traits() const override;
  Backward backward() const override;

 private:
  static variable_list run_detached(const Tensor& grad, const Detached& node);

  // The last may come with a note.
  enum { input_index, input_up_index, weight_index, saved_index, all_indices };

  const Activation activation_;
  const bool weight_by_columns_;
  const bool of_ensemble_;
  const bool lends_;
  KeptInput::Form input_form_;
  std::array<SavedVariable, all_indices> kept_;
};

// One layer's forward for training, as a node runs it: the output, and what its activation's
// derivative will be read from (undefined for none). Of tensors without autograd.
std::tuple<Tensor, Tensor> forward_for_training(const Tensor& input, const Tensor& weight,
                                                const OptionalTensor& bias, Activation activation,
                                                Memory memory);

// The same where nobody wants a gradient: nothing is kept.
Tensor forward_for_inference(const Tensor& input, const Tensor& weight, const OptionalTensor& bias,
                             Activation activation);

}  // namespace fused::autograd
