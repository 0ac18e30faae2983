// Generates with a package of dsv4_ops.integrations.transformers.export_decode. No Python, nor dsv4_ops, is needed:
//
//     aoti_runner PACKAGE NUM_TOKENS PROMPT [PROMPT ...]
//
// Every prompt is a request of its own; the package decodes all of them in one step, wherever each of them is. The
// tokens of the demo's model are bytes, after a first token 256. Prints a line of NUM_TOKENS greedy tokens per prompt.

#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <iostream>
#include <map>
#include <sstream>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

namespace {

constexpr int64_t FIRST_TOKEN = 256;

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts;
  std::istringstream stream(text);
  for (std::string part; std::getline(stream, part, by);) {
    parts.push_back(part);
  }
  return parts;
}

at::ScalarType dtype_of(const std::string& name) {
  static const std::map<std::string, at::ScalarType> dtypes = {
      {"int32", at::kInt}, {"int64", at::kLong}, {"uint8", at::kByte}, {"bfloat16", at::kBFloat16}, {"float32", at::kFloat}};
  return dtypes.at(name);
}

// Inputs of the package, made from its metadata: "name:dtype:sizes;..." in the order in which it takes them, and
// "table:ring;..." for the page tables, whose entry [row, block] is row * ring + block % ring.
struct Inputs {
  std::vector<at::Tensor> tensors;
  std::map<std::string, at::Tensor> by_name;

  explicit Inputs(const std::unordered_map<std::string, std::string>& metadata) {
    const auto device = at::Device(metadata.at("AOTI_DEVICE_KEY"));
    for (const auto& described : split(metadata.at("dsv4_ops.inputs"), ';')) {
      const auto fields = split(described, ':');
      std::vector<int64_t> sizes;
      for (const auto& size : split(fields.at(2), 'x')) {
        sizes.push_back(std::stoll(size));
      }
      tensors.push_back(at::zeros(sizes, at::TensorOptions().dtype(dtype_of(fields.at(1))).device(device)));
      by_name[fields.at(0)] = tensors.back();
    }
    for (const auto& described : split(metadata.at("dsv4_ops.rings"), ';')) {
      const auto fields = split(described, ':');
      const auto ring = std::stoll(fields.at(1));
      auto table = by_name.at("tables." + fields.at(0));
      const auto rows = at::arange(table.size(0), table.options()).unsqueeze(1);
      const auto blocks = at::arange(table.size(1), table.options()).unsqueeze(0);
      table.copy_(rows * ring + blocks.remainder(ring));
    }
  }
};

struct Request {
  std::vector<int64_t> tokens;  // the prompt, then what is generated
  size_t prompt = 0;
};

at::Tensor int32s(const std::vector<int32_t>& values) { return at::tensor(values, at::kInt); }

// One step: a token of every request; requests that the package has beyond ours are padding, of row -1.
std::vector<int64_t> step(
    torch::inductor::AOTIModelPackageLoader& loader, Inputs& inputs, const std::vector<Request>& requests, size_t place) {
  const auto total = static_cast<size_t>(inputs.by_name.at("seq_lens").size(0));
  std::vector<int64_t> tokens(inputs.by_name.at("tokens").size(0), 0);
  std::vector<int32_t> starts(total + 1), lens(total, 0), rows(total, -1);
  for (size_t request = 0; request < total; ++request) {
    starts[request + 1] = static_cast<int32_t>(std::min(request + 1, requests.size()));
    if (request < requests.size()) {
      tokens[request] = requests[request].tokens.at(place);
      lens[request] = static_cast<int32_t>(place + 1);
      rows[request] = static_cast<int32_t>(request);
    }
  }
  inputs.by_name.at("tokens").copy_(at::tensor(tokens, at::kLong));
  inputs.by_name.at("query_start_loc").copy_(int32s(starts));
  inputs.by_name.at("seq_lens").copy_(int32s(lens));
  inputs.by_name.at("rows").copy_(int32s(rows));
  const auto logits = loader.run(inputs.tensors).at(0);  // the caches among the inputs are written in place
  const auto best = logits.argmax(-1).cpu();
  return {best.data_ptr<int64_t>(), best.data_ptr<int64_t>() + requests.size()};
}

int run(const std::string& package, size_t count, const std::vector<std::string>& prompts) {
  torch::inductor::AOTIModelPackageLoader loader(package);
  const auto metadata = loader.get_metadata();
  Inputs inputs(metadata);
  std::vector<Request> requests;
  size_t steps = 0;
  for (const auto& prompt : prompts) {
    Request request{{FIRST_TOKEN}, prompt.size() + 1};
    for (const unsigned char byte : prompt) {
      request.tokens.push_back(byte);
    }
    steps = std::max(steps, request.prompt + count - 1);
    requests.push_back(request);
  }
  if (requests.size() > static_cast<size_t>(inputs.by_name.at("seq_lens").size(0))) {
    throw std::runtime_error("more prompts than the package has requests");
  }
  if (steps > std::stoull(metadata.at("dsv4_ops.max_len"))) {
    throw std::runtime_error("prompt and tokens are longer than the package's longest request");
  }
  const auto begin = std::chrono::steady_clock::now();
  for (size_t place = 0; place < steps; ++place) {
    const auto next = step(loader, inputs, requests, place);
    for (size_t request = 0; request < requests.size(); ++request) {
      if (requests[request].tokens.size() == place + 1) {
        requests[request].tokens.push_back(next[request]);
      }
    }
  }
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
  for (const auto& request : requests) {
    for (size_t token = 0; token < count; ++token) {
      std::cout << (token ? " " : "") << request.tokens.at(request.prompt + token);
    }
    std::cout << "\n";
  }
  std::cerr << steps << " steps of " << took.count() / static_cast<double>(steps) << " ms\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) {
    std::cerr << "usage: aoti_runner PACKAGE NUM_TOKENS PROMPT [PROMPT ...]\n";
    return 2;
  }
  try {
    return run(argv[1], std::stoul(argv[2]), {argv + 3, argv + argc});
  } catch (const std::exception& error) {
    std::cerr << "aoti_runner: " << error.what() << "\n";
    return 1;
  }
}
