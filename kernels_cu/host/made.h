// What a fused op makes, and the op that graphs call for all of it.
#pragma once

#include <optional>
#include <tuple>
#include <utility>

#include "host/device.h"

namespace fx_fuser {
namespace {

// y, and of the further results those that are wanted.
struct Made {
  Tensor y;
  std::optional<Tensor> c;
  std::optional<Tensor> mean;
  std::optional<Tensor> variance;
};

// Each result of such a function; where it made none, an empty tensor.
template <auto kMake>
struct PackedResults;

template <class... Rest, Made (*kMake)(const Tensor&, Rest...)>
struct PackedResults<kMake> {
  static std::tuple<Tensor, Tensor> two(const Tensor& x, Rest... rest) {
    const Made made = kMake(x, rest...);
    return {made.y, or_empty(made.c, x)};
  }
  static std::tuple<Tensor, Tensor, Tensor, Tensor> four(const Tensor& x, Rest... rest) {
    const Made made = kMake(x, rest...);
    return {made.y, or_empty(made.c, x), or_empty(made.mean, x), or_empty(made.variance, x)};
  }

 private:
  static Tensor or_empty(const std::optional<Tensor>& result, const Tensor& x) {
    return result ? *result : new_dense(x, {0}, x.scalar_type());
  }
};

}  // namespace
}  // namespace fx_fuser
