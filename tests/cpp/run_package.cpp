// Runs an AOTInductor package without Python: run_package PACKAGE INPUTS OUTPUTS
//
// INPUTS and OUTPUTS are tensor files: an int64 count, then per tensor int64 dtype (its place in DTYPES), int64 rank,
// the int64 sizes, and the row-major values. OUTPUTS gets the results, then the inputs as the run left them.

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdint>
#include <fstream>
#include <iostream>
#include <vector>

namespace {

constexpr at::ScalarType DTYPES[] = {at::kInt, at::kLong, at::kByte, at::kBFloat16, at::kFloat, at::kFloat8_e4m3fn, at::kBool};

int64_t dtype_place(at::ScalarType dtype) {
  int64_t place = 0;
  while (DTYPES[place] != dtype) {
    ++place;
  }
  return place;
}

int64_t read_int(std::ifstream& file) {
  int64_t value = 0;
  file.read(reinterpret_cast<char*>(&value), sizeof(value));
  return value;
}

std::vector<at::Tensor> read_tensors(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<at::Tensor> tensors(read_int(file));
  for (auto& tensor : tensors) {
    const auto dtype = DTYPES[read_int(file)];
    std::vector<int64_t> sizes(read_int(file));
    for (auto& size : sizes) {
      size = read_int(file);
    }
    tensor = at::empty(sizes, at::TensorOptions().dtype(dtype));
    file.read(static_cast<char*>(tensor.data_ptr()), tensor.nbytes());
  }
  return tensors;
}

void write_int(std::ofstream& file, int64_t value) {
  file.write(reinterpret_cast<const char*>(&value), sizeof(value));
}

void write_tensors(const char* path, const std::vector<at::Tensor>& tensors) {
  std::ofstream file(path, std::ios::binary);
  write_int(file, tensors.size());
  for (const auto& result : tensors) {
    const auto tensor = result.cpu().contiguous();
    write_int(file, dtype_place(tensor.scalar_type()));
    write_int(file, tensor.dim());
    for (const auto size : tensor.sizes()) {
      write_int(file, size);
    }
    file.write(static_cast<const char*>(tensor.data_ptr()), tensor.nbytes());
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) {
    std::cerr << "usage: run_package PACKAGE INPUTS OUTPUTS\n";
    return 2;
  }
  torch::inductor::AOTIModelPackageLoader loader(argv[1]);
  auto inputs = read_tensors(argv[2]);
  auto tensors = loader.run(inputs);
  tensors.insert(tensors.end(), inputs.begin(), inputs.end());
  write_tensors(argv[3], tensors);
  return 0;
}
