// Gradients of the grouped convolution (grouped.cuh, grouped_weight.cuh), launched, and both and
// the convolution as graphs call them. fx_fuser/ops/grouped says what the arguments mean.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "host/grouped.h"
#include "host/split_operands.h"

namespace fx_fuser {
namespace {

// Of the weight's gradient.
struct GroupedWeightKernels {
  Kernel kernel;
  Kernel sum;
  ScalarType type;
  int resident;
  int multiprocessors;
  int shared_bytes;
  int tiles;
  bool is_mixed;
  mutable GroupedMemo memo;

  GroupedLimits limits() const { return {tiles, 0, 2, resident, multiprocessors, shared_bytes}; }
};

int64_t load_grouped_weight(const Sources& from) {
  const Signature types(from, 2);
  types.check_operands(0);
  auto kernels = std::make_unique<GroupedWeightKernels>();
  kernels->tiles = types.sizes[0];
  kernels->is_mixed = types.sizes[1] != 0;
  kernels->type = types.x;
  kernels->multiprocessors = multiprocessors_of(from.device);
  const int most_of_block = attribute_of(from.device, kDeviceMaxShared);
  kernels->shared_bytes = most_of_block + kGroupedReserved;
  Library library = load_library(from.cubins.at(0));
  kernels->kernel = get_kernel(library, "fx_fuser_grouped_weight", most_of_block);
  kernels->sum = get_kernel(library, "fx_fuser_grouped_weight_sum");
  kernels->resident = resident_of(kernels->kernel);
  return keep<GroupedWeightKernels>(from, std::move(kernels));
}
const AddLoader kGroupedWeightLoader("grouped_weight", load_grouped_weight);

// ---- the gradient of x --------------------------------------------------------------------------

// What reaches x's rows, or columns, first + stride · i, i < count: a convolution of dz by some of
// the taps, last first.
struct GroupedPhase {
  int64_t first;
  int64_t count;
  int64_t last_tap;
  int64_t taps;
  int64_t before;  // its padding, which may be negative
};

GroupedPhase phase_of(int64_t first, int64_t size, int64_t kernel, int64_t stride, int64_t dilation,
                      int64_t padding) {
  const int64_t tap = stride == 1 ? 0 : (first + padding) % stride;
  const int64_t taps = ceil_div(kernel - tap, stride);
  const int64_t before =
      stride == 1 ? dilation * (kernel - 1) - padding : taps - 1 - (first + padding - tap) / stride;
  return {first, ceil_div(size - first, stride), tap + stride * (taps - 1), taps, before};
}

// The convolution of dz that makes a phase of dx.
GroupedWindow window_of_phase(const GroupedWindow& of, const GroupedPhase& down,
                              const GroupedPhase& across) {
  const ImplicitWindow& window = of.window;
  const ConvShape& shape = window.shape;
  const auto after = [](const GroupedPhase& phase, int64_t size, int64_t dilation) {
    return phase.count + dilation * (phase.taps - 1) - size - phase.before;
  };
  const int64_t d_h = window.dilation[0];
  const int64_t d_w = window.dilation[1];
  const ConvShape of_dz{shape.samples,
                        shape.outputs,
                        window.out_h(),
                        window.out_w(),
                        shape.channels,
                        down.taps,
                        across.taps,
                        across.before,
                        after(across, window.out_w(), d_w),
                        down.before,
                        after(down, window.out_h(), d_h)};
  return {{of_dz, {1, 1}, {d_h, d_w}}, of.groups};
}

// Every phase is a convolution: no dilation beside a stride, and no pixel without taps.
bool has_phases(const ImplicitWindow& window) {
  const int64_t kernel[] = {window.shape.kernel_h, window.shape.kernel_w};
  for (int d = 0; d < 2; ++d) {
    if (window.stride[d] > 1 && (window.dilation[d] > 1 || kernel[d] < window.stride[d])) {
      return false;
    }
  }
  return true;
}

// dx of dz, as autograd's. of: the convolution. Returns false, without a launch, if the kernel does
// not support these shapes or strides.
bool run_grouped_input(const GroupedKernels& kernels, const Tensor& dz, const Tensor& weight,
                       const GroupedWindow& of, const Tensor& dx) {
  const ImplicitWindow& window = of.window;
  const ConvShape& shape = window.shape;
  check_result(dz, "dz", kernels.x, window.out_size(), dx, weight);
  check_result(dx, "dx", kernels.out, {shape.samples, shape.channels, shape.h, shape.w}, dz,
               weight);
  if (!grouped_takes(of) || !has_phases(window) || !is_dense_channels_last(dx) ||
      !takes_vectors(dx, /*channels_last=*/true)) {
    return false;
  }
  const GroupedLimits limits = kernels.limits();
  const ImageSize dense = channels_last_strides({shape.samples, shape.channels, shape.h, shape.w});
  std::vector<std::pair<GroupedCut, GroupedArgs>> calls;
  for (int64_t i = 0; i < std::min(window.stride[0], shape.h); ++i) {
    for (int64_t j = 0; j < std::min(window.stride[1], shape.w); ++j) {
      const auto down =
          phase_of(i, shape.h, shape.kernel_h, window.stride[0], window.dilation[0], shape.top);
      const auto across =
          phase_of(j, shape.w, shape.kernel_w, window.stride[1], window.dilation[1], shape.left);
      const GroupedWindow of_phase = window_of_phase(of, down, across);
      if (!is_kernel_of(kernels, of_phase)) return false;
      const GroupedCut cut = kernels.memo.of(of_phase, limits, /*of_weight=*/false);
      GroupedArgs args{};
      if (cut.resident == 0 || !describe(of_phase, cut, dz, args)) return false;
      const int64_t bytes = dz.element_size();
      args.weight = static_cast<const uint8_t*>(weight.data_ptr()) +
                    bytes * (down.last_tap * weight.stride(2) + across.last_tap * weight.stride(3));
      args.weight_stride[0] = weight.stride(1);
      args.weight_stride[1] = weight.stride(0);
      args.weight_stride[2] = -window.stride[0] * weight.stride(2);
      args.weight_stride[3] = -window.stride[1] * weight.stride(3);
      args.weight_group = of.outputs() * weight.stride(0);
      args.out = static_cast<uint8_t*>(dx.data_ptr()) + bytes * (i * dense[2] + j * dense[3]);
      args.out_stride[0] = dense[0];
      args.out_stride[1] = window.stride[0] * dense[2];
      args.out_stride[2] = window.stride[1] * dense[3];
      if (!is_counted(cut.tile, args.out_stride)) return false;
      calls.emplace_back(cut, args);
    }
  }
  for (auto& [cut, args] : calls) launch_grouped(kernels, cut, dz.get_device_index(), args);
  return true;
}

// ---- the gradient of the weight -----------------------------------------------------------------

// dw [o, c / groups, kernel_h, kernel_w], of any strides. Returns false, without a launch, if the
// kernel does not support these shapes or strides. wish: a tile for benchmarks.
bool run_grouped_weight(const GroupedWeightKernels& kernels, const Tensor& x, const Tensor& dz,
                        const GroupedWindow& of, const Tensor& dw,
                        const std::vector<int64_t>& wish = {}) {
  check_result(dz, "dz", kernels.type, of.window.out_size(), x, dw);
  if (!grouped_takes(of) || !is_kernel_of(kernels, of)) return false;
  const GroupedLimits limits = kernels.limits();
  const GroupedCut cut =
      wish.size() == 6
          ? cut_weight_into(of, {wish[0], wish[1], wish[2], wish[3], wish[4], wish[5]}, limits)
          : kernels.memo.of(of, limits, /*of_weight=*/true);
  GroupedWeightArgs args{};
  if (cut.resident == 0 || !describe(of, cut, x, args)) return false;
  // dz as x of a convolution of one tap.
  ImplicitWindow of_dz = of.window;
  of_dz.shape = {of.window.shape.samples,
                 of.window.shape.outputs,
                 of.window.out_h(),
                 of.window.out_w(),
                 1,
                 1,
                 1,
                 0,
                 0,
                 0,
                 0};
  if (!find_x_strides(dz, of_dz, args.dz_stride)) return false;
  const int64_t roles = cut.roles_of_unit * cut.tile.slice_units;
  const int64_t shares = kGroupedWarps / roles;
  const int64_t count = cut.workers * shares;
  const Tensor partial = new_dense(x, {count, dw.numel()}, ScalarType::Float);
  const auto divisor = [](int64_t value) { return make_divisor(static_cast<uint32_t>(value)); };
  args.unit_divisor = divisor(of.unit_vectors());
  args.group_divisor = divisor(of.inputs());
  args.output_divisor = divisor(of.outputs());
  args.dz = dz.data_ptr();
  args.partial = static_cast<float*>(partial.data_ptr());
  args.roles = as_int(roles);
  args.roles_of_unit = as_int(cut.roles_of_unit);
  args.shares = as_int(shares);
  args.dz_vectors = divisor(cut.tile.slice_units * cut.tile.slice_tiles);
  args.dz_pitch = as_int(cut.dz_pitch);
  args.pixels_at = as_int(cut.pixels_at);
  args.dz_at = as_int(cut.dz_at);
  args.dz_bytes = as_int(cut.dz_bytes);
  GroupedSumArgs sum{};
  sum.partial = args.partial;
  sum.dw = dw.data_ptr();
  for (int d = 0; d < 4; ++d) sum.stride[d] = dw.stride(d);
  sum.elements = dw.numel();
  sum.count = as_int(count);
  sum.inputs = args.group_inputs;
  sum.kernel_h = args.kernel_h;
  sum.kernel_w = args.kernel_w;
  const int device = x.get_device_index();
  const OnDevice on_device(device);
  LaunchOptions options;
  options.shared_bytes = static_cast<int>(cut.shared_bytes);
  launch(kernels.kernel, cut.workers * cut.slices, kGroupedThreads, current_stream(device), args,
         options);
  launch(kernels.sum, ceil_div(sum.elements, kGroupedSumElements), kGroupedThreads,
         current_stream(device), sum, {});
  return true;
}

// ---- as graphs call them ------------------------------------------------------------------------

constexpr const char* kLoadGrouped = "fx_fuser::load_grouped";

// A convolution's numbers, [down, across].
struct GroupedNumbers {
  const std::vector<int64_t>& stride;
  const std::vector<int64_t>& padding;
  const std::vector<int64_t>& dilation;
  int64_t groups;

  bool are_pairs() const {
    return stride.size() == 2 && padding.size() == 2 && dilation.size() == 2 && groups > 0;
  }
  GroupedWindow of(const ImageSize& x, const ImageSize& weight) const {
    const std::vector<int64_t> sizes{x[0],       x[1],       x[2],      x[3],
                                     weight[0],  weight[2],  weight[3], padding[1],
                                     padding[1], padding[0], padding[0]};
    return {window_of(conv_shape_of(sizes), stride, dilation), groups};
  }
};

ImageSize size_of(const Tensor& image) {
  return {image.size(0), image.size(1), image.size(2), image.size(3)};
}

std::optional<Made> make_grouped(const Tensor& x, const Tensor& weight, const std::string& kernel,
                                 const std::vector<int64_t>& stride,
                                 const std::vector<int64_t>& padding,
                                 const std::vector<int64_t>& dilation, int64_t groups) {
  const auto* found = kernels_named<ConvKernel>(kernel, x, kLoadGrouped);
  const auto* kernels = dynamic_cast<const GroupedKernels*>(found);
  const GroupedNumbers numbers{stride, padding, dilation, groups};
  if (kernels == nullptr || !numbers.are_pairs()) return std::nullopt;
  check_conv(kernels->x, x, weight, {0, 0, 0, 0}, groups);
  const GroupedWindow of = numbers.of(size_of(x), size_of(weight));
  if (!grouped_takes(of)) return std::nullopt;
  const Tensor z = new_image(x, of.window.out_size(), x.scalar_type(), true);
  if (!run_grouped(*kernels, x, weight, of, z, std::nullopt, {{}, {}})) return std::nullopt;
  return Made(z);
}

std::optional<Made> make_grouped_input(const Tensor& dz, const Tensor& weight,
                                       const std::string& kernel,
                                       const std::vector<int64_t>& stride,
                                       const std::vector<int64_t>& padding,
                                       const std::vector<int64_t>& dilation, int64_t groups,
                                       const std::vector<int64_t>& size) {
  const auto* found = kernels_named<ConvKernel>(kernel, dz, kLoadGrouped);
  const auto* kernels = dynamic_cast<const GroupedKernels*>(found);
  const GroupedNumbers numbers{stride, padding, dilation, groups};
  if (kernels == nullptr || !numbers.are_pairs() || size.size() != 2) return std::nullopt;
  const ImageSize of_x{dz.size(0), weight.size(1) * groups, size[0], size[1]};
  const GroupedWindow of = numbers.of(of_x, size_of(weight));
  if (!grouped_takes(of)) return std::nullopt;
  const Tensor dx = new_image(dz, of_x, dz.scalar_type(), true);
  if (!run_grouped_input(*kernels, dz, weight, of, dx)) return std::nullopt;
  return Made(dx);
}

std::optional<Made> make_grouped_weight(const Tensor& x, const Tensor& dz,
                                        const std::string& kernel,
                                        const std::vector<int64_t>& stride,
                                        const std::vector<int64_t>& padding,
                                        const std::vector<int64_t>& dilation, int64_t groups,
                                        const std::vector<int64_t>& window, bool is_last) {
  const auto* kernels = kernels_named<GroupedWeightKernels>(kernel, x, kLoadGrouped);
  const GroupedNumbers numbers{stride, padding, dilation, groups};
  if (kernels == nullptr || !numbers.are_pairs() || window.size() != 2) return std::nullopt;
  const ImageSize of_weight{dz.size(1), x.size(1) / groups, window[0], window[1]};
  const GroupedWindow of = numbers.of(size_of(x), of_weight);
  if (!grouped_takes(of)) return std::nullopt;
  const Tensor dw = new_image(x, of_weight, x.scalar_type(), is_last);
  if (!run_grouped_weight(*kernels, x, dz, of, dw)) return std::nullopt;
  return Made(dw);
}

}  // namespace
}  // namespace fx_fuser
