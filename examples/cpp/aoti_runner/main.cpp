// Runs a model that AOTInductor has packed, with no Python in the process.
//
//   aoti_runner _C.abi3.so model.pt2 input.pt output.pt
//
// input.pt is a tensor saved by torch.save; output.pt is loaded by torch.load.

#include <c10/util/Exception.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/csrc/jit/serialization/pickle.h>

#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

std::vector<char> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write(const std::string& path, const std::vector<char>& bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!file) throw std::runtime_error("cannot write " + path);
}

// A package names the operators that it calls and does not hold them: they have to be registered
// before it is loaded, or the loader says "Could not find schema for fused::...".
void load_operators(const std::string& path) {
  if (dlopen(path.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) throw std::runtime_error(dlerror());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::cerr << "usage: " << argv[0] << " OPERATORS.so MODEL.pt2 INPUT.pt OUTPUT.pt\n";
    return 2;
  }
  try {
    load_operators(argv[1]);
    torch::inductor::AOTIModelPackageLoader model(argv[2]);
    const auto input = torch::jit::pickle_load(read(argv[3])).toTensor();
    const auto outputs = model.run({input});
    write(argv[4], torch::jit::pickle_save(outputs.at(0)));
    std::cout << "output " << outputs.at(0).sizes() << '\n';
  } catch (const c10::Error& error) {
    std::cerr << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << error.what() << '\n';
    return 1;
  }
}
