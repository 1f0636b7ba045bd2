// Per-channel mean and variance: choice of layout, splits and launches.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <utility>

#include "host/kernel.h"
#include "pointwise/batch_stats_args.h"

namespace fx_fuser {
namespace {

struct StatsKernels {
  Kernel planes;
  Kernel rows;
  Kernel rows_narrow;
  Kernel combine;
};

struct StatsLibrary {
  StatsKernels float32;
  StatsKernels float64;
  StatsKernels float16;
  StatsKernels bfloat16;

  const StatsKernels& of(ScalarType type) const {
    switch (type) {
      case ScalarType::Float:
        return float32;
      case ScalarType::Double:
        return float64;
      case ScalarType::Half:
        return float16;
      case ScalarType::BFloat16:
        return bfloat16;
      default:
        STD_TORCH_CHECK(false, "fx_fuser: batch_stats has no kernel for ", toString(type));
    }
  }
};

constexpr const char* kBatchStats = "batch_stats";  // the registry's only name for them

int64_t load_batch_stats(const Sources& from) {
  Library library = load_library(from.cubins.at(0));
  const auto kernels = [&](const std::string& suffix) -> StatsKernels {
    const auto kernel = [&](const char* name) {
      return get_kernel(library, std::string("fx_fuser_batch_stats_") + name + "_" + suffix);
    };
    return {kernel("planes"), kernel("rows"), kernel("rows_narrow"), kernel("combine")};
  };
  return keep<StatsLibrary>(
      from, std::make_unique<StatsLibrary>(StatsLibrary{kernels("float32"), kernels("float64"),
                                                        kernels("float16"), kernels("bfloat16")}));
}
const AddLoader kBatchStatsLoader("batch_stats", load_batch_stats);

// As many rounds as still give kStatsMinBlocks blocks. Depends on the shape only, so that results
// do not depend on the number of SMs.
int64_t units_per_block(int64_t units, int64_t round, int64_t blocks_beside) {
  int64_t rounds = kStatsRounds;
  while (rounds > 1 && ceil_div(units, rounds * round) * blocks_beside < kStatsMinBlocks) {
    rounds /= 2;
  }
  return rounds * round;
}

bool is_dense(const Tensor& x, bool channels_first) {
  const int rank = static_cast<int>(x.dim());
  int64_t dense = 1;
  const auto step = [&](int d) {
    if (x.size(d) != 1 && x.stride(d) != dense) return false;
    dense *= x.size(d);
    return true;
  };
  if (!channels_first && !step(1)) return false;
  for (int d = rank - 1; d >= 2; --d) {
    if (!step(d)) return false;
  }
  return (!channels_first || step(1)) && step(0);
}

struct StatsShape {
  int64_t samples;
  int64_t channels;
  int64_t plane;
};

// Memory for the partial moments of one launch: [channels, splits] of (count, mean, M2).
Tensor new_partial(const Tensor& x, ScalarType acc, int64_t channels, int64_t splits) {
  return new_dense(x, {channels, splits, 3}, acc);
}

std::pair<Tensor, int64_t> launch_planes(const StatsKernels& kernels, const Tensor& x,
                                         const StatsShape& shape, ScalarType acc, Stream stream) {
  const int64_t element = x.element_size();
  const int64_t width = 16 / element;
  const auto address = reinterpret_cast<uintptr_t>(x.data_ptr());
  PlanesArgs args{};
  args.x = reinterpret_cast<const void*>(address / 16 * 16);
  args.skew = static_cast<int64_t>(address % 16) / element;
  args.channels = shape.channels;
  args.plane = shape.plane;
  const bool runs_are_aligned = args.skew == 0 && shape.plane % width == 0;
  const int64_t vectors = runs_are_aligned ? shape.plane / width  //
                                           : (shape.plane + 2 * width - 2) / width;
  args.vectors = make_divisor(static_cast<uint64_t>(vectors));
  args.units = shape.samples * vectors;
  args.units_per_block =
      units_per_block(args.units, kStatsThreads * kStatsInFlight, shape.channels);
  args.splits = ceil_div(args.units, args.units_per_block);
  Tensor partial = new_partial(x, acc, shape.channels, args.splits);
  args.partial = partial.data_ptr();
  launch(kernels.planes, args.splits * shape.channels, kStatsThreads, stream, args);
  return {partial, args.splits};
}

std::pair<Tensor, int64_t> launch_rows(const StatsKernels& kernels, const Tensor& x,
                                       const StatsShape& shape, ScalarType acc, Stream stream) {
  int64_t width = 16 / static_cast<int64_t>(x.element_size());
  const bool aligned = reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0;
  const bool wide = aligned && shape.channels % width == 0;
  if (!wide) width = 1;
  const int64_t vectors = shape.channels / width;
  const int64_t tile = std::min<int64_t>(vectors, kStatsThreads);
  const int64_t tiles = ceil_div(vectors, tile);
  RowsArgs args{};
  args.x = x.data_ptr();
  args.rows = shape.samples * shape.plane;
  args.channels = shape.channels;
  args.rows_per_block = units_per_block(args.rows, kStatsThreads / tile * kStatsInFlight, tiles);
  args.splits = ceil_div(args.rows, args.rows_per_block);
  Tensor partial = new_partial(x, acc, shape.channels, args.splits);
  args.partial = partial.data_ptr();
  launch(wide ? kernels.rows : kernels.rows_narrow, args.splits * tiles, kStatsThreads, stream,
         args);
  return {partial, args.splits};
}

// (mean, biased variance) of each channel of x[N, C, ...], dense with channels second or last.
std::tuple<Tensor, Tensor> run_batch_stats(const StatsLibrary& library, const Tensor& x) {
  require_cuda(x, "x");
  STD_TORCH_CHECK(x.dim() >= 2, "fx_fuser: batch_stats needs x[N, C, ...], not ",
                  to_string(x.sizes()));
  const StatsKernels& kernels = library.of(x.scalar_type());
  const ScalarType acc =
      x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  StatsShape shape{x.size(0), x.size(1), 1};
  for (int64_t d = 2; d < x.dim(); ++d) shape.plane *= x.size(d);
  const bool channels_second = is_dense(x, /*channels_first=*/true);
  const bool channels_last = is_dense(x, /*channels_first=*/false);
  STD_TORCH_CHECK(channels_second || channels_last, "fx_fuser: batch_stats needs a dense x, not ",
                  to_string(x.sizes()), " with strides ", to_string(x.strides()));

  Tensor mean = new_dense(x, {shape.channels}, acc);
  Tensor variance = new_dense(x, {shape.channels}, acc);
  if (shape.channels == 0) return {mean, variance};

  const int device = x.get_device_index();
  const OnDevice on_device(device);
  const Stream stream = current_stream(device);
  std::pair<Tensor, int64_t> partial{mean, 0};  // an empty x has no moments; `combine` makes NaN
  if (x.numel() > 0) {
    // With one element per plane, or one channel, x has both layouts.
    const bool as_rows = channels_last && (!channels_second || shape.plane == 1);
    partial = as_rows ? launch_rows(kernels, x, shape, acc, stream)
                      : launch_planes(kernels, x, shape, acc, stream);
  }
  const CombineArgs args{partial.first.data_ptr(), mean.data_ptr(), variance.data_ptr(),
                         partial.second};
  launch(kernels.combine, shape.channels, kStatsThreads, stream, args);
  return {mean, variance};
}

std::tuple<Tensor, Tensor> batch_stats(int64_t handle, const Tensor& x) {
  return run_batch_stats(*reinterpret_cast<const StatsLibrary*>(handle), x);
}

}  // namespace
}  // namespace fx_fuser
