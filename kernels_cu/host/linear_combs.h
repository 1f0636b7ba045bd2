// The gemm of unaligned 16-bit operands by TMA: which of them, tensor maps, launch.
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
  bool along_a;      // are k of x adjacent, not its rows?
  bool along_b;      // and those of the weight?
  int64_t clusters;  // that the device runs at once

  explicit LinearCombsKernels(const EpilogueTypes& types) : EpilogueTypes(types) {}

  // For these sizes it was chosen by a clock; there is no model of others.
  bool is_profitable(const Tensor& /*x*/, const Tensor& /*weight*/) const override { return true; }
  bool run(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
           const Tensor& y, const std::optional<Tensor>& c,
           const EpilogueArgs& args) const override;
};

int64_t load_linear_combs(const Sources& from) {
  const Signature types(from, 3);
  types.check_operands(0);
  const int shape = types.sizes[0];
  STD_TORCH_CHECK(shape >= 0 && shape < kCombShapeCount, "fx_fuser: there is no shape ", shape,
                  " of the gemm by combs");
  auto kernels = std::make_unique<LinearCombsKernels>(types);
  kernels->shape = kCombShapes[shape];
  kernels->along_a = types.sizes[1] != 0;
  kernels->along_b = types.sizes[2] != 0;
  STD_TORCH_CHECK(kernels->shape.takes(kernels->along_a), "fx_fuser: shape ", shape,
                  " of the gemm by combs is not for this order of k");
  kernels->kernel =
      get_kernel(load_library(from.cubins.at(0)), "fx_fuser_combs", kernels->shape.shared_bytes());
  kernels->clusters = resident_clusters(kernels->kernel, kernels->shape, kCombThreads,
                                        multiprocessors_of(from.device));
  return keep<GemmKernel, LinearCombsKernels>(from, std::move(kernels));
}
const AddLoader kLinearCombsLoader("linear_combs", load_linear_combs);

// Lines of `length` adjacent elements of 16 bits.
struct Lines {
  uint8_t* data;
  int64_t count;
  int64_t length;
  int64_t stride;  // elements

  // Of [rows, columns], columns adjacent if `along`, else rows. Nothing where they are not, or
  // where TMA does not take the lines.
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
  // The stride of a single line is never used, but must be one that TMA takes.
  const int64_t bytes = lines == 1 ? ceil_div(2 * length, 16) * 16 : 2 * stride;
  return tensor_map<2>(copied_as(type), data, {length, lines}, {static_cast<uint64_t>(bytes)},
                       {kCombSpan, static_cast<uint32_t>(box_lines)});
}

// There are at least kCombs lines. A result's maps are of its lines' whole vectors alone: TMA
// writes to all of a vector of which the tensor has one element.
Combs combs_of(ScalarType type, const Lines& lines, int box_lines, bool whole_vectors = false) {
  Combs combs{};
  for (int j = 0; j < kCombs; ++j) {
    uint8_t* first = lines.data + 2 * j * lines.stride;
    const auto ahead = static_cast<int64_t>(reinterpret_cast<uintptr_t>(first) % 16);
    combs.offset[j] = static_cast<int32_t>(ahead / 2);
    int64_t length = lines.length + combs.offset[j];
    // Where there is no whole vector, none is written, but a map must be of something.
    if (whole_vectors) length = std::max<int64_t>(length / 8 * 8, 8);
    combs.map[j] = map_of_lines(type, first - ahead, static_cast<uint64_t>(length),
                                static_cast<uint64_t>(ceil_div(lines.count - j, kCombs)),
                                kCombs * lines.stride, box_lines);
  }
  return combs;
}

// All lines, aligned.
Combs whole(ScalarType type, const Lines& lines, int box_lines) {
  Combs combs{};
  combs.map[0] = map_of_lines(type, lines.data, static_cast<uint64_t>(lines.length),
                              static_cast<uint64_t>(lines.count), lines.stride, box_lines);
  return combs;
}

// Tiles below each other that share a column of b while it is near. All of a's that are taken in
// turn should stay in the L2 cache, but a few are taken anyway: they are multiplied at once.
int64_t group_of(int64_t units, int64_t unit_rows, int64_t k) {
  constexpr int64_t kNearBytes = 16 << 20;
  constexpr int64_t kLeast = 8;
  return std::min(units, std::max(kNearBytes / (unit_rows * k * 2), kLeast));
}

// Of a product: factors, tensor maps, sizes. False where the kernel does not take the strides.
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
  // What begins `offset` earlier is another line of the weight's, if not an element of one.
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

// How the result is divided. False where that is too much.
bool set_units(const CombShape& shape, bool along_a, CombArgs& args) {
  const int64_t unit_rows = shape.cluster * shape.tile_m();
  const int64_t rows = along_a ? ceil_div(args.m, kCombs) : args.m;  // of a comb, or all
  const int64_t units_of_comb = ceil_div(rows, unit_rows);
  const int64_t units = units_of_comb * (along_a ? kCombs : 1);
  // Columns begin with the aligned vector that a line of the result begins in.
  const int64_t before = *std::max_element(args.out.offset, args.out.offset + kCombs);
  const int64_t all_units = units * ceil_div(args.n + before, shape.step_n(along_a));
  if (all_units > kHighestSize) return false;
  args.units_of_comb = static_cast<int32_t>(units_of_comb);
  args.units = static_cast<int32_t>(units);
  args.all_units = static_cast<int32_t>(all_units);
  args.group = static_cast<int32_t>(group_of(units, unit_rows, args.k));
  return true;
}

// out = epilogue(x weightᵀ), of matrices. False, and nothing is launched, where the kernel does not
// take these tensors.
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
