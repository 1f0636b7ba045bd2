// The results of a function that graphs call.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "host/device.h"

namespace fx_fuser {
namespace {

// y, and the further results that the caller wants.
struct Made {
  Tensor y;
  std::vector<Tensor> more;

  explicit Made(Tensor first) : y(std::move(first)) {}
  Made(Tensor first, const std::optional<Tensor>& second) : y(std::move(first)) {
    if (second) more.push_back(*second);
  }
  explicit Made(const std::vector<Tensor>& all) : y(all.at(0)), more(all.begin() + 1, all.end()) {}

  std::vector<Tensor> all() && {
    more.insert(more.begin(), std::move(y));
    return std::move(more);
  }
};

}  // namespace
}  // namespace fx_fuser
