#include "autograd/accumulation.h"

#include "core/explain.h"
#include "core/shapes.h"
#include "dispatch/operators.h"
#include "fused_linear.h"
#include "reference/linear.h"

#include <ATen/TensorSubclassLikeUtils.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <vector>

namespace fused::autograd::accumulation {
namespace {

using internals::GraphNode;

enum class Into { none, grad, main_grad };
constexpr const char* names[] = {"none", "grad", "main_grad"};

// ---- which weights ------------------------------------------------------------------------------

struct Wishes {
  c10::VariableVersion counter;  // identifies the weight
  std::vector<Into> all;
};

struct Weights {
  std::mutex mutex;
  std::map<internals::Identity, Wishes> known;
  std::atomic<size_t> count{0};  // 0 lets calls pass without the lock
};

Weights& weights() {
  static auto* value = new Weights;  // outlives every thread
  return *value;
}

bool are_any() { return weights().count.load(std::memory_order_relaxed) != 0; }

Into wish_for(const Tensor& weight) {
  if (!are_any()) return Into::none;
  auto& all = weights();
  const std::lock_guard lock(all.mutex);
  const auto it = all.known.find(internals::identity(weight));
  return it == all.known.end() ? Into::none : it->second.all.back();
}

// ---- where it goes ------------------------------------------------------------------------------

Tensor main_grad(const Tensor& weight, bool added) {
  return dispatch::by_python<dispatch::MainGrad>(weight, added).value_or(Tensor());
}

// Tells whether hooks run after the sum.
bool is_heard(GraphNode& accumulator) {
  return !accumulator.post_hooks().empty() || accumulator.tensor_post_acc_grad_hooks() != nullptr;
}

// Runs before the accumulator and takes zeros without memory away, so that it does not add them. If
// hooks listen after the accumulator it gets a gradient of no elements, which still runs them.
class DropZeros final : public torch::autograd::FunctionPreHook {
 public:
  explicit DropZeros(GraphNode& accumulator) : accumulator_(accumulator) {}

  static bool is(const std::unique_ptr<FunctionPreHook>& hook) {
    return dynamic_cast<const DropZeros*>(hook.get()) != nullptr;
  }

  variable_list operator()(const variable_list& grads) override {
    const auto& grad = grads[0];
    if (!grad.defined() || !grad._is_zerotensor()) return grads;
    if (!is_heard(accumulator_)) return {Tensor()};
    const auto indices = at::empty({grad.dim(), 0}, grad.options().dtype(at::kLong));
    return {at::_sparse_coo_tensor_unsafe(indices, at::empty({0}, grad.options()), grad.sizes(),
                                          grad.options().layout(at::kSparse),
                                          /*is_coalesced=*/true)};
  }
  void compiled_args(internals::CompiledNodeArgs&) const override {}  // tracing makes no such zeros

 private:
  GraphNode& accumulator_;  // which holds the hook
};

// Tells whether hooks see the gradient before the sum.
bool is_watched(GraphNode& accumulator) {
  return !accumulator.tensor_pre_hooks().empty() || !accumulator.retains_grad_hooks().empty() ||
         !std::ranges::all_of(accumulator.pre_hooks(), DropZeros::is);
}

// Names what would see this gradient apart from the sum; nullptr if nothing does. Hooks on the
// layer's other parameters may read the bias's gradient, so they count for a bias.
const char* observer_of(GraphNode& node, GraphNode& accumulator, bool is_bias) {
  if (at::GradMode::is_enabled()) return "create_graph";
  if (torch::autograd::AnomalyMode::is_enabled()) return "anomaly mode";
  if (is_watched(accumulator)) return "a hook on the weight";
  for (size_t i = 0; is_bias && i < node.num_outputs(); ++i) {
    auto* other = node.next_edge(i).function.get();
    if (other && (is_watched(*other) || is_heard(*other))) return "a hook beside the bias";
  }
  if (!node.post_hooks().empty()) return "a hook on the node";
  if (internals::is_captured(&accumulator)) return "its gradient was asked for";
  // Work on another stream may not have written the gradient yet.
  if (accumulator.stream() != node.stream()) return "another stream";
  return nullptr;
}

// Tells whether a 16-bit weight wants its gradient in fp32.
bool is_widened(const Tensor& weight) {
  return weight.grad_dtype() == at::kFloat && weight.element_size() == 2;
}

// Says why the product cannot add to this gradient; nullptr if it can.
const char* misfit_of(const Tensor& into, const Tensor& weight) {
  if (!into.defined()) return "nothing is there yet";
  if (into.layout() != at::kStrided || at::isTensorSubclassLike(into)) return "not a plain tensor";
  if (into.is_neg()) return "a view that negates";
  if (into.requires_grad()) return "a gradient that is part of a graph";
  if (into.is_inference() && !c10::InferenceMode::is_enabled()) return "an inference tensor";
  if (into.sizes() != weight.sizes() || into.device() != weight.device()) return "another shape";
  const bool is_wider = into.scalar_type() == at::kFloat && weight.element_size() == 2;
  if (into.scalar_type() != weight.scalar_type() && !is_wider) return "another dtype";
  if (!into.is_contiguous() && !into.t().is_contiguous()) return "strides that do not fit";
  return nullptr;
}

constexpr const char* shares_memory = "it shares memory with what it is made of";

bool is_shared(const Tensor& into, const Tensor& read) {
  return read.defined() && read.has_storage() && into.is_alias_of(read);
}

// Tells whether a result that is no leaf may be a view of the whole weight.
bool may_be_view(const torch::autograd::Edge& edge, const Tensor& weight) {
  if (!edge.is_valid()) return false;
  const auto& made = edge.function->input_metadata(edge.input_nr);
  return !made.is_nested_tensor() && made.dtype() == weight.dtype() &&
         c10::multiply_integers(made.shape_as_dim_vector()) == weight.numel();
}

// Returns the edge to the accumulator of the parameter that has the weight's memory. There is none
// if several parameters share it, or if a view of it is there as well, as the compiler may keep
// views.
std::optional<size_t> edge_to(const Tensor& weight, const GraphNode& node) {
  std::optional<size_t> found;
  for (size_t i = 0; i < node.num_outputs(); ++i) {
    const auto* accumulator =
        dynamic_cast<const torch::autograd::AccumulateGrad*>(node.next_edge(i).function.get());
    if (accumulator == nullptr) {
      if (may_be_view(node.next_edge(i), weight)) return {};
      continue;
    }
    if (at::isTensorSubclassLike(accumulator->variable)) continue;
    const auto& variable = accumulator->variable;
    if (!variable.has_storage() || variable.const_data_ptr() != weight.const_data_ptr()) continue;
    if (found || variable.sizes() != weight.sizes() || variable.strides() != weight.strides()) {
      return {};
    }
    found = i;
  }
  return found;
}

Tensor gradient_of(const Tensor& weight, const Tensor& grad, const Tensor& input) {
  if (!input.defined()) return reference::as_rows(grad).sum(0);
  const auto like = weight.to(input.scalar_type());
  return std::get<1>(steps::linear_backward(
      {grad, input, like, std::nullopt, Activation::none, {false, true, false}}));
}

}  // namespace

void set(const Tensor& weight, std::string_view text, bool begins) {
  const auto it = std::ranges::find(names, text);
  TORCH_CHECK_VALUE(it > std::begin(names) && it != std::end(names),
                    "_accumulate: into must be 'grad' or 'main_grad', got '", text, "'");
  const auto into = static_cast<Into>(it - names);
  TORCH_CHECK_VALUE(!begins || (weight.is_leaf() && (weight.dim() == 2 || weight.dim() == 1)),
                    "accumulate_gradients: expected a leaf of shape [out, in] or [out], got ",
                    weight.is_leaf() ? "a leaf" : "a result", " of shape ", weight.sizes());
  auto& all = weights();
  const std::lock_guard lock(all.mutex);
  const auto key = internals::identity(weight);
  if (begins) {
    const auto& counter = weight.unsafeGetTensorImpl()->version_counter();
    all.known.try_emplace(key, Wishes{counter, {}}).first->second.all.push_back(into);
  } else if (const auto known = all.known.find(key); known != all.known.end()) {
    auto& wishes = known->second.all;
    const auto last = std::ranges::find(wishes.rbegin(), wishes.rend(), into);
    if (last != wishes.rend()) wishes.erase(std::next(last).base());
  }
  std::erase_if(all.known, [](const auto& entry) {
    return entry.second.all.empty() || entry.second.counter.unique();
  });
  all.count = all.known.size();
}

std::string get(const Tensor& weight) { return names[static_cast<int>(wish_for(weight))]; }

std::optional<Target> target_of(GraphNode* node, size_t edge, at::ArrayRef<Tensor> reads) {
  if (!are_any() || node == nullptr) return {};
  const bool is_running = torch::autograd::get_current_node().get() == node;
  if (!is_running || !node->task_should_compute_output(edge)) return {};
  auto* accumulator =
      dynamic_cast<torch::autograd::AccumulateGrad*>(node->next_edge(edge).function.get());
  if (accumulator == nullptr) return {};
  const auto& weight = accumulator->variable;
  const auto wish = wish_for(weight);
  if (wish == Into::none || !weight.requires_grad()) return {};  // frozen since the forward
  Target target{accumulator, weight, {}};
  const char* why = observer_of(*node, *accumulator, weight.dim() == 1);
  if (why == nullptr) {
    target.is_main = wish == Into::main_grad;
    target.into = target.is_main ? main_grad(weight, /*added=*/false) : weight.grad();
    if (!target.into.defined() && !target.is_main && is_widened(weight)) {
      target.into = at::empty_like(weight, weight.options().dtype(at::kFloat));
      target.adds = false;
    }
    why = misfit_of(target.into, weight);
    // torch writes .grad after the last use of a weight. Nodes between two uses may read it before.
    const bool is_seen = why == nullptr && target.adds && !target.is_main;
    if (is_seen && !internals::has_the_only_edge(*node, *accumulator)) why = "used more than once";
    const auto is_read = [&](const Tensor& t) { return is_shared(target.into, t); };
    if (why == nullptr && std::ranges::any_of(reads, is_read)) why = shares_memory;
  }
  if (why == nullptr) return target;
  explain::remark(std::string("weight's gradient apart: ") + why);
  return {};
}

Tensor Target::add(const Tensor& grad, const Tensor& input, std::optional<at::ScalarType> of_graph,
                   std::span<const int64_t> storages) const {
  const auto options = (is_main ? weight : into).options();
  const auto address = reinterpret_cast<int64_t>(into.storage().unsafeGetStorageImpl());
  const bool is_read = is_shared(into, grad) || is_shared(into, input) || is_shared(into, weight) ||
                       std::ranges::count(storages, address) > 0;
  // The bias's sum has been computed, and torch adds it with one kernel, too.
  const bool is_sum = !input.defined() && grad.dim() == 1;
  if (is_sum && !is_main && grad.scalar_type() == into.scalar_type()) return grad;
  const char* why = adds && is_read ? shares_memory : nullptr;
  // Since the forward:
  if (grad.scalar_type() != weight.scalar_type()) why = "another dtype";
  const int64_t dims = input.defined() ? 2 : 1;
  if (into.dim() != dims || grad.size(-1) != into.size(0)) why = "another shape";
  if (of_graph && *of_graph != options.dtype()) why = "the graph gives another dtype";
  if (why != nullptr) {
    explain::remark(std::string("weight's gradient apart: ") + why);
    return gradient_of(weight, grad, input);
  }
  {
    const std::lock_guard lock(internals::mutex_of(*accumulator));
    steps::weight_gradient(grad, input.defined() ? OptionalTensor(input) : std::nullopt, into,
                           adds);
    into.unsafeGetTensorImpl()->bump_version();
  }
  if (!adds) return into;
  if (is_main) main_grad(weight, /*added=*/true);
  if (!of_graph && !is_heard(*accumulator)) return {};
  if (std::ranges::none_of(accumulator->pre_hooks(), DropZeros::is)) {
    accumulator->add_pre_hook(std::make_unique<DropZeros>(*accumulator));
  }
  return weight.dim() == 2 && grad_lies_by_columns(weight)
             ? at::_efficientzerotensor({weight.size(1), weight.size(0)}, options).t()
             : at::_efficientzerotensor(weight.sizes(), options);
}

namespace {

Tensor accumulated(const Tensor& grad, const Tensor& input, const Tensor& weight,
                   at::ScalarType dtype, const OptionalTensor& storages) {
  TORCH_CHECK(!has_value(storages) || (storages->is_cpu() && storages->is_contiguous() &&
                                       storages->scalar_type() == at::kLong),
              "_accumulated_weight_gradient: storages must be Long, without gaps, on the CPU, got ",
              describe(storages));
  const explain::Remarks remarks;
  const KernelsOnly guard;
  const auto node = torch::autograd::get_current_node();
  // Another node's backward may do more with a graph's gradients than pass them along.
  if (node && are_any() && internals::is_compilers(*node) && has_value(storages)) {
    const auto edge = edge_to(weight, *node);
    const auto target = edge ? target_of(node.get(), *edge) : std::nullopt;
    const std::span reads(storages->const_data_ptr<int64_t>(), storages->numel());
    if (target) return target->add(grad, input, dtype, reads).to(dtype);
  }
  return gradient_of(weight, grad, input).to(dtype);
}

TORCH_LIBRARY_IMPL(fused, CompositeExplicitAutograd, m) {
  m.impl(dispatch::AccumulatedWeightGradient::name, accumulated);
}

}  // namespace
}  // namespace fused::autograd::accumulation
