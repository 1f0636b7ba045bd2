// The gemm of unaligned 16-bit operands that loads by TMA (combs): checks, tensor maps, launch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>

#include "host/linear_dense.h"
#include "linear/linear_combs_args.h"

namespace fx_fuser {
namespace {

constexpr int64_t kHighestSize = std::numeric_limits<int32_t>::max() - (1 << 16);

struct LinearCombsKernels : GemmKernel, EpilogueTypes {
  Kernel kernel;
  CombShape shape;
  bool along_a;      // k, not rows, are adjacent in x
  bool along_b;      // the same for the weight
  int64_t clusters;  // how many the device runs at once

  explicit LinearCombsKernels(const EpilogueTypes& types) : EpilogueTypes(types) {}

  // Chosen by measurement for these sizes; there is no cost model for others.
  bool is_profitable(const Tensor& /*x*/, const Tensor& /*weight*/) const override { return true; }
  bool run(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
           const Tensor& y, const std::optional<Tensor>& c,
           const EpilogueArgs& args) const override;
};

int64_t load_linear_combs(const Sources& from) {
  const Signature types(from, 3);
  types.check_operands(0);
  const int shape = types.sizes[0];
  STD_TORCH_CHECK(shape >= 0 && shape < kCombShapeCount, "fx_fuser: the comb gemm has no shape ",
                  shape);
  auto kernels = std::make_unique<LinearCombsKernels>(types);
  kernels->shape = kCombShapes[shape];
  kernels->along_a = types.sizes[1] != 0;
  kernels->along_b = types.sizes[2] != 0;
  STD_TORCH_CHECK(kernels->shape.takes(kernels->along_a), "fx_fuser: shape ", shape,
                  " of the comb gemm does not support this operand order");
  kernels->kernel =
      get_kernel(load_library(from.cubins.at(0)), "fx_fuser_combs", kernels->shape.shared_bytes());
  kernels->clusters = resident_clusters(kernels->kernel, kernels->shape, kCombThreads,
                                        multiprocessors_of(from.device));
  return keep<GemmKernel, LinearCombsKernels>(from, std::move(kernels));
}
const AddLoader kLinearCombsLoader("linear_combs", load_linear_combs);

// Lines of `length` adjacent 16-bit elements.
struct Lines {
  uint8_t* data;
  int64_t count;
  int64_t length;
  int64_t stride;  // elements

  // The lines of a matrix [rows, columns]: its rows if `along`, else its columns. std::nullopt if
  // their elements are not adjacent, or if TMA does not support the lines.
  static std::optional<Lines> of(const Tensor& tensor, bool along) {
    const int64_t count = tensor.size(along ? 0 : 1);
    const int64_t length = tensor.size(along ? 1 : 0);
    const int64_t step = tensor.stride(along ? 1 : 0);
    const int64_t stride = count == 1 ? length : tensor.stride(along ? 0 : 1);
    constexpr int64_t kFurthest = int64_t{1}
                                  << 35;  // a comb's lines are less than 2^40 bytes apart
    if ((length > 1 && step != 1) || stride < length || stride >= kFurthest) return std::nullopt;
    return Lines{static_cast<uint8_t*>(tensor.data_ptr()), count, length, stride};
  }

  bool are_aligned() const { return is_aligned(data) && (count == 1 || stride % 8 == 0); }
};

TensorMap map_of_lines(ScalarType type, const void* data, uint64_t length, uint64_t lines,
                       int64_t stride, int box_lines) {
  // The stride of a single line is never used, but must be valid for TMA.
  const int64_t bytes = lines == 1 ? ceil_div(2 * length, 16) * 16 : 2 * stride;
  return tensor_map<2>(copied_as(type), data, {length, lines}, {static_cast<uint64_t>(bytes)},
                       {kCombSpan, static_cast<uint32_t>(box_lines)});
}

// Needs at least kCombs lines. A result's maps contain only the whole vectors of its lines: TMA
// writes all of a vector of which the tensor has one element.
Combs combs_of(ScalarType type, const Lines& lines, int box_lines, bool whole_vectors = false) {
  Combs combs{};
  for (int j = 0; j < kCombs; ++j) {
    uint8_t* first = lines.data + 2 * j * lines.stride;
    const auto ahead = static_cast<int64_t>(reinterpret_cast<uintptr_t>(first) % 16);
    combs.offset[j] = static_cast<int32_t>(ahead / 2);
    int64_t length = lines.length + combs.offset[j];
    // Without a whole vector nothing is written, but a map cannot be empty.
    if (whole_vectors) length = std::max<int64_t>(length / 8 * 8, 8);
    combs.map[j] = map_of_lines(type, first - ahead, static_cast<uint64_t>(length),
                                static_cast<uint64_t>(ceil_div(lines.count - j, kCombs)),
                                kCombs * lines.stride, box_lines);
  }
  return combs;
}

// One map of all lines, which are aligned.
Combs whole(ScalarType type, const Lines& lines, int box_lines) {
  Combs combs{};
  combs.map[0] = map_of_lines(type, lines.data, static_cast<uint64_t>(lines.length),
                              static_cast<uint64_t>(lines.count), lines.stride, box_lines);
  return combs;
}

// Tiles below each other that reuse a column of b while it is in L2. All of a's rows in the group
// should stay in L2 too; but the group has at least kLeast tiles, since those run at the same time.
int64_t group_of(int64_t units, int64_t unit_rows, int64_t k) {
  constexpr int64_t kNearBytes = 16 << 20;
  constexpr int64_t kLeast = 8;
  return std::min(units, std::max(kNearBytes / (unit_rows * k * 2), kLeast));
}

// Sets a product's operands: tensor maps, sizes. False if the kernel does not support the strides.
bool set_factors(const LinearCombsKernels& kernels, const Tensor& x, const Tensor& weight,
                 const Tensor& out, CombArgs& args) {
  const CombShape& shape = kernels.shape;
  const auto left = Lines::of(x, kernels.along_a);
  const auto right = Lines::of(weight, kernels.along_b);
  const auto rows = Lines::of(out, true);
  if (!left || !right || !rows || !right->are_aligned()) return false;
  args.k = static_cast<int32_t>(x.size(1));
  if (!kernels.along_a) {
    if (left->count < kCombs || !rows->are_aligned() || rows->length % 8 != 0) return false;
    args.m = static_cast<int32_t>(weight.size(0));
    args.n = static_cast<int32_t>(x.size(0));
    args.a = combs_of(kernels.x, *right, kCombStepK);
    args.b = combs_of(kernels.x, *left, kCombStepK / shape.cluster);
    args.out = whole(kernels.out, *rows, 8);
    std::iota(args.order, args.order + kCombs, 0);
    std::stable_sort(args.order, args.order + kCombs,
                     [&](int i, int j) { return args.b.offset[i] > args.b.offset[j]; });
    return true;
  }
  // The weight can begin `offset` earlier only by whole lines: along n if along_b, else along k. So
  // one of x and out must be aligned.
  const bool is_one_aligned = kernels.along_b ? left->are_aligned() : rows->are_aligned();
  if (left->count < kCombs || !is_one_aligned) return false;
  args.m = static_cast<int32_t>(x.size(0));
  args.n = static_cast<int32_t>(weight.size(0));
  args.a = combs_of(kernels.x, *left, shape.tile_m());
  args.b = whole(kernels.x, *right, (kernels.along_b ? shape.tile_n : kCombStepK) / shape.cluster);
  args.out = combs_of(kernels.out, *rows, kCombWarpRows, true);
  args.out_data = rows->data;
  args.out_pitch = rows->stride;
  return true;
}

// Divides the result into units. False if they are too many.
bool set_units(const CombShape& shape, bool along_a, CombArgs& args) {
  const int64_t unit_rows = shape.cluster * shape.tile_m();
  const int64_t rows = along_a ? ceil_div(args.m, kCombs) : args.m;  // of a comb, or all
  const int64_t units_of_comb = ceil_div(rows, unit_rows);
  const int64_t units = units_of_comb * (along_a ? kCombs : 1);
  // Tiles begin at the aligned vector in which a line of the result begins.
  const int64_t before = *std::max_element(args.out.offset, args.out.offset + kCombs);
  const int64_t all_units = units * ceil_div(args.n + before, shape.step_n(along_a));
  if (all_units > kHighestSize) return false;
  args.units_of_comb = static_cast<int32_t>(units_of_comb);
  args.units = static_cast<int32_t>(units);
  args.all_units = static_cast<int32_t>(all_units);
  args.group = static_cast<int32_t>(group_of(units, unit_rows, args.k));
  return true;
}

// out = epilogue(x weightᵀ), of matrices. Returns false, without a launch, if the kernel does not
// support these tensors.
bool run_linear_combs(const LinearCombsKernels& kernels, const Tensor& x, const Tensor& weight,
                      const std::optional<Tensor>& bias, const Tensor& out,
                      const std::optional<Tensor>& z, const EpilogueArgs& epilogue) {
  check_linear(kernels, kernels.x, {kernels.x, kernels.x}, x, weight, bias, out, z, epilogue);
  if (x.dim() != 2 || weight.dim() != 2 || bias || z || x.size(1) == 0) return false;
  if (out.numel() == 0) return true;
  const CombShape& shape = kernels.shape;
  if (std::max({x.size(0), weight.size(0), x.size(1)}) > kHighestSize) return false;

  const OnDevice on_device(out.get_device_index());
  CombArgs args{};
  if (!set_factors(kernels, x, weight, out, args)) return false;
  if (!set_units(shape, kernels.along_a, args)) return false;
  std::copy(epilogue.scalars.begin(), epilogue.scalars.end(), args.scalar);
  LaunchOptions options;
  options.shared_bytes = shape.shared_bytes();
  options.cluster = shape.cluster;
  const int64_t clusters = persistent_blocks(args.all_units, kernels.clusters);
  launch(kernels.kernel, clusters * shape.cluster, kCombThreads,
         current_stream(out.get_device_index()), args, options);
  return true;
}

bool LinearCombsKernels::run(const Tensor& x, const Tensor& weight,
                             const std::optional<Tensor>& bias, const Tensor& y,
                             const std::optional<Tensor>& c, const EpilogueArgs& args) const {
  return run_linear_combs(*this, x, weight, bias, y, c, args);
}

}  // namespace
}  // namespace fx_fuser
