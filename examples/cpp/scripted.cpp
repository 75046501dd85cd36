// Trains a TorchScript model that was made in Python, in a process without Python.
//
//     scripted LIBRARY FOLDER [cpu | cuda]
//
// LIBRARY is torch_fused_linear's (library_path() in Python); FOLDER has what make_model.py made
// and gets result.pt: outputs and parameters after the last step, for torch.load.

#include <c10/core/GradMode.h>
#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <torch/csrc/jit/api/module.h>
#include <torch/csrc/jit/serialization/import.h>
#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/optim/sgd.h>

#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// A model only names its operators: the library that has them must be there before the model.
void load_operators(const std::string& library) {
  if (dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    throw std::runtime_error(std::string("the operator library does not load: ") + dlerror() +
                             "\nload the file that torch_fused_linear.library_path() names");
  }
}

torch::jit::Module load_model(const std::string& path, at::Device device) {
  try {
    return torch::jit::load(path, device);
  } catch (const std::exception& error) {
    const std::string what = error.what();
    if (what.find("Unknown builtin op: fused::") == std::string::npos) throw;
    throw std::runtime_error(
        path + " uses operators of torch_fused_linear, which are not loaded: " +
        "load the file that torch_fused_linear.library_path() names first\n" + what);
  }
}

std::vector<char> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error(path + " cannot be read; make_model.py makes it");
  return {std::istreambuf_iterator<char>(file), {}};
}

void write(const std::string& path, const std::vector<char>& bytes) {
  std::ofstream file(path, std::ios::binary);
  if (!file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()))) {
    throw std::runtime_error(path + " cannot be written");
  }
}

void train(const std::string& library, const std::string& folder, at::Device device) {
  load_operators(library);
  torch::jit::Module model = load_model(folder + "/model.pt", device);
  const auto data = torch::jit::pickle_load(read(folder + "/data.pt")).toGenericDict();
  const at::Tensor x = data.at("x").toTensor().to(device);
  const at::Tensor target = data.at("target").toTensor().to(device);

  std::vector<at::Tensor> parameters;
  for (const at::Tensor& parameter : model.parameters()) parameters.push_back(parameter);
  torch::optim::SGD optimizer(parameters, /*lr=*/0.5);
  for (int step = 0; step < 100; ++step) {
    const at::Tensor loss = at::mse_loss(model.forward({x}).toTensor(), target);
    optimizer.zero_grad();
    loss.backward();
    optimizer.step();
    if (step % 20 == 0) std::cout << "loss " << loss.item<double>() << "\n";
  }

  const c10::NoGradGuard no_grad;
  const at::Tensor output = model.forward({x}).toTensor();
  std::cout << "loss " << at::mse_loss(output, target).item<double>() << std::endl;
  // A tuple, which torch.load takes without weights_only=False; a list of tensors it does not.
  std::vector<c10::IValue> result{output.cpu()};
  for (const at::Tensor& parameter : parameters) result.emplace_back(parameter.detach().cpu());
  write(folder + "/result.pt", torch::jit::pickle_save(c10::ivalue::Tuple::create(result)));
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3 || count > 4) {
    std::cerr << "usage: " << arguments[0] << " LIBRARY FOLDER [cpu | cuda]\n";
    return 2;
  }
  try {
    train(arguments[1], arguments[2], at::Device(count == 4 ? arguments[3] : "cpu"));
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << "\n";
    return 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
