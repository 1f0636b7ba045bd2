// The linear kernels for 16-bit types and TF32: choice of the tile shape, tensor maps, launch.
#pragma once

#include "host/linear_split.h"
#include "linear/linear_dense_args.h"

namespace fx_fuser {
namespace {

// How many clusters' tiles the result has: a cluster's tiles count as one.
int64_t dense_tiles(const DenseShape& shape, int64_t m, int64_t n) {
  return ceil_div(m, shape.tile_m) * ceil_div(n, shape.tile_n() * shape.cluster);
}

// Clusters of a kernel that are resident at once. Not the multiprocessors divided by the cluster's
// size: some GPCs have an odd number of multiprocessors.
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

// Kernels of one main loop, one for each of kDenseShapes in [first, end).
struct DenseChoice {
  int first;
  int end;
  std::array<Kernel, kDenseShapeCount> kernel{};
  std::array<int64_t, kDenseShapeCount> clusters{};  // how many the device runs at once

  static DenseChoice of(Library library, const std::string& name, int first, int end, int device) {
    DenseChoice made{first, end};
    const int multiprocessors = multiprocessors_of(device);
    for (int i = first; i < end; ++i) {
      const DenseShape& shape = kDenseShapes[i];
      made.kernel[i] = get_kernel(library, name + std::to_string(i), shape.shared_bytes());
      made.clusters[i] = resident_clusters(made.kernel[i], shape, kDenseThreads, multiprocessors);
    }
    return made;
  }

  // The shape that takes the fewest cycles, counting whole rounds of tiles.
  int best(int64_t m, int64_t n) const {
    int found = first;
    int64_t fewest = std::numeric_limits<int64_t>::max();
    for (int i = first; i < end; ++i) {
      const DenseShape& shape = kDenseShapes[i];
      const int64_t rounds = ceil_div(dense_tiles(shape, m, n), clusters[i]);
      if (rounds * shape.cycles < fewest) {
        fewest = rounds * shape.cycles;
        found = i;
      }
    }
    return found;
  }

  // args: complete except for the number of tiles. times: chunks of k, each computing all tiles.
  template <class Args>
  void launch_tiles(int chosen, Kernel loop, int64_t times, Args& args, Stream stream) const {
    const DenseShape& shape = kDenseShapes[chosen];
    const int64_t tiles = dense_tiles(shape, args.m, args.n);
    args.tiles = static_cast<int32_t>(tiles);
    LaunchOptions options;
    options.shared_bytes = shape.shared_bytes();
    options.cluster = shape.cluster;
    const int64_t blocks = persistent_blocks(tiles * times, clusters[chosen]) * shape.cluster;
    launch(loop, blocks, kDenseThreads, stream, args, options);
  }
};

struct LinearDenseKernels : GemmKernel, EpilogueTypes {
  DenseChoice shapes{};

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

int64_t load_dense(int shapes, const Sources& from) {
  const Signature types(from);
  auto kernels = std::make_unique<LinearDenseKernels>(types);
  kernels->shapes =
      DenseChoice::of(load_library(from.cubins.at(0)), "fx_fuser_linear_", 0, shapes, from.device);
  copied_as(kernels->x);
  return keep<GemmKernel, LinearDenseKernels>(from, std::move(kernels));
}

int64_t load_linear_dense(const Sources& from) { return load_dense(kDenseShapeCount, from); }
int64_t load_linear_exact(const Sources& from) { return load_dense(kExactShapeCount, from); }
const AddLoader kLinearDenseLoader("linear_dense", load_linear_dense);
const AddLoader kLinearExactLoader("linear_exact", load_linear_exact);

// True if the rows of this tensor can be loaded and stored in 16-byte vectors.
bool takes_vectors(const Tensor& tensor, int64_t rows, int64_t stride) {
  return tensor.dim() > 0 && has_aligned_rows(tensor, rows, stride);
}

// Sets the arguments of the result, [m, n]. False if the kernels do not support these sizes,
// strides or addresses.
bool set_dense_result(LinearDenseArgs& args, int64_t m, int64_t n, const Tensor& out,
                      const std::optional<Tensor>& z, const std::optional<Tensor>& bias,
                      const EpilogueArgs& epilogue) {
  constexpr int64_t kHighest = std::numeric_limits<int32_t>::max() - (1 << 16);
  const int64_t smallest_tiles = ceil_div(m, 16) * ceil_div(n, 128);
  if (m > kHighest || n > kHighest || smallest_tiles > kHighest) return false;
  const auto out_stride = row_stride(out, out);
  const auto z_stride = z ? row_stride(*z, out) : 0;
  if (!out_stride || !z_stride) return false;
  const auto dense_rows = [&](const Tensor& tensor) { return n == 1 || tensor.stride(-1) == 1; };
  if (!dense_rows(out) || (z && !dense_rows(*z)) || (bias && !dense_rows(*bias))) return false;

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
  return true;
}

// out = epilogue(z) with z = x weightᵀ + bias, which is stored too if given. Returns false, without
// a launch, if TMA or the kernels' indices do not support these shapes, strides or addresses.
bool run_linear_dense(const LinearDenseKernels& kernels, const Tensor& x, const Tensor& weight,
                      const std::optional<Tensor>& bias, const Tensor& out,
                      const std::optional<Tensor>& z, const EpilogueArgs& epilogue) {
  check_linear(kernels, kernels.x, {kernels.x, kernels.x}, x, weight, bias, out, z, epilogue);
  const int64_t n = weight.size(0);
  const int64_t k = weight.size(1);
  if (k == 0 || weight.dim() != 2) return false;
  if (out.numel() == 0) return true;
  const int64_t m = x.numel() / k;

  const auto x_stride = row_stride(x, out);
  if (!x_stride || k > std::numeric_limits<int32_t>::max() - (1 << 16)) return false;
  // TMA needs rows that do not overlap and are less than 2^40 bytes apart.
  const auto is_copied = [&](const Tensor& tensor, int64_t rows, int64_t stride) {
    const bool in_reach = rows == 1 || (stride >= k && stride < int64_t{1} << 37);
    return in_reach && has_aligned_rows(tensor, rows, stride);
  };
  if (!is_copied(x, m, *x_stride) || !is_copied(weight, n, weight.stride(0))) return false;
  LinearDenseArgs args{};
  if (!set_dense_result(args, m, n, out, z, bias, epilogue)) return false;

  const int device = out.get_device_index();
  const OnDevice on_device(device);
  const int chosen = kernels.shapes.best(m, n);
  const DenseShape& shape = kDenseShapes[chosen];
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
  args.k = static_cast<int32_t>(k);
  kernels.shapes.launch_tiles(chosen, kernels.shapes.kernel[chosen], 1, args,
                              current_stream(device));
  return true;
}

bool LinearDenseKernels::run(const Tensor& x, const Tensor& weight,
                             const std::optional<Tensor>& bias, const Tensor& y,
                             const std::optional<Tensor>& c, const EpilogueArgs& args) const {
  return run_linear_dense(*this, x, weight, bias, y, c, args);
}

}  // namespace
}  // namespace fx_fuser
