#include "autograd/accumulation.h"

#include "core/explain.h"
#include "dispatch/operators.h"
#include "fused_linear.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <atomic>
#include <mutex>
#include <unordered_map>

namespace fused::autograd::accumulation {
namespace {

using internals::GraphNode;

enum class Into { none, grad, main_grad };
constexpr const char* names[] = {"none", "grad", "main_grad"};

// ---- which weights ------------------------------------------------------------------------------

// By address: the weak pointers keep the addresses of dead weights from being used again.
struct Weights {
  std::mutex mutex;
  std::unordered_map<const c10::TensorImpl*,
                     std::pair<c10::weak_intrusive_ptr<c10::TensorImpl>, Into>>
      known;
  std::atomic<size_t> count{0};  // lets everybody else pass without the lock
};

Weights& weights() {
  static auto* value = new Weights;  // outlives every thread
  return *value;
}

Into wish_for(const Tensor& weight) {
  auto& all = weights();
  if (all.count.load(std::memory_order_relaxed) == 0) return Into::none;
  const std::lock_guard lock(all.mutex);
  const auto it = all.known.find(weight.unsafeGetTensorImpl());
  return it == all.known.end() ? Into::none : it->second.second;
}

// ---- where it goes ------------------------------------------------------------------------------

Tensor main_grad(const Tensor& weight, bool added) {
  return dispatch::by_python<dispatch::MainGrad>(weight, added).value_or(Tensor());
}

// Who would see this gradient apart from the sum, or nullptr.
const char* observer_of(GraphNode& node, GraphNode& accumulator) {
  if (at::GradMode::is_enabled()) return "create_graph";
  if (torch::autograd::AnomalyMode::is_enabled()) return "anomaly mode";
  if (!accumulator.tensor_pre_hooks().empty() || !accumulator.pre_hooks().empty() ||
      !accumulator.retains_grad_hooks().empty()) {
    return "a hook on the weight";
  }
  if (!node.post_hooks().empty()) return "a hook on the node";
  if (internals::is_captured(&accumulator)) return "its gradient was asked for";
  // Only on one stream is what is there complete.
  if (accumulator.stream() != node.stream()) return "another stream";
  return nullptr;
}

// Whether the gradient of a weight of 16 bits is to be in fp32.
bool is_widened(const Tensor& weight) {
  return weight.grad_dtype() == at::kFloat && weight.element_size() == 2;
}

// Why the product cannot write there, or nullptr.
const char* misfit_of(const Tensor& into, const Tensor& weight) {
  if (!into.defined()) return "nothing is there yet";
  if (into.layout() != at::kStrided || at::isTensorSubclassLike(into)) return "not a plain tensor";
  if (into.requires_grad()) return "a gradient that is part of a graph";
  if (into.is_inference() && !c10::InferenceMode::is_enabled()) return "an inference tensor";
  if (into.sizes() != weight.sizes() || into.device() != weight.device()) return "another shape";
  if (into.scalar_type() != weight.scalar_type() && into.scalar_type() != at::kFloat) {
    return "another dtype";
  }
  if (!into.is_contiguous() && !into.t().is_contiguous()) return "strides that do not fit";
  return nullptr;
}

// A gradient of no elements: the engine goes on to the hooks behind the sum.
Tensor nothing_of(const Tensor& like) {
  const auto indices = at::empty({like.dim(), 0}, like.options().dtype(at::kLong));
  return at::_sparse_coo_tensor_unsafe(indices, at::empty({0}, like.options()), like.sizes(),
                                       like.options().layout(at::kSparse),
                                       /*is_coalesced=*/true);
}

}  // namespace

void set(const Tensor& weight, std::string_view text) {
  const auto it = std::ranges::find(names, text);
  TORCH_CHECK_VALUE(it != std::end(names),
                    "_accumulate: into must be 'grad', 'main_grad' or "
                    "'none', got '",
                    text, "'");
  const auto into = static_cast<Into>(it - names);
  TORCH_CHECK_VALUE(into == Into::none || (weight.is_leaf() && weight.dim() == 2),
                    "_accumulate: weight must be a leaf of shape [out, in]");
  auto& all = weights();
  const std::lock_guard lock(all.mutex);
  std::erase_if(all.known, [](const auto& entry) { return entry.second.first.expired(); });
  const auto* key = weight.unsafeGetTensorImpl();
  all.known.erase(key);
  if (into != Into::none) all.known.emplace(key, std::pair(weight.getIntrusivePtr(), into));
  all.count = all.known.size();
}

std::string get(const Tensor& weight) { return names[static_cast<int>(wish_for(weight))]; }

std::optional<Target> target_of(GraphNode* node, size_t edge) {
  if (weights().count.load(std::memory_order_relaxed) == 0 || node == nullptr) return {};
  const bool is_running = torch::autograd::get_current_node().get() == node;
  if (!is_running || !node->task_should_compute_output(edge)) return {};
  auto* accumulator =
      dynamic_cast<torch::autograd::AccumulateGrad*>(node->next_edge(edge).function.get());
  if (accumulator == nullptr) return {};
  const auto& weight = accumulator->variable;
  const auto wish = wish_for(weight);
  if (wish == Into::none) return {};
  Target target(*accumulator, weight);
  const char* why = observer_of(*node, *accumulator);
  if (why == nullptr) {
    target.is_main_ = wish == Into::main_grad;
    target.into_ = target.is_main_ ? main_grad(weight, /*added=*/false) : weight.grad();
    if (!target.into_.defined() && !target.is_main_ && is_widened(weight)) {
      target.into_ = at::empty_like(weight, weight.options().dtype(at::kFloat));
      target.adds_ = false;
    }
    why = misfit_of(target.into_, weight);
  }
  if (why == nullptr) return target;
  explain::remark(std::string("weight's gradient apart: ") + why);
  return {};
}

Tensor Target::add(const Tensor& grad, const Tensor& input) const {
  {
    const std::lock_guard lock(internals::mutex_of(*accumulator_));
    steps::weight_gradient(grad, input, into_, adds_);
    into_.unsafeGetTensorImpl()->bump_version();
  }
  if (!adds_) return into_;
  if (is_main_) main_grad(weight_, /*added=*/true);
  const bool is_heard =
      !accumulator_->post_hooks().empty() || accumulator_->tensor_post_acc_grad_hooks() != nullptr;
  return is_heard ? nothing_of(is_main_ ? weight_ : into_) : Tensor();
}

}  // namespace fused::autograd::accumulation
