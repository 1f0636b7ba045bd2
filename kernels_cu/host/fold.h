// fx_fuser::fold on CUDA: BatchNorms folded into the weights before them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "conv/fold_args.h"
#include "host/device.h"
#include "host/image.h"
#include "host/pointwise.h"

namespace fx_fuser {
namespace {

// Bits of `given`, in the order of a layer's vectors; mean and variance are always present.
constexpr int64_t kHasBias = 1;
constexpr int64_t kHasGamma = 2;
constexpr int64_t kHasBeta = 4;

struct FoldKernels {
  Kernel fold;
  ScalarType out;
  ScalarType in;
};

int64_t load_fold(const Sources& from) {
  const Signature types(from);
  const Kernel kernel = get_kernel(load_library(from.cubins.at(0)), "fx_fuser_fold");
  return keep<FoldKernels>(from,
                           std::make_unique<FoldKernels>(FoldKernels{kernel, types.out, types.x}));
}
const AddLoader kFoldLoader("fold", load_fold);

FoldVector fold_vector_of(const Tensor& vector, const Tensor& weight) {
  STD_TORCH_CHECK(vector.dim() == 1 && vector.size(0) == weight.size(0), "fx_fuser: shape ",
                  to_string(vector.sizes()), " is not one number per output channel of weight ",
                  to_string(weight.sizes()));
  STD_TORCH_CHECK(vector.get_device_index() == weight.get_device_index(),
                  "fx_fuser: fold's tensors are on several devices");
  switch (vector.scalar_type()) {
    case ScalarType::Float:
      return {vector.data_ptr(), vector.stride(0), VectorType::kFloat};
    case ScalarType::Half:
      return {vector.data_ptr(), vector.stride(0), VectorType::kHalf};
    case ScalarType::BFloat16:
      return {vector.data_ptr(), vector.stride(0), VectorType::kBFloat16};
    default:
      STD_TORCH_CHECK(false, "fx_fuser: fold cannot read ", toString(vector.scalar_type()));
  }
}

// The fields of a site that follow from its weight.
void describe(FoldSite& site, const Tensor& weight, double eps) {
  site.weight = weight.data_ptr();
  site.eps = static_cast<float>(eps);
  for (int d = 0; d < 4; ++d) site.strides[d] = weight.stride(d);
  const int64_t channels = weight.size(1);
  site.is_wide = channels % kFoldWidth == 0;
  const auto bytes = static_cast<int64_t>(weight.element_size());
  bool is_aligned = reinterpret_cast<uintptr_t>(weight.data_ptr()) % 16 == 0;
  for (const int d : {0, 2, 3}) {
    is_aligned = is_aligned && (weight.size(d) == 1 || weight.stride(d) * bytes % 16 == 0);
  }
  site.reads_vectors = is_aligned && weight.stride(1) == 1;
  const int64_t groups = site.is_wide ? channels / kFoldWidth : channels;
  const int64_t units = groups * weight.size(2) * weight.size(3);
  site.all_units = static_cast<uint32_t>(units * weight.size(0));
  site.units = make_divisor(static_cast<uint32_t>(units));
  site.groups = make_divisor(static_cast<uint32_t>(groups));
  site.columns = make_divisor(static_cast<uint32_t>(weight.size(3)));
}

// Returns one tensor with each layer's folded weight and shift, at the offsets in `places`.
Tensor fold(const std::vector<Tensor>& weights, const std::vector<Tensor>& vectors,
            const std::vector<int64_t>& given, const std::vector<double>& eps,
            const std::vector<int64_t>& places, const std::string& kernel, ScalarType out,
            const Tensor& /*after*/) {
  STD_TORCH_CHECK(!weights.empty() && given.size() == weights.size() &&
                      eps.size() == given.size() && places.size() == 2 * given.size() + 1,
                  "fx_fuser: fold has ", weights.size(), " weights, ", given.size(),
                  " sets of vectors, ", eps.size(), " eps and ", places.size(), " places");
  const int device = weights[0].get_device_index();
  const auto& kernels = registry<FoldKernels>().at(kernel, device);
  STD_TORCH_CHECK(kernels.out == out, "fx_fuser: kernel ", kernel, " folds to ",
                  toString(kernels.out), ", not to ", toString(out));
  const OnDevice on_device(device);
  const Stream stream = current_stream(device);
  const Tensor made = new_dense(weights[0], {places.back()}, out);
  const auto bytes = static_cast<int64_t>(made.element_size());
  char* const base = static_cast<char*>(made.data_ptr());
  auto vector = vectors.begin();
  FoldArgs args{};
  uint32_t blocks = 0;
  const auto launch_all = [&] {
    if (blocks > 0) launch(kernels.fold, blocks, kFoldThreads, stream, args);
    args.sites = 0;
    blocks = 0;
  };
  for (size_t i = 0; i < weights.size(); ++i) {
    const Tensor& weight = weights[i];
    STD_TORCH_CHECK(weight.dim() == 4 && weight.scalar_type() == kernels.in &&
                        weight.get_device_index() == device && weight.numel() < (int64_t{1} << 31),
                    "fx_fuser: fold cannot take a weight ", to_string(weight.sizes()), " of ",
                    toString(weight.scalar_type()));
    const int64_t folded = places[2 * i], shift = places[2 * i + 1];
    STD_TORCH_CHECK(folded >= 0 && folded + weight.numel() <= shift &&
                        shift + weight.size(0) <= places[2 * i + 2],
                    "fx_fuser: fold has no room for a weight ", to_string(weight.sizes()));
    FoldSite site{};
    const auto next = [&](bool is_there) -> FoldVector {
      if (!is_there) return {};
      STD_TORCH_CHECK(vector != vectors.end(), "fx_fuser: fold has too few vectors");
      return fold_vector_of(*vector++, weight);
    };
    site.bias = next((given[i] & kHasBias) != 0);
    site.mean = next(true);
    site.variance = next(true);
    site.gamma = next((given[i] & kHasGamma) != 0);
    site.beta = next((given[i] & kHasBeta) != 0);
    if (weight.numel() == 0) continue;
    site.folded = base + folded * bytes;
    site.shift = base + shift * bytes;
    describe(site, weight, eps[i]);
    site.first_block = blocks;
    blocks += static_cast<uint32_t>(ceil_div(site.all_units, kFoldThreads));
    args.site[args.sites++] = site;
    if (args.sites == kFoldSites) launch_all();
  }
  launch_all();
  return made;
}

}  // namespace
}  // namespace fx_fuser
