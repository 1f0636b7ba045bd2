// Loading of kernels: one op for all families, which looks up a family's loader by name. Each
// family's file in this folder registers its loader.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "host/device.h"

namespace fx_fuser {
namespace {

// What the kernels of one epilogue are loaded from.
struct Sources {
  const std::string& name;                    // by which graphs find them
  const std::vector<std::string>& cubins;     // the epilogue's own; those that all epilogues share
  const std::vector<std::string>& signature;  // the macro's arguments
  int device;
  const std::vector<double>& rates;  // of the device
};

ScalarType scalar_type_of(const std::string& cuda_name) {
  static constexpr std::pair<const char*, ScalarType> kNames[] = {
      {"float", ScalarType::Float}, {"double", ScalarType::Double},
      {"__half", ScalarType::Half}, {"__nv_bfloat16", ScalarType::BFloat16},
      {"bool", ScalarType::Bool},   {"uint8_t", ScalarType::Byte},
      {"int8_t", ScalarType::Char}, {"int16_t", ScalarType::Short},
      {"int32_t", ScalarType::Int}, {"int64_t", ScalarType::Long},
  };
  for (const auto& [name, type] : kNames) {
    if (cuda_name == name) return type;
  }
  STD_TORCH_CHECK(false, "fx_fuser: unknown element type ", cuda_name);
}

// An epilogue's types: inputs and result.
struct EpilogueTypes {
  int scalars;  // how many
  ScalarType out;
  ScalarType x;                      // of the first tensor, and of its weight and c
  std::vector<ScalarType> operands;  // of the other tensors
};

// A parsed signature: sizes, the epilogue's name, the number of scalars, Acc, Out, tensor types.
struct Signature : EpilogueTypes {
  std::vector<int> sizes;

  explicit Signature(const Sources& from, size_t size_count = 0) {
    const auto& words = from.signature;
    STD_TORCH_CHECK(words.size() >= size_count + 5, "fx_fuser: kernel ", from.name, " needs ",
                    size_count, " sizes, an epilogue, a number of scalars, Acc, Out and the type ",
                    "of at least one tensor, not ", words.size(), " words");
    for (size_t i = 0; i < size_count; ++i) sizes.push_back(std::stoi(words[i]));
    scalars = std::stoi(words[size_count + 1]);
    out = scalar_type_of(words[size_count + 3]);
    x = scalar_type_of(words[size_count + 4]);
    for (size_t i = size_count + 5; i < words.size(); ++i) {
      operands.push_back(scalar_type_of(words[i]));
    }
  }

  void check_operands(size_t most) const {
    STD_TORCH_CHECK(operands.size() <= most, "fx_fuser: this kernel takes at most ", most,
                    " operands, not ", operands.size());
  }
};

using Loader = int64_t (*)(const Sources&);

std::map<std::string, Loader>& loaders() {
  static std::map<std::string, Loader> known;
  return known;
}

struct AddLoader {
  AddLoader(const char* family, Loader loader) { loaders().emplace(family, loader); }
};

// Registers the kernels by name, for graphs, and returns a handle, for calls from Python. They are
// never freed.
template <class... Bases, class Kernels>
int64_t keep(const Sources& from, std::unique_ptr<Kernels> kernels) {
  (registry<Bases>().add(from.name, from.device, kernels.get()), ...);
  return reinterpret_cast<int64_t>(kernels.release());
}

// Loads a family's kernels and returns their handle.
int64_t load(const std::string& family, const std::string& name,
             const std::vector<std::string>& cubins, const std::vector<std::string>& signature,
             int64_t device, const std::vector<double>& rates) {
  const auto found = loaders().find(family);
  STD_TORCH_CHECK(found != loaders().end(), "fx_fuser: there is no family of kernels ", family);
  const OnDevice on_device(static_cast<int>(device));
  return found->second({name, cubins, signature, static_cast<int>(device), rates});
}

// The kernels of this name; loaded by this op if they were not, null where they do not load.
template <class Kernels>
const Kernels* kernels_named(const std::string& name, const Tensor& on, const char* loader) {
  require_cuda(on, "the first operand");
  const int device = on.get_device_index();
  const Kernels* found = registry<Kernels>().find(name, device);
  if (found != nullptr || !is_first_miss(name, device)) return found;
  std::array<StableIValue, 2> stack{torch::stable::detail::from(on),
                                    torch::stable::detail::from(name)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(loader, "", stack.data(), TORCH_ABI_VERSION));
  return registry<Kernels>().find(name, device);
}

}  // namespace
}  // namespace fx_fuser
