// The split product's operands: one that the pre-pass splits into fp16 halves, and one that TMA
// reads in place or, if its strides do not allow it, from an aligned copy.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "common/copy_rows_args.h"
#include "host/pointwise.h"
#include "host/split_plan.h"
#include "linear/linear_split_args.h"

namespace fx_fuser {
namespace {

// Sizes and box are innermost first; strides, in bytes, exclude the innermost dimension.
template <int kRank>
TensorMap tensor_map(int type, const void* data, const std::array<uint64_t, kRank>& sizes,
                     const std::array<uint64_t, kRank - 1>& strides,
                     const std::array<uint32_t, kRank>& box) {
  std::array<uint32_t, kRank> steps;
  steps.fill(1);
  TensorMap map;
  const int status = driver().TensorMapEncodeTiled(
      &map, type, kRank, const_cast<void*>(data), sizes.data(), strides.data(), box.data(),
      steps.data(), kMapNotInterleaved, kMapSwizzle128, kMapPromotion256, kMapZerosOutside);
  STD_TORCH_CHECK(status == 0, "fx_fuser: cuTensorMapEncodeTiled: ", text_of(status),
                  ", for sizes ", to_string(sizes), " and strides ", to_string(strides));
  return map;
}

int64_t stride_along(const Tensor& tensor, int64_t d) {
  return tensor.size(d) == 1 ? 1 : tensor.stride(d);
}

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// ---- any operand --------------------------------------------------------------------------------

// An operand as planes [rows, k], one per batch (outer, inner); a batch's stride is 0 if all share
// the operand.
struct SplitOperand {
  const void* data;
  int64_t rows;
  int64_t k;
  int64_t stride_row;
  int64_t stride_k;
  int64_t outer;
  int64_t inner;
  int64_t outer_size;  // 1 where shared
  int64_t inner_size;

  // From the tensors that `merged` was computed for.
  static SplitOperand of_weight(const Tensor& weight, const MergedRows& merged) {
    return of(weight, merged, merged.of[0], weight.size(-2), weight.stride(-2));
  }
  static SplitOperand of_x(const Tensor& x, const MergedRows& merged) {
    return of(x, merged, merged.of[1], merged.rows, merged.of[1].row);
  }

  // True if rows, not k, are adjacent in memory.
  bool transposed() const { return stride_k != 1 && rows > 1 && stride_row == 1; }

  // Lines and columns in memory order.
  int64_t lines() const { return transposed() ? k : rows; }
  int64_t columns() const { return transposed() ? rows : k; }
  int64_t line_stride() const { return transposed() ? stride_k : stride_row; }

  bool is_taken_as_it_lies() const {
    constexpr int64_t kReach = int64_t{1} << 38;  // elements
    const auto in_reach = [](int64_t step) { return step % 4 == 0 && step < kReach; };
    return is_aligned(data) && (transposed() || stride_k == 1) &&
           (lines() == 1 || (line_stride() > 0 && in_reach(line_stride()))) &&
           (outer_size == 1 || in_reach(outer)) && (inner_size == 1 || in_reach(inner));
  }

  // Time to read and write the operand, plus a launch.
  double seconds_to_copy(const SplitRates& rates) const {
    constexpr double kLaunch = 2e-6;
    if (is_taken_as_it_lies()) return 0;
    const double planes = static_cast<double>(outer_size) * static_cast<double>(inner_size);
    return kLaunch +
           8 * planes * static_cast<double>(rows) * static_cast<double>(k) / rates.work_bandwidth;
  }

  // Copies the values into lines that TMA accepts and points this operand at them; the returned
  // tensor owns the memory.
  Tensor move_to_aligned_lines(Kernel copy, const Tensor& like, Stream stream) {
    const bool across = transposed();
    const int64_t pitch = ceil_div(columns(), 4) * 4;
    const int64_t plane = lines() * pitch;
    const int64_t count = outer_size * inner_size * plane;
    const Tensor made = new_dense(like, {count}, ScalarType::Float);
    const auto divisor = [](int64_t size) { return make_divisor(static_cast<uint64_t>(size)); };
    const CopyRowsArgs args{static_cast<const float*>(data),
                            static_cast<float*>(made.data_ptr()),
                            outer,
                            inner,
                            line_stride(),
                            across ? stride_row : stride_k,
                            divisor(pitch),
                            divisor(lines()),
                            divisor(inner_size),
                            static_cast<uint64_t>(columns()),
                            static_cast<uint64_t>(count)};
    launch(copy, ceil_div(count, kCopyThreads * kCopyInFlight), kCopyThreads, stream, args);
    data = args.to;
    stride_row = across ? 1 : pitch;
    stride_k = across ? pitch : 1;
    inner = inner_size > 1 ? plane : 0;
    outer = outer_size > 1 ? inner_size * plane : 0;
    return made;
  }

  TensorMap map() const {
    const auto unsigned64 = [](int64_t value) { return static_cast<uint64_t>(value); };
    // The stride of a dimension of size 1 is never used, but must be valid for TMA.
    const int64_t of_lines = lines() == 1 ? ceil_div(columns(), 4) * 4 : line_stride();
    const int64_t of_inner = inner_size == 1 ? of_lines : inner;
    const int64_t of_outer = outer_size == 1 ? of_lines : outer;
    return tensor_map<4>(
        kMapFloat32, data,
        {unsigned64(columns()), unsigned64(lines()), unsigned64(inner_size),
         unsigned64(outer_size)},
        {unsigned64(of_lines * 4), unsigned64(of_inner * 4), unsigned64(of_outer * 4)},
        {kLinearBox, static_cast<uint32_t>(transposed() ? kLinearTileK : kLinearTileN), 1, 1});
  }

 private:
  static SplitOperand of(const Tensor& tensor, const MergedRows& merged,
                         const MergedRows::Strides& stride, int64_t rows, int64_t stride_row) {
    return {tensor.data_ptr(),
            rows,
            tensor.size(-1),
            stride_row,
            stride_along(tensor, -1),
            stride.outer,
            stride.inner,
            stride.outer == 0 ? 1 : merged.outer,
            stride.inner == 0 ? 1 : merged.inner};
  }
};

// ---- the one that is split first ----------------------------------------------------------------

// Blocks that share a strip of columns: as many as fill the GPU, with some tiles of k each.
int strip_cluster(int64_t strips, int64_t k_tiles, int64_t multiprocessors) {
  constexpr int64_t kBlocks = 4;  // a multiprocessor
  constexpr int64_t kLeastTiles = 2;
  int blocks = 1;
  while (blocks < kSplitMaxCluster && strips * blocks < kBlocks * multiprocessors &&
         k_tiles >= 2 * blocks * kLeastTiles) {
    blocks *= 2;
  }
  return blocks;
}

// `planes` are those of the product. The caller sets where the results go.
SplitArgs split_args(const SplitOperand& x, const Planes& planes, int64_t padded_k, bool natural,
                     ScalarType type) {
  SplitArgs args{};
  args.x = x.data;
  args.x_plane = {planes.k * x.stride_k, x.outer, x.inner};
  args.x_stride_m = x.stride_row;
  args.x_stride_k = x.stride_k;
  args.planes = planes;
  args.rows = static_cast<int32_t>(x.rows);
  args.padded_k = static_cast<int32_t>(padded_k);
  args.natural = natural;
  const int64_t unit = type == ScalarType::Float ? 4 : 8;  // elements of 16 bytes
  const auto aligned = [&](int64_t step) { return step % unit == 0; };
  args.vectors = x.stride_k == 1 && is_aligned(x.data) && aligned(x.stride_row) &&
                 aligned(x.inner) && aligned(x.outer);
  return args;
}

// parts: fp16 per value: 1 (hi) or 2 (hi and lo).
TensorMap split_map(const void* split, int64_t padded_k, int64_t rows, int64_t planes,
                    int64_t parts) {
  const auto unsigned64 = [](int64_t value) { return static_cast<uint64_t>(value); };
  const int64_t part = rows * padded_k * 2;  // bytes of hi, or of lo
  const int64_t plane = parts * part;
  return tensor_map<4>(
      kMapFloat16, split,
      {unsigned64(padded_k), unsigned64(rows), unsigned64(parts), unsigned64(planes)},
      {unsigned64(padded_k * 2), unsigned64(part), unsigned64(plane)},
      {kLinearTileK, kLinearTileM, static_cast<uint32_t>(parts), 1});
}

void launch_split(Kernel split_rows, Kernel split_columns, SplitArgs args, int64_t planes,
                  int64_t multiprocessors, bool clusters, Stream stream) {
  const bool columns = args.x_stride_k != 1 && args.x_stride_m == 1 && args.rows > 1;
  const int64_t units = columns ? ceil_div(args.rows, kSplitStrip) : args.rows;
  args.units = make_divisor(static_cast<uint32_t>(units));
  args.lanes = columns ? 0 : split_lanes(args.planes.k);
  if (args.lanes > 0) {
    launch(split_rows, ceil_div(units * planes * args.lanes, kSplitThreads), kSplitThreads, stream,
           args, {});
    return;
  }
  LaunchOptions in_cluster;
  if (clusters) {
    in_cluster.cluster =
        columns ? strip_cluster(units * planes, args.padded_k / kSplitDepth, multiprocessors)
                : split_cluster(args.planes.k);
  }
  launch(columns ? split_columns : split_rows, units * planes * in_cluster.cluster,
         columns ? kSplitThreads : split_threads(args.planes.k), stream, args, in_cluster);
}

}  // namespace
}  // namespace fx_fuser
