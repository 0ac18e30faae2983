// Generates with packages of dsv4_ops.integrations.transformers, and needs neither Python nor dsv4_ops:
//
//     aoti_runner [--prefill PACKAGE] PACKAGE NUM_TOKENS PROMPT [PROMPT ...]
//
// Every prompt is a request of its own. The package of export_decode decodes all requests in one step, at any positions.
// A package of export_prefill, for a cache of the same sizes, takes the prompts, in chunks if they are longer than a
// step; without that package, prompts are decoded token by token. The tokens of the demo's model are bytes, after a
// first token 256. The program prints a line of NUM_TOKENS greedy tokens per prompt.

#include <ATen/ATen.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
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

using Metadata = std::unordered_map<std::string, std::string>;

// The package's inputs, made from its metadata: "name:dtype:sizes;..." in the order of the inputs, and "table:ring;..."
// for the block tables, whose entry [row, block] is row * ring + block % ring.
struct Inputs {
  std::vector<at::Tensor> tensors;
  std::map<std::string, at::Tensor> by_name;

  explicit Inputs(const Metadata& metadata) {
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
  std::vector<int64_t> tokens;  // the prompt, then the generated tokens
  size_t prompt = 0;
  size_t done = 0;  // tokens whose keys are in the caches
};

at::Tensor int32s(const std::vector<int32_t>& values) { return at::tensor(values, at::kInt); }

// Runs one step over the next counts[i] tokens of every request i; further requests of the package are padding, of row
// -1. The step writes the caches among the inputs. If a request has no token left, it gets the next greedy token. A
// package of export_prefill takes only these tokens, and returns logits of every request's last token; a package of
// export_decode takes a fixed number of tokens, and returns logits of each.
void step(
    torch::inductor::AOTIModelPackageLoader& loader, bool prefills, Inputs& inputs, std::vector<Request>& requests,
    const std::vector<size_t>& counts) {
  const auto total = static_cast<size_t>(inputs.by_name.at("seq_lens").size(0));
  std::vector<int64_t> tokens;
  std::vector<int32_t> starts(total + 1), lens(total, 0), rows(total, -1);
  for (size_t request = 0; request < total; ++request) {
    if (request < requests.size()) {
      auto& each = requests[request];
      const auto first = each.tokens.begin() + static_cast<std::ptrdiff_t>(each.done);
      tokens.insert(tokens.end(), first, first + static_cast<std::ptrdiff_t>(counts[request]));
      each.done += counts[request];
      lens[request] = static_cast<int32_t>(each.done);
      rows[request] = static_cast<int32_t>(request);
    }
    starts[request + 1] = static_cast<int32_t>(tokens.size());
  }
  auto given = inputs.tensors;
  auto& fed = inputs.by_name.at("tokens");
  if (prefills) {  // the tokens are the first input
    given.at(0) = at::tensor(tokens, at::kLong).to(fed.device());
  } else {
    tokens.resize(fed.size(0), 0);
    fed.copy_(at::tensor(tokens, at::kLong));
  }
  inputs.by_name.at("query_start_loc").copy_(int32s(starts));
  inputs.by_name.at("seq_lens").copy_(int32s(lens));
  inputs.by_name.at("rows").copy_(int32s(rows));
  const auto best = loader.run(given).at(0).argmax(-1).cpu();
  for (size_t request = 0; request < requests.size(); ++request) {
    auto& each = requests[request];
    if (counts[request] > 0 && each.done == each.tokens.size()) {
      const auto row = prefills ? static_cast<int64_t>(request) : starts[request + 1] - 1;
      each.tokens.push_back(best.data_ptr<int64_t>()[row]);
    }
  }
}

// Prefills all prompts, with as many tokens per step as the package takes. Returns the number of steps.
size_t prefill(const std::string& package, Inputs& inputs, const Metadata& decode, std::vector<Request>& requests) {
  torch::inductor::AOTIModelPackageLoader loader(package);
  const auto metadata = loader.get_metadata();
  const auto most = metadata.find("dsv4_ops.max_tokens");
  if (most == metadata.end()) {
    throw std::runtime_error("--prefill is no package of export_prefill");
  }
  const auto sizes = [](const Metadata& of) {  // the sizes of all inputs but the first, which is the tokens
    const auto& described = of.at("dsv4_ops.inputs");
    return described.substr(described.find(';')) + of.at("dsv4_ops.rings") + of.at("AOTI_DEVICE_KEY");
  };
  if (sizes(metadata) != sizes(decode)) {
    throw std::runtime_error("the packages are for caches or requests of different sizes");
  }
  const auto chunk = static_cast<size_t>(std::stoull(metadata.at("dsv4_ops.max_chunk")));
  size_t steps = 0;
  while (true) {
    auto room = static_cast<size_t>(std::stoull(most->second));
    std::vector<size_t> counts;
    for (const auto& request : requests) {
      counts.push_back(std::min({request.prompt - std::min(request.done, request.prompt), chunk, room}));
      room -= counts.back();
    }
    if (room == static_cast<size_t>(std::stoull(most->second))) {
      return steps;
    }
    step(loader, true, inputs, requests, counts);
    ++steps;
  }
}

int run(
    const std::string& package, const std::string& prefill_package, size_t count,
    const std::vector<std::string>& prompts) {
  torch::inductor::AOTIModelPackageLoader loader(package);
  const auto metadata = loader.get_metadata();
  Inputs inputs(metadata);
  std::vector<Request> requests;
  size_t longest = 0;
  for (const auto& prompt : prompts) {
    Request request{{FIRST_TOKEN}, prompt.size() + 1, 0};
    for (const unsigned char byte : prompt) {
      request.tokens.push_back(byte);
    }
    longest = std::max(longest, request.prompt + count - 1);
    requests.push_back(request);
  }
  if (requests.size() > static_cast<size_t>(inputs.by_name.at("seq_lens").size(0))) {
    throw std::runtime_error("more prompts than the package has requests");
  }
  if (longest > std::stoull(metadata.at("dsv4_ops.max_cache_len"))) {
    throw std::runtime_error("prompt and tokens are longer than the package's longest request");
  }
  if (!prefill_package.empty()) {
    const auto chunks = prefill(prefill_package, inputs, metadata, requests);
    std::cerr << "prompts in " << chunks << " steps\n";
  }
  const auto begin = std::chrono::steady_clock::now();
  size_t steps = 0;
  const auto open = [&](const Request& request) { return request.tokens.size() < request.prompt + count; };
  for (; std::any_of(requests.begin(), requests.end(), open); ++steps) {
    std::vector<size_t> counts;
    for (const auto& request : requests) {
      counts.push_back(open(request) ? 1 : 0);
    }
    step(loader, false, inputs, requests, counts);
  }
  const std::chrono::duration<double, std::milli> took = std::chrono::steady_clock::now() - begin;
  // the package counts tokens that its caches cannot store, and never waits: one check at the end is enough
  const auto dropped = inputs.by_name.at("dropped").item<int64_t>();
  if (dropped != 0) {
    throw std::runtime_error(std::to_string(dropped) + " tokens were not stored");
  }
  for (const auto& request : requests) {
    for (size_t token = 0; token < count; ++token) {
      std::cout << (token ? " " : "") << request.tokens.at(request.prompt + token);
    }
    std::cout << "\n";
  }
  std::cerr << steps << " steps of " << took.count() / static_cast<double>(std::max<size_t>(steps, 1)) << " ms\n";
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> arguments(argv + 1, argv + argc);
  std::string prefill_package;
  if (arguments.size() > 1 && arguments[0] == "--prefill") {
    prefill_package = arguments[1];
    arguments.erase(arguments.begin(), arguments.begin() + 2);
  }
  if (arguments.size() < 3) {
    std::cerr << "usage: aoti_runner [--prefill PACKAGE] PACKAGE NUM_TOKENS PROMPT [PROMPT ...]\n";
    return 2;
  }
  try {
    return run(arguments[0], prefill_package, std::stoul(arguments[1]), {arguments.begin() + 2, arguments.end()});
  } catch (const std::exception& error) {
    std::cerr << "aoti_runner: " << error.what() << "\n";
    return 1;
  }
}
