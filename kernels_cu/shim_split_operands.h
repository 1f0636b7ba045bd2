// The split product's operands: a weight that the copy engine takes as it lies or of which it gets
// a copy, and x split by the pre-pass.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <array>
#include <cstdint>

#include "copy_rows.cuh"
#include "linear_split_args.h"
#include "shim_pointwise.h"
#include "shim_split_plan.h"

namespace fx_fuser {
namespace {

// cuTensorMapEncodeTiled of the driver, which nothing here is linked with.
auto tensor_map_encoder() {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                           cudaEnableDefault, &result),
          "cudaGetDriverEntryPointByVersion");
    STD_TORCH_CHECK(result == cudaDriverEntryPointSuccess && found != nullptr,
                    "fx_fuser: the driver has no cuTensorMapEncodeTiled; it must be of CUDA 12");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  return encode;
}

// Sizes and box innermost first; strides in bytes, of all dimensions but the innermost.
template <int kRank>
CUtensorMap tensor_map(CUtensorMapDataType type, const void* data,
                       const std::array<cuuint64_t, kRank>& sizes,
                       const std::array<cuuint64_t, kRank - 1>& strides,
                       const std::array<cuuint32_t, kRank>& box) {
  std::array<cuuint32_t, kRank> steps;
  steps.fill(1);
  CUtensorMap map;
  const CUresult status = tensor_map_encoder()(
      &map, type, kRank, const_cast<void*>(data), sizes.data(), strides.data(), box.data(),
      steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  STD_TORCH_CHECK(status == CUDA_SUCCESS, "fx_fuser: cuTensorMapEncodeTiled failed with ",
                  static_cast<int>(status), " for sizes ", to_string(sizes), " and strides ",
                  to_string(strides));
  return map;
}

int64_t stride_along(const Tensor& tensor, int64_t d) {
  return tensor.size(d) == 1 ? 1 : tensor.stride(d);
}

bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; }

// ---- the weight ---------------------------------------------------------------------------------

// Are a weight's n adjacent in memory, and not its k?
bool is_transposed(const Tensor& weight) {
  return stride_along(weight, -1) != 1 && weight.size(-2) > 1 && weight.stride(-2) == 1;
}

// Does the copy engine take this weight, [*, N, K], as it lies?
bool is_copied_as_it_lies(const Tensor& weight) {
  constexpr int64_t kReach = int64_t{1} << 38;  // elements
  const int64_t across = is_transposed(weight) ? -1 : -2;
  const int64_t stride = weight.stride(across);
  const auto in_reach = [](int64_t step) { return step % 4 == 0 && step < kReach; };
  bool taken = is_aligned(weight.data_ptr()) && (across == -1 || stride_along(weight, -1) == 1) &&
               (weight.size(across) == 1 || (stride > 0 && in_reach(stride)));
  for (int64_t d = 0; taken && d + 2 < weight.dim(); ++d) {
    taken = weight.size(d) == 1 || in_reach(weight.stride(d));
  }
  return taken;
}

// Reading and writing, and a launch.
double seconds_to_copy(const Tensor& weight) {
  constexpr double kLaunch = 2e-6;
  if (is_copied_as_it_lies(weight)) return 0;
  return kLaunch + 8 * static_cast<double>(weight.numel()) / kWorkBandwidth;
}

// Of planes [n, k]; a batch's stride is 0 where all share the weight.
struct SplitWeight {
  const float* data;
  int64_t n;
  int64_t k;
  int64_t stride_n;
  int64_t stride_k;
  int64_t outer;
  int64_t inner;
  int64_t outer_size;  // 1 where shared
  int64_t inner_size;
  bool transposed;

  static SplitWeight of(const Tensor& weight, const MergedRows& rows) {
    const MergedRows::Strides& stride = rows.of[0];
    return {static_cast<const float*>(weight.data_ptr()),
            weight.size(-2),
            weight.size(-1),
            weight.stride(-2),
            stride_along(weight, -1),
            stride.outer,
            stride.inner,
            stride.outer == 0 ? 1 : rows.outer,
            stride.inner == 0 ? 1 : rows.inner,
            is_transposed(weight)};
  }

  // As they lie in memory.
  int64_t rows() const { return transposed ? k : n; }
  int64_t columns() const { return transposed ? n : k; }
  int64_t row_stride() const { return transposed ? stride_k : stride_n; }

  // The same values in rows that the copy engine takes; the tensor holds them.
  Tensor move_to_aligned_rows(cudaKernel_t copy, const Tensor& like, cudaStream_t stream) {
    const int64_t pitch = ceil_div(columns(), 4) * 4;
    const int64_t count = outer_size * inner_size * rows() * pitch;
    const Tensor made = new_dense(like, {count}, ScalarType::Float);
    const auto divisor = [](int64_t size) { return make_divisor(static_cast<uint64_t>(size)); };
    const CopyRowsArgs args{data,
                            static_cast<float*>(made.data_ptr()),
                            outer,
                            inner,
                            row_stride(),
                            transposed ? stride_n : stride_k,
                            divisor(pitch),
                            divisor(rows()),
                            divisor(inner_size),
                            static_cast<uint64_t>(columns()),
                            static_cast<uint64_t>(count)};
    launch(copy, ceil_div(count, kCopyThreads * kCopyInFlight), kCopyThreads, stream, args);
    data = args.to;
    stride_n = transposed ? 1 : pitch;
    stride_k = transposed ? pitch : 1;
    inner = inner_size > 1 ? rows() * pitch : 0;
    outer = outer_size > 1 ? inner_size * rows() * pitch : 0;
    return made;
  }

  CUtensorMap map() const {
    const auto unsigned64 = [](int64_t value) { return static_cast<cuuint64_t>(value); };
    // A stride along one element is never used, but must be one that the copy engine takes.
    const int64_t of_rows = rows() == 1 ? ceil_div(columns(), 4) * 4 : row_stride();
    const int64_t of_inner = inner_size == 1 ? of_rows : inner;
    const int64_t of_outer = outer_size == 1 ? of_rows : outer;
    return tensor_map<4>(
        CU_TENSOR_MAP_DATA_TYPE_FLOAT32, data,
        {unsigned64(columns()), unsigned64(rows()), unsigned64(inner_size), unsigned64(outer_size)},
        {unsigned64(of_rows * 4), unsigned64(of_inner * 4), unsigned64(of_outer * 4)},
        {kLinearBox, static_cast<cuuint32_t>(transposed ? kLinearTileK : kLinearTileN), 1, 1});
  }
};

// ---- x ------------------------------------------------------------------------------------------

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

// x is tensors[1] of the merged rows. `planes` are those of the product.
SplitArgs split_args(const Tensor& x, const MergedRows& rows, const Planes& planes,
                     int64_t padded_k, bool natural, void* split, float* unscale) {
  const MergedRows::Strides& stride = rows.of[1];
  const int64_t stride_k = stride_along(x, -1);
  SplitArgs args{};
  args.x = static_cast<const float*>(x.data_ptr());
  args.x_plane = {planes.k * stride_k, stride.outer, stride.inner};
  args.x_stride_m = stride.row;
  args.x_stride_k = stride_k;
  args.split = split;
  args.unscale = unscale;
  args.planes = planes;
  args.rows = static_cast<int32_t>(rows.rows);
  args.padded_k = static_cast<int32_t>(padded_k);
  args.natural = natural;
  args.vectors = stride_k == 1 && is_aligned(args.x) && stride.row % 4 == 0 &&
                 stride.inner % 4 == 0 && stride.outer % 4 == 0;
  return args;
}

CUtensorMap split_map(const void* split, int64_t padded_k, int64_t rows, int64_t planes) {
  const auto unsigned64 = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  const int64_t part = rows * padded_k * 2;  // bytes of hi, or of lo
  return tensor_map<4>(CU_TENSOR_MAP_DATA_TYPE_FLOAT16, split,
                       {unsigned64(padded_k), unsigned64(rows), 2, unsigned64(planes)},
                       {unsigned64(padded_k * 2), unsigned64(part), unsigned64(2 * part)},
                       {kLinearTileK, kLinearTileM, 2, 1});
}

void launch_split(cudaKernel_t split_rows, cudaKernel_t split_columns, SplitArgs args,
                  int64_t planes, int64_t multiprocessors, cudaStream_t stream) {
  const bool columns = args.x_stride_k != 1 && args.x_stride_m == 1 && args.rows > 1;
  const int64_t units = columns ? ceil_div(args.rows, kSplitStrip) : args.rows;
  args.units = make_divisor(static_cast<uint32_t>(units));
  LaunchOptions in_cluster;
  in_cluster.cluster =
      columns ? strip_cluster(units * planes, args.padded_k / kSplitDepth, multiprocessors)
              : split_cluster(args.planes.k);
  launch(columns ? split_columns : split_rows, units * planes * in_cluster.cluster,
         columns ? kSplitThreads : split_threads(args.planes.k), stream, args, in_cluster);
}

}  // namespace
}  // namespace fx_fuser
