// Uses the C++ API of fused_linear.h, with parameters of torch::nn: every gradient is held against
// that of torch's own operators, then a small network learns.
//
//     direct [cpu | cuda]

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <fused_linear.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>

#include <exception>
#include <iostream>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

namespace {

using at::Tensor;
using Gradients = std::vector<Tensor>;

struct Network : torch::nn::Module {
  torch::nn::Linear first, second;

  Network(int64_t in, int64_t hidden, int64_t out)
      : first(register_module("first", torch::nn::Linear(in, hidden))),
        second(register_module("second", torch::nn::Linear(hidden, out))) {}

  Tensor forward(const Tensor& x) {
    const Tensor h = fused::linear_relu(x, first->weight, first->bias);
    return fused::linear(h, second->weight, second->bias);
  }

  // The two layers as one operator.
  Tensor mlp(const Tensor& x, std::string_view activation) {
    return fused::mlp(x, {first->weight, second->weight}, {{first->bias, second->bias}},
                      activation);
  }

  Tensor plain_relu(const Tensor& x) { return second->forward(at::relu(first->forward(x))); }
  Tensor plain_gelu(const Tensor& x) {
    return second->forward(at::gelu(first->forward(x), "tanh"));
  }
};

// Computes the gradients of all parameters for the output's gradient `grad`.
Gradients gradients(Network& network, const Tensor& output, const Tensor& grad) {
  network.zero_grad();
  output.backward(grad);
  Gradients all;
  for (const Tensor& parameter : network.parameters()) all.push_back(parameter.grad().clone());
  return all;
}

// Does autograd's work by hand, for an engine of your own.
Gradients gradients_by_steps(Network& network, const Tensor& x, const Tensor& grad) {
  namespace steps = fused::steps;
  const c10::NoGradGuard no_grad;
  const auto [h, saved] =
      steps::linear_aux(x, network.first->weight, network.first->bias, fused::Activation::relu);
  // Through the second layer and, in the same step, through the first one's ReLU.
  const auto [dz, dw2, db2, db1] = steps::linear_backward_across(
      {grad, h, network.second->weight, {}}, {saved, fused::Activation::relu, true});
  const auto [dx, dw1, no_bias] =
      steps::linear_backward({dz, x, network.first->weight, {}, {}, {false, true, false}});
  return {dw1, db1, dw2, db2};
}

void check(const std::string& what, const Gradients& got, const Gradients& want) {
  for (size_t i = 0; i < want.size(); ++i) {
    if (!at::allclose(got.at(i), want[i], /*rtol=*/1e-4, /*atol=*/1e-5)) {
      throw std::runtime_error("gradient " + std::to_string(i) + " of " + what + " is wrong");
    }
  }
  std::cout << what << ": " << want.size() << " gradients equal torch::nn's\n";
}

void train(Network& network, const Tensor& x, const Tensor& target) {
  torch::optim::SGD optimizer(network.parameters(), /*lr=*/0.5);
  for (int step = 0; step < 100; ++step) {
    const Tensor loss = at::mse_loss(network.forward(x), target);
    if (step % 20 == 0) std::cout << "loss " << loss.item<double>() << "\n";
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
  }
  const c10::NoGradGuard no_grad;
  std::cout << "loss " << at::mse_loss(network.forward(x), target).item<double>() << std::endl;
}

void run(at::Device device) {
  at::manual_seed(0);
  Network network(8, 32, 4);
  network.to(device);
  const Tensor x = at::randn({64, 8}).to(device), grad = at::randn({64, 4}).to(device);

  const Gradients relu = gradients(network, network.plain_relu(x), grad);
  check("fused::linear_relu", gradients(network, network.forward(x), grad), relu);
  check("fused::mlp, relu", gradients(network, network.mlp(x, "relu"), grad), relu);
  check("fused::steps", gradients_by_steps(network, x, grad), relu);
  const Gradients gelu = gradients(network, network.plain_gelu(x), grad);
  check("fused::mlp, gelu_tanh", gradients(network, network.mlp(x, "gelu_tanh"), grad), gelu);

  train(network, x, at::tanh(at::matmul(x, at::randn({8, 4}).to(device))));
}

}  // namespace

int main(int count, char** arguments) {
  try {
    run(at::Device(count > 1 ? arguments[1] : "cpu"));
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
