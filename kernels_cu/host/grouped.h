// Grouped convolutions of channels_last images (grouped.cuh): launch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "conv/grouped_args.h"
#include "host/conv_call.h"
#include "host/grouped_cut.h"
#include "host/image.h"
#include "host/implicit.h"
#include "host/kernel.h"

namespace fx_fuser {
namespace {

// ---- kernels ------------------------------------------------------------------------------------

struct GroupedKernels : ConvKernel, EpilogueTypes {
  Kernel kernel;
  int resident;  // blocks per multiprocessor, as limited by registers
  int multiprocessors;
  int shared_bytes;  // of a multiprocessor
  int tiles;         // products side by side that have one unit's pixels
  bool is_mixed;
  int leaves;
  mutable GroupedMemo memo;

  explicit GroupedKernels(const EpilogueTypes& types) : EpilogueTypes(types) {}

  GroupedLimits limits() const {
    return {tiles,    leaves,          out == ScalarType::Float ? 4 : 2,
            resident, multiprocessors, shared_bytes};
  }
  std::optional<Made> run(const Conv& conv, const Norm& norm,
                          const EpilogueArgs& args) const override;
};

// Blocks per multiprocessor for which there are registers.
int resident_of(Kernel kernel) {
  int resident = 0;
  check(driver().OccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kGroupedThreads, 0),
        "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  return std::min(resident, kGroupedMostResident);
}

int64_t load_grouped(const Sources& from) {
  const Signature types(from, 3);
  auto kernels = std::make_unique<GroupedKernels>(types);
  kernels->tiles = types.sizes[0];
  kernels->is_mixed = types.sizes[1] != 0;
  kernels->leaves = types.sizes[2];
  kernels->multiprocessors = multiprocessors_of(from.device);
  const int most_of_block = attribute_of(from.device, kDeviceMaxShared);
  kernels->shared_bytes = most_of_block + kGroupedReserved;
  kernels->kernel = get_kernel(load_library(from.cubins.at(0)), "fx_fuser_grouped", most_of_block);
  kernels->resident = resident_of(kernels->kernel);
  return keep<ConvKernel>(from, std::move(kernels));
}
const AddLoader kGroupedLoader("grouped", load_grouped);

// ---- arguments ----------------------------------------------------------------------------------

int32_t as_int(int64_t value) { return static_cast<int32_t>(value); }

// What the convolution is, and how it is divided. False if the kernels cannot count its pixels.
bool describe(const GroupedWindow& of, const GroupedCut& cut, const Tensor& x,
              GroupedPatches& args) {
  const ImplicitWindow& window = of.window;
  const ConvShape& shape = window.shape;
  const auto divisor = [](int64_t value) { return make_divisor(static_cast<uint32_t>(value)); };
  const GroupedTile& tile = cut.tile;
  if (!find_x_strides(x, window, args.x_stride)) return false;
  // The kernel computes where a patch's pixels behind the image would be.
  const int64_t behind = tile.images * args.x_stride[0] + cut.patch_rows * args.x_stride[1] +
                         cut.patch_columns * args.x_stride[2];
  if (behind > (int64_t{1} << 30)) return false;
  args.x = x.data_ptr();
  args.samples = as_int(shape.samples);
  args.h = as_int(shape.h);
  args.w = as_int(shape.w);
  args.outputs = as_int(shape.outputs);
  args.out_h = as_int(window.out_h());
  args.out_w = as_int(window.out_w());
  args.kernel_h = as_int(shape.kernel_h);
  args.kernel_w = as_int(shape.kernel_w);
  for (int d = 0; d < 2; ++d) {
    args.stride[d] = as_int(window.stride[d]);
    args.dilation[d] = as_int(window.dilation[d]);
  }
  args.top = as_int(shape.top);
  args.left = as_int(shape.left);
  args.group_inputs = as_int(of.inputs());
  args.group_outputs = as_int(of.outputs());
  args.units = as_int(of.units());
  args.unit_vectors = as_int(of.unit_vectors());
  args.unit_tiles = as_int(of.unit_tiles());
  args.k_vectors = as_int(of.k_vectors());
  args.slices = divisor(cut.slices);
  args.splits = as_int(cut.splits);
  args.slice_units = as_int(tile.slice_units);
  args.slice_tiles = as_int(tile.slice_tiles);
  args.slice_vectors = divisor(tile.slice_units * of.unit_vectors());
  args.tile_rows = as_int(tile.rows);
  args.tile_columns = as_int(tile.columns);
  args.tile_images = as_int(tile.images);
  args.tiles_x = divisor(cut.tiles_x);
  args.tiles_y = divisor(cut.tiles_y);
  args.tiles = as_int(cut.tiles);
  args.workers = as_int(cut.workers);
  args.batches = as_int(cut.batches);
  args.patch_columns = divisor(cut.patch_columns);
  args.patch_rows = divisor(cut.patch_rows);
  args.stride_w = divisor(window.stride[1]);
  args.phase_columns = as_int(cut.phase_columns);
  args.pixel_bytes = as_int(cut.pixel_bytes);
  args.buffers = as_int(tile.buffers);
  args.taps_at = as_int(cut.taps_at);
  args.first_taps_at = as_int(cut.first_taps_at);
  args.places_at = as_int(cut.places_at);
  args.sources_at = as_int(cut.sources_at);
  args.patch_at = as_int(cut.patch_at);
  args.patch_bytes = as_int(cut.patch_bytes);
  return true;
}

// Can the kernel count a tile's elements?
bool is_counted(const GroupedTile& tile, const int64_t (&stride)[3]) {
  const int64_t last =
      (tile.images - 1) * stride[0] + (tile.rows - 1) * stride[1] + (tile.columns - 1) * stride[2];
  return last <= std::numeric_limits<int32_t>::max();
}

void launch_grouped(const GroupedKernels& kernels, const GroupedCut& cut, int device,
                    GroupedArgs& args) {
  const int64_t units = grouped_units(kernels.tiles) > 1 ? cut.jobs : cut.tile.slice_units;
  args.jobs = make_divisor(static_cast<uint32_t>(cut.jobs));
  args.unit_jobs = make_divisor(static_cast<uint32_t>(cut.jobs / units));
  args.weight_pitch = as_int(cut.weight_pitch);
  args.channels_at = as_int(cut.channels_at);
  args.weights_at = as_int(cut.weights_at);
  args.stage_at = as_int(cut.stage_at);
  LaunchOptions options;
  options.shared_bytes = static_cast<int>(cut.shared_bytes);
  const OnDevice on_device(device);
  launch(kernels.kernel, cut.workers * cut.slices, kGroupedThreads, current_stream(device), args,
         options);
}

// Is this the kernel for such groups?
template <class Kernels>
bool is_kernel_of(const Kernels& kernels, const GroupedWindow& of) {
  const bool is_wide = of.unit_tiles() > 2;
  return kernels.is_mixed == (of.groups_of_unit() > 1) &&
         (is_wide ? kernels.tiles > 2 : kernels.tiles == of.unit_tiles());
}

// ---- the convolution ----------------------------------------------------------------------------

// out = epilogue(conv2d(x, weight)), and c = conv2d(x, weight) if given. Returns false, without a
// launch, if the kernel does not support these shapes or strides. wish: a tile for benchmarks.
bool run_grouped(const GroupedKernels& kernels, const Tensor& x, const Tensor& weight,
                 const GroupedWindow& of, const Tensor& out, const std::optional<Tensor>& c,
                 const EpilogueArgs& epilogue, const std::vector<int64_t>& wish = {}) {
  if (!grouped_takes(of) || !is_kernel_of(kernels, of)) return false;
  const auto is_taken = [&](const Tensor& result, const char* name, ScalarType type) {
    check_result(result, name, type, of.window.out_size(), x, weight);
    return is_dense_channels_last(result) && takes_vectors(result, /*channels_last=*/true);
  };
  if (!is_taken(out, "out", kernels.out) || (c && !is_taken(*c, "c", kernels.x))) return false;
  check_epilogue(kernels, out, epilogue);
  const GroupedLimits limits = kernels.limits();
  const GroupedCut cut =
      wish.size() == 6
          ? cut_into(of, {wish[0], wish[1], wish[2], wish[3], wish[4], wish[5]}, limits)
          : kernels.memo.of(of, limits, /*of_weight=*/false);
  GroupedArgs args{};
  if (cut.resident == 0 || !describe(of, cut, x, args)) return false;
  args.weight = weight.data_ptr();
  for (int d = 0; d < 4; ++d) args.weight_stride[d] = weight.stride(d);
  args.weight_group = of.outputs() * weight.stride(0);
  args.weight_takes_vectors =
      of.groups_of_unit() == 1 && of.inputs() % kGroupedVector == 0 && is_weight_taken(weight);
  args.out = out.data_ptr();
  args.c = c ? c->data_ptr() : nullptr;
  const ImageSize dense = channels_last_strides(of.window.out_size());
  for (int i = 0; i < 3; ++i) args.out_stride[i] = dense[i == 0 ? 0 : i + 1];
  if (!is_counted(cut.tile, args.out_stride)) return false;
  std::copy(epilogue.scalars.begin(), epilogue.scalars.end(), args.scalar);
  for (size_t i = 0; i < epilogue.tensors.size(); ++i) {
    const Tensor& operand = epilogue.tensors[i];
    args.operand[i].of = conv_operand_of(operand);
    if (i < static_cast<size_t>(kernels.leaves)) {
      STD_TORCH_CHECK(is_per_channel(operand), "fx_fuser: operand ", i, " of shape ",
                      to_string(operand.sizes()), " is not one number per channel");
    }
    args.operand[i].takes_vectors =
        takes_quads(args.operand[i].of, operand.element_size(), out.size(1));
  }
  launch_grouped(kernels, cut, x.get_device_index(), args);
  return true;
}

std::optional<Made> GroupedKernels::run(const Conv& conv, const Norm& norm,
                                        const EpilogueArgs& args) const {
  const Tensor& image = conv.x;
  const bool channels_last = suggests_channels_last(image) || suggests_channels_last(conv.weight);
  if (norm.training || !channels_last) return {};
  check_conv(x, image, conv.weight, conv.padding, conv.groups);
  const GroupedWindow of{
      implicit_window(image, conv.weight, conv.stride, conv.padding, conv.dilation), conv.groups};
  if (!grouped_takes(of)) return {};
  const auto [y, c] = new_results(conv, of.window.out_size(), channels_last);
  const EpilogueArgs leaves = leaves_of(norm, args);
  if (!run_grouped(*this, image, conv.weight, of, y, c, leaves)) return {};
  return result_of(y, c, norm);
}

}  // namespace
}  // namespace fx_fuser
