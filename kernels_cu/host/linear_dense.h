// The linear kernels for 16-bit types and TF32: choice of the tile shape, tensor maps, launch.
#pragma once

#include "host/linear_split.h"
#include "linear/linear_dense_args.h"

namespace fx_fuser {
namespace {

struct LinearDenseKernels : GemmKernel, EpilogueTypes {
  int shapes;  // the first of kDenseShapes
  std::array<Kernel, kDenseShapeCount> kernel{};
  std::array<int64_t, kDenseShapeCount> clusters{};  // how many the device runs at once

  explicit LinearDenseKernels(const EpilogueTypes& types) : EpilogueTypes(types) {}

  // It has tile shapes for all sizes.
  bool is_profitable(const Tensor& /*x*/, const Tensor& /*weight*/) const override { return true; }
  bool run(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
           const Tensor& y, const std::optional<Tensor>& c,
           const EpilogueArgs& args) const override;
};

// Float is copied as TFLOAT32, so that TMA rounds: the tensor core would truncate, with three times
// the error.
int copied_as(ScalarType type) {
  switch (type) {
    case ScalarType::BFloat16:
      return kMapBFloat16;
    case ScalarType::Half:
      return kMapFloat16;
    case ScalarType::Float:
      return kMapTFloat32;
    default:
      STD_TORCH_CHECK(false, "fx_fuser: FX_FUSER_LINEAR_DENSE does not support ", toString(type));
  }
}

// Clusters of a kernel that are resident at once: some parts of a GPU may have an odd number of
// multiprocessors.
template <class Shape>
int64_t resident_clusters(Kernel kernel, const Shape& shape, int threads, int multiprocessors) {
  if (shape.cluster == 1) return multiprocessors;
  LaunchAttribute cluster = cluster_of(shape.cluster);
  const LaunchConfig config{{static_cast<unsigned>(shape.cluster * multiprocessors), 1, 1},
                            {static_cast<unsigned>(threads), 1, 1},
                            static_cast<unsigned>(shape.shared_bytes()),
                            nullptr,
                            &cluster,
                            1};
  int clusters = 0;
  check(driver().OccupancyMaxActiveClusters(&clusters, kernel, &config),
        "cuOccupancyMaxActiveClusters");
  return std::max(clusters, 1);
}

int64_t load_dense(int shapes, const Sources& from) {
  const Signature types(from);
  Library library = load_library(from.cubins.at(0));
  const int multiprocessors = multiprocessors_of(from.device);
  auto kernels = std::make_unique<LinearDenseKernels>(types);
  kernels->shapes = shapes;
  for (int i = 0; i < shapes; ++i) {
    kernels->kernel[i] =
        get_kernel(library, "fx_fuser_linear_" + std::to_string(i), kDenseShapes[i].shared_bytes());
    kernels->clusters[i] =
        resident_clusters(kernels->kernel[i], kDenseShapes[i], kDenseThreads, multiprocessors);
  }
  copied_as(kernels->x);
  return keep<GemmKernel, LinearDenseKernels>(from, std::move(kernels));
}

int64_t load_linear_dense(const Sources& from) { return load_dense(kDenseShapeCount, from); }
int64_t load_linear_exact(const Sources& from) { return load_dense(kExactShapeCount, from); }
const AddLoader kLinearDenseLoader("linear_dense", load_linear_dense);
const AddLoader kLinearExactLoader("linear_exact", load_linear_exact);

// Tiles of a cluster, taken as one.
int64_t dense_tiles(const DenseShape& shape, int64_t m, int64_t n) {
  return ceil_div(m, shape.tile_m) * ceil_div(n, shape.tile_n() * shape.cluster);
}

// The shape that is done in the fewest cycles, rounds of tiles counted whole.
int best_dense_shape(const LinearDenseKernels& kernels, int64_t m, int64_t n) {
  int best = 0;
  int64_t fewest = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < kernels.shapes; ++i) {
    const DenseShape& shape = kDenseShapes[i];
    const int64_t rounds = ceil_div(dense_tiles(shape, m, n), kernels.clusters[i]);
    if (rounds * shape.cycles < fewest) {
      fewest = rounds * shape.cycles;
      best = i;
    }
  }
  return best;
}

// May vectors of 16 bytes be stored to, or loaded from, the rows of this tensor?
bool takes_vectors(const Tensor& tensor, int64_t rows, int64_t stride) {
  return tensor.dim() > 0 && has_aligned_rows(tensor, rows, stride);
}

// out = epilogue(z) with z = x weightᵀ + bias, which is stored too if asked for.
// False, and nothing is launched, where TMA or the kernels' indices do not take these
// shapes, strides or addresses.
bool run_linear_dense(const LinearDenseKernels& kernels, const Tensor& x, const Tensor& weight,
                      const std::optional<Tensor>& bias, const Tensor& out,
                      const std::optional<Tensor>& z, const EpilogueArgs& epilogue) {
  check_linear(kernels, kernels.x, {kernels.x, kernels.x}, x, weight, bias, out, z, epilogue);
  const int64_t n = weight.size(0);
  const int64_t k = weight.size(1);
  if (k == 0 || weight.dim() != 2) return false;
  if (out.numel() == 0) return true;
  const int64_t m = x.numel() / k;

  constexpr int64_t kHighest = std::numeric_limits<int32_t>::max() - (1 << 16);
  const int64_t smallest_tiles = ceil_div(m, 16) * ceil_div(n, 128);
  if (m > kHighest || n > kHighest || k > kHighest || smallest_tiles > kHighest) return false;
  const auto x_stride = row_stride(x, out);
  const auto out_stride = row_stride(out, out);
  const auto z_stride = z ? row_stride(*z, out) : 0;
  if (!x_stride || !out_stride || !z_stride) return false;
  // TMA wants rows that follow each other, by less than 2^40 bytes.
  const auto is_copied = [&](const Tensor& tensor, int64_t rows, int64_t stride) {
    const bool in_reach = rows == 1 || (stride >= k && stride < int64_t{1} << 37);
    return in_reach && has_aligned_rows(tensor, rows, stride);
  };
  if (!is_copied(x, m, *x_stride) || !is_copied(weight, n, weight.stride(0))) return false;
  const auto dense_rows = [&](const Tensor& tensor) { return n == 1 || tensor.stride(-1) == 1; };
  if (!dense_rows(out) || (z && !dense_rows(*z)) || (bias && !dense_rows(*bias))) return false;

  LinearDenseArgs args{};
  for (size_t i = 0; i < epilogue.tensors.size(); ++i) {
    const Tensor& operand = epilogue.tensors[i];
    const auto stride = row_stride(operand, out);
    if (!stride) return false;
    const bool along_n = operand.dim() > 0 && operand.size(-1) != 1 && operand.stride(-1) != 0;
    args.operand[i] = {operand.data_ptr(), {*stride, along_n ? operand.stride(-1) : 0}};
    args.mode[i] = !along_n                             ? Mode::kSplat
                   : takes_vectors(operand, m, *stride) ? Mode::kVector
                                                        : Mode::kStrided;
  }

  const int device = out.get_device_index();
  const OnDevice on_device(device);
  const int chosen = best_dense_shape(kernels, m, n);
  const DenseShape& shape = kDenseShapes[chosen];
  const int64_t tiles = dense_tiles(shape, m, n);
  const int64_t element = static_cast<int64_t>(x.element_size());
  const auto map_of = [&](const Tensor& tensor, int64_t rows, int64_t stride, int box_rows) {
    // The stride of a single row is never used, but must be valid for TMA.
    const int64_t bytes = rows == 1 ? ceil_div(k * element, 16) * 16 : stride * element;
    return tensor_map<2>(
        copied_as(kernels.x), tensor.data_ptr(),
        {static_cast<uint64_t>(k), static_cast<uint64_t>(rows)}, {static_cast<uint64_t>(bytes)},
        {static_cast<uint32_t>(kDenseStepBytes / element), static_cast<uint32_t>(box_rows)});
  };
  args.weight_map = map_of(weight, n, weight.stride(0), shape.tile_n());
  args.x_map = map_of(x, m, *x_stride, shape.tile_m / shape.cluster);
  args.bias = bias ? bias->data_ptr() : nullptr;
  args.out = out.data_ptr();
  args.z = z ? z->data_ptr() : nullptr;
  args.out_stride = *out_stride;
  args.z_stride = *z_stride;
  args.out_is_aligned = takes_vectors(out, m, *out_stride);
  args.z_is_aligned = z && takes_vectors(*z, m, *z_stride);
  std::copy(epilogue.scalars.begin(), epilogue.scalars.end(), args.scalar);
  args.m = static_cast<int32_t>(m);
  args.n = static_cast<int32_t>(n);
  args.k = static_cast<int32_t>(k);
  args.tiles = static_cast<int32_t>(tiles);
  LaunchOptions options;
  options.shared_bytes = shape.shared_bytes();
  options.cluster = shape.cluster;
  const int64_t clusters = persistent_blocks(tiles, kernels.clusters[chosen]);
  launch(kernels.kernel[chosen], clusters * shape.cluster, kDenseThreads, current_stream(device),
         args, options);
  return true;
}

bool LinearDenseKernels::run(const Tensor& x, const Tensor& weight,
                             const std::optional<Tensor>& bias, const Tensor& y,
                             const std::optional<Tensor>& c, const EpilogueArgs& args) const {
  return run_linear_dense(*this, x, weight, bias, y, c, args);
}

}  // namespace
}  // namespace fx_fuser
