#include "float8/node.h"

namespace fused::float8 {

void Versions::remember(const std::string& what, const Tensor& tensor) {
  if (tensor.is_inference() || is_traced(tensor)) return;
  const auto& counter = torch::autograd::impl::version_counter(tensor);
  seen_.push_back({what, counter, counter.current_version()});
}

void Versions::check(const char* op) const {
  for (const auto& [what, counter, version] : seen_) {
    TORCH_CHECK(counter.current_version() == version,
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: ",
                what, " of ", op, " is at version ", counter.current_version(),
                "; expected version ", version, " instead");
  }
}

variable_list differentiable_once(const char* op, variable_list gradients, const Tensor& grad,
                                  const torch::autograd::edge_list& edges) {
  torch::autograd::edge_list next;
  if (grad.requires_grad()) next.push_back(autograd::edge_of(grad));
  for (const auto& edge : edges) {
    if (edge.is_valid()) next.push_back(edge);
  }
  if (next.empty()) return gradients;
  const auto text = std::string(op) +
                    ": its gradients cannot be differentiated again, as they are cast to FP8. Use "
                    "precision='default' where create_graph=True is needed";
  for (auto& gradient : gradients) {
    if (!gradient.defined()) continue;
    const auto error =
        autograd::make_node<torch::autograd::Error>(text, torch::autograd::edge_list(next));
    gradient = gradient.detach();
    autograd::set_history(gradient, error);
  }
  return gradients;
}

Tensor like_rows_of(const Tensor& grad, const Tensor& rows) {
  auto sizes = grad.sym_sizes().vec();
  sizes.back() = rows.sym_size(1);
  return rows.view_symint(sizes);
}

}  // namespace fused::float8
