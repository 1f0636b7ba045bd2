// What this library assumes of the ops that fx_fuser/ops/library.py defines, in words: one fact a
// line. Two texts that lie apart agree, or are told where they differ, before the first kernel
// runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "host/conv.h"
#include "host/conv_backward.h"
#include "host/fold.h"
#include "host/linear.h"
#include "host/pointwise.h"

namespace fx_fuser {
namespace {

// Names of arguments, after the anchor's own.
constexpr std::string_view kForwardNames = "epilogue, t, s, kernels, out, save";
constexpr std::string_view kBackwardNames = "epilogue, t, s, kernels, dy, products, wanted";

// The ops that shim.cpp implements: function and name, names of arguments, names of results.
#define FX_FUSER_OPS(OP)                                                             \
  OP(linear_kernel, kLinearNames, kForwardNames, "y, c")                             \
  OP(matmul_kernel, kLinearNames, kForwardNames, "y, c")                             \
  OP(bmm_kernel, kBmmNames, kForwardNames, "y, c")                                   \
  OP(conv2d_kernel, kConvNames, kForwardNames, "y, c")                               \
  OP(conv2d_backward, kConvNames, kBackwardNames, "")                                \
  OP(conv2d_batchnorm_kernel, kConvBatchNormNames, kForwardNames, "y, c, mean, var") \
  OP(conv2d_batchnorm_backward, kConvBatchNormNames, kBackwardNames, "")             \
  OP(fold, kFoldNames, std::string_view(), "")                                       \
  OP(split_product, std::string_view("a, b, kernel"), std::string_view(), "")        \
  OP(exact_product, std::string_view("a, b, kernel"), std::string_view(), "")

// What a schema calls an argument of this type.
template <class T>
std::string schema_type() {
  if constexpr (std::is_same_v<T, Tensor>) {
    return "Tensor";
  } else if constexpr (std::is_same_v<T, std::optional<Tensor>>) {
    return "Tensor?";
  } else if constexpr (std::is_same_v<T, std::vector<Tensor>>) {
    return "Tensor[]";
  } else if constexpr (std::is_same_v<T, std::string>) {
    return "str";
  } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
    return "str[]";
  } else if constexpr (std::is_same_v<T, int64_t>) {
    return "int";
  } else if constexpr (std::is_same_v<T, std::vector<int64_t>>) {
    return "int[]";
  } else if constexpr (std::is_same_v<T, double>) {
    return "float";
  } else if constexpr (std::is_same_v<T, std::vector<double>>) {
    return "float[]";
  } else if constexpr (std::is_same_v<T, bool>) {
    return "bool";
  } else {
    static_assert(std::is_same_v<T, ScalarType>);
    return "ScalarType";
  }
}

std::vector<std::string> split_names(std::string_view names) {
  std::vector<std::string> found;
  while (!names.empty()) {
    const size_t comma = names.find(", ");
    found.emplace_back(names.substr(0, comma));
    names = comma == std::string_view::npos ? std::string_view() : names.substr(comma + 2);
  }
  return found;
}

std::string named_types(const std::vector<std::string>& types,
                        const std::vector<std::string>& names) {
  STD_TORCH_CHECK(types.size() == names.size(), "fx_fuser: ", types.size(), " arguments have ",
                  names.size(), " names");
  std::string text = "(";
  for (size_t i = 0; i < types.size(); ++i) {
    text += (i ? ", " : "") + types[i] + " " + names[i];
  }
  return text + ")";
}

template <class T>
struct Results {
  static std::string text(std::string_view) { return schema_type<T>(); }
};
template <class... T>
struct Results<std::tuple<T...>> {
  static std::string text(std::string_view names) {
    return named_types({schema_type<T>()...}, split_names(names));
  }
};

// As torch prints the schema of an op that this function implements: the types are the function's
// own.
template <class Result, class... Arguments>
std::string schema_line(Result (*)(Arguments...), const char* name, std::string_view anchor_names,
                        std::string_view names, std::string_view result_names) {
  std::vector<std::string> all = split_names(anchor_names);
  for (std::string& one : split_names(names)) all.push_back(std::move(one));
  return std::string("schema fx_fuser::") + name +
         named_types({schema_type<std::decay_t<Arguments>>()...}, all) + " -> " +
         Results<Result>::text(result_names);
}

std::vector<std::string> contract() {
  std::vector<std::string> lines{"limit tensors " + std::to_string(kMaxInputs),
                                 "limit numbers " + std::to_string(kMaxScalars)};
#define FX_FUSER_SCHEMA_LINE(function, anchor_names, names, result_names) \
  lines.push_back(schema_line(function, #function, anchor_names, names, result_names));
  FX_FUSER_OPS(FX_FUSER_SCHEMA_LINE)
#undef FX_FUSER_SCHEMA_LINE

  std::string leaves = "leaves";
  for (const NormLeaf& leaf : kNormLeaves) leaves += std::string(" ") + leaf.name;
  lines.push_back(leaves + " " + kNormNumber);

  std::string places = "places";
  for (const Place& place : kPlaces) {
    places += " " + std::string(place.name) + " " + std::to_string(place.place);
  }
  lines.push_back(places);
  return lines;
}

}  // namespace
}  // namespace fx_fuser
