// The depthwise convolution: tiling and launch.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "conv/depthwise_args.h"
#include "host/conv_call.h"
#include "host/image.h"
#include "host/kernel.h"

namespace fx_fuser {
namespace {

struct DepthwiseKernels : ConvKernel, EpilogueTypes {
  // Indexed by bits: 1 for planes (contiguous), 2 for operands that vary by pixel.
  std::array<Kernel, 4> kernel;
  int multiprocessors;
  int64_t kernel_h;
  int64_t kernel_w;
  int64_t stride;

  explicit DepthwiseKernels(const EpilogueTypes& types) : EpilogueTypes(types) {}

  std::optional<Made> run(const Conv& conv, const Norm& norm,
                          const EpilogueArgs& args) const override;
};

int64_t load_depthwise(const Sources& from) {
  const Signature types(from, 3);
  types.check_operands(kConvMaxOperands);
  Library library = load_library(from.cubins.at(0));
  auto kernels = std::make_unique<DepthwiseKernels>(types);
  const std::string prefix = "fx_fuser_depthwise_";
  kernels->kernel = {get_kernel(library, prefix + "channels_last"),
                     get_kernel(library, prefix + "planes"),
                     get_kernel(library, prefix + "channels_last_pixels"),
                     get_kernel(library, prefix + "planes_pixels")};
  kernels->multiprocessors = multiprocessors_of(from.device);
  kernels->kernel_h = types.sizes[0];
  kernels->kernel_w = types.sizes[1];
  kernels->stride = types.sizes[2];
  return keep<ConvKernel, DepthwiseKernels>(from, std::move(kernels));
}
const AddLoader kDepthwiseLoader("depthwise", load_depthwise);

// ---- tiling -------------------------------------------------------------------------------------

// What the tiling depends on in addition to the sizes.
struct DepthwiseForm {
  int64_t stride;
  int x_bytes;
  bool planes;
  bool pixels;
};

struct DepthwiseCut {
  int64_t columns;  // of an item
  int64_t rows;
  int64_t strips;  // of columns
  int64_t chunks;  // of rows
  int64_t items;
  int64_t lanes_log2;
  int64_t groups;  // of channels
  int64_t blocks;
};

// Threads along the channels: as many as possible, unless fewer leave fewer of them idle. whole: a
// warp, whose lanes share what they read.
int64_t depthwise_lanes_log2(int64_t units, bool whole) {
  const int64_t kFewest = whole ? kDepthwiseMaxLanes : 4;
  int64_t best = 0;
  int64_t threads = 0;
  int64_t log2 = 0;
  while ((1 << log2) < kDepthwiseMaxLanes) ++log2;
  for (; (1 << log2) >= kFewest; --log2) {
    const int64_t made = ceil_div(units, 1 << log2) << log2;
    if (threads == 0 || made < threads - threads / 16) {
      threads = made;
      best = log2;
    }
  }
  return best;
}

struct DepthwiseOut {
  int64_t h;
  int64_t w;
};

// The result's size; std::nullopt if there is no kernel for the window, or if the sizes are too
// large for its indices.
std::optional<DepthwiseOut> depthwise_out(const ConvShape& shape, int64_t stride) {
  constexpr int64_t kHighest = int64_t{1} << 28;
  for (const int64_t size : {shape.samples, shape.channels, shape.h, shape.w}) {
    if (size < 1 || size > kHighest) return std::nullopt;
  }
  for (const int64_t padding : {shape.left, shape.right, shape.top, shape.bottom}) {
    if (padding < 0 || padding > kHighest) return std::nullopt;
  }
  for (const int64_t size : {shape.kernel_h, shape.kernel_w}) {
    if (size < kDepthwiseLeastWindow || size > kDepthwiseMaxWindow) return std::nullopt;
  }
  const int64_t spare_h = shape.h + shape.top + shape.bottom - shape.kernel_h;
  const int64_t spare_w = shape.w + shape.left + shape.right - shape.kernel_w;
  const bool is_taken = (stride == 1 || stride == 2) && shape.outputs == shape.channels &&
                        shape.channels > 1 && spare_h >= 0 && spare_w >= 0;
  if (!is_taken) return std::nullopt;
  return DepthwiseOut{spare_h / stride + 1, spare_w / stride + 1};
}

// What is divided: results of so many rows and columns in all samples, by a kernel's threads.
struct DepthwiseWork {
  int64_t samples;
  int64_t h;
  int64_t w;
  int64_t units;  // threads along all channels
  int64_t columns;
  int64_t lanes_log2;
  int64_t threads;   // of a block
  int64_t resident;  // blocks
  int64_t stride;    // rows that are read for one of the result
  int64_t halo;      // and besides, of an item
  // Rounds of blocks. More would load the weights more often than load balance needs.
  int64_t most_rounds;
};

// std::nullopt if there are more than the kernels can count.
std::optional<DepthwiseCut> depthwise_divided(const DepthwiseWork& work) {
  DepthwiseCut cut{};
  cut.columns = work.columns;
  cut.strips = ceil_div(work.w, work.columns);
  cut.lanes_log2 = work.lanes_log2;
  cut.groups = ceil_div(work.units, int64_t{1} << cut.lanes_log2);
  const int64_t side = work.threads >> cut.lanes_log2;
  // Cost: rounds of blocks, the last of which is not full, times an item's rows, including the halo
  // rows that its neighbours read too and its start-up.
  constexpr int64_t kMostChunks = 64;
  constexpr double kLastRound = 0.7;
  constexpr int64_t kBegin = 5;
  double least = 0;
  for (int64_t chunks = 1; chunks <= std::min(work.h, kMostChunks); ++chunks) {
    const int64_t rows = ceil_div(work.h, chunks);
    const int64_t items = work.samples * ceil_div(work.h, rows) * cut.strips;
    const int64_t blocks = cut.groups * ceil_div(items, side);
    const double time =
        (static_cast<double>(blocks) / static_cast<double>(work.resident) + kLastRound) *
        static_cast<double>(rows * work.stride + work.halo + kBegin);
    if (chunks > 1 && time >= least) continue;
    least = time;
    cut.rows = rows;
    cut.chunks = ceil_div(work.h, rows);
    cut.items = items;
  }
  const int64_t workers =
      std::min(ceil_div(cut.items, side), ceil_div(work.most_rounds * work.resident, cut.groups));
  cut.blocks = workers * cut.groups;
  constexpr int64_t kHighest =
      (int64_t{1} << 31) - (int64_t{1} << 20);  // with a stride of the grid
  if (cut.items > kHighest - workers * side || cut.blocks > kHighest) return std::nullopt;
  return cut;
}

// std::nullopt if the kernels do not support these sizes.
std::optional<DepthwiseCut> depthwise_cut_of(const ConvShape& shape, const DepthwiseForm& form,
                                             int multiprocessors) {
  const auto out = depthwise_out(shape, form.stride);
  if (!out || (!form.planes && shape.channels % 2 != 0)) return std::nullopt;
  const int kernel_h = static_cast<int>(shape.kernel_h);
  const int kernel_w = static_cast<int>(shape.kernel_w);
  const int stride = static_cast<int>(form.stride);
  const int64_t vector = depthwise_channels(kernel_h, kernel_w, stride, form.x_bytes, form.planes);
  const int64_t units = shape.channels / vector;
  const int resident =
      depthwise_resident(kernel_h, kernel_w, stride, form.x_bytes, form.planes, form.pixels);
  DepthwiseWork work{};
  work.samples = shape.samples;
  work.h = out->h;
  work.w = out->w;
  work.units = units;
  work.columns = depthwise_columns(kernel_h, kernel_w, stride, form.x_bytes, form.planes);
  work.lanes_log2 = form.planes ? 0 : depthwise_lanes_log2(units, vector * form.x_bytes < 4);
  work.threads = kDepthwiseThreads;
  work.resident = int64_t{multiprocessors} * resident;
  work.stride = stride;
  work.halo = kernel_h;
  work.most_rounds = 4;
  return depthwise_divided(work);
}

// [columns, rows, strips, chunks, items, lanes, groups, blocks]; empty if the kernels do not
// support these sizes or so many operands. sizes: as in `conv_shape_of`.
std::vector<int64_t> depthwise_cut(const std::vector<int64_t>& sizes, int64_t stride,
                                   int64_t x_bytes, bool channels_last, int64_t operands,
                                   int64_t multiprocessors) {
  const DepthwiseForm form{stride, static_cast<int>(x_bytes), !channels_last, false};
  const auto cut = depthwise_cut_of(conv_shape_of(sizes), form, static_cast<int>(multiprocessors));
  if (!cut || operands > kConvMaxOperands) return {};
  return {cut->columns, cut->rows,  cut->strips,
          cut->chunks,  cut->items, int64_t{1} << cut->lanes_log2,
          cut->groups,  cut->blocks};
}

// All but all_rows. read: the images, in one layout.
void set_depthwise_grid(DepthwiseGrid& grid, const ConvShape& shape, const DepthwiseOut& out,
                        const DepthwiseCut& cut, const std::vector<Tensor>& read) {
  const bool is_wide = std::all_of(read.begin(), read.end(), [](const Tensor& image) {
    const auto address = reinterpret_cast<uintptr_t>(image.data_ptr());
    return address % 16 == 0 && image.size(1) * image.element_size() % 16 == 0;
  });
  grid.wide = is_wide ? 1 : 0;
  grid.channels = static_cast<int32_t>(shape.channels);
  grid.h = static_cast<int32_t>(shape.h);
  grid.w = static_cast<int32_t>(shape.w);
  grid.out_h = static_cast<int32_t>(out.h);
  grid.out_w = static_cast<int32_t>(out.w);
  grid.top = static_cast<int32_t>(shape.top);
  grid.left = static_cast<int32_t>(shape.left);
  grid.rows = static_cast<int32_t>(cut.rows);
  grid.strips = make_divisor(static_cast<uint32_t>(cut.strips));
  grid.chunks = make_divisor(static_cast<uint32_t>(cut.chunks));
  grid.items = static_cast<uint32_t>(cut.items);
  grid.lanes_log2 = static_cast<int32_t>(cut.lanes_log2);
  grid.groups = static_cast<int32_t>(cut.groups);
}

// ---- the launch ---------------------------------------------------------------------------------

void check_depthwise(const DepthwiseKernels& kernels, const Tensor& x, const Tensor& weight,
                     const std::vector<int64_t>& padding) {
  check_conv(kernels.x, x, weight, padding, x.dim() == 4 ? x.size(1) : 1);
  STD_TORCH_CHECK(weight.size(2) == kernels.kernel_h && weight.size(3) == kernels.kernel_w,
                  "fx_fuser: this depthwise convolution is of windows of ", kernels.kernel_h, " x ",
                  kernels.kernel_w, ", not of weight ", to_string(weight.sizes()));
}

// True if all have the same layout: contiguous if `planes`, else channels_last.
bool are_alike(const Tensor& x, const Tensor& out, const std::optional<Tensor>& c, bool planes) {
  const auto is_so = [&](const Tensor& image) {
    return planes ? is_contiguous(image) : is_dense_channels_last(image);
  };
  return is_so(x) && is_so(out) && (!c || is_so(*c));
}

// True if the two channels that are one access are aligned in every pixel.
bool are_aligned(const Tensor& x, const Tensor& out, const std::optional<Tensor>& c) {
  const auto is_aligned = [](const Tensor& image) {
    return reinterpret_cast<uintptr_t>(image.data_ptr()) % (2 * image.element_size()) == 0;
  };
  return is_aligned(x) && is_aligned(out) && (!c || is_aligned(*c));
}

// out = epilogue(conv2d(x, weight, groups=channels)), and c, the convolution itself, if given.
// turned: by the window reversed.
// Returns false, without a launch, if the kernel does not support these shapes or strides.
bool run_depthwise(const DepthwiseKernels& kernels, const Tensor& x, const Tensor& weight,
                   const std::vector<int64_t>& padding, const Tensor& out,
                   const std::optional<Tensor>& c, const EpilogueArgs& epilogue,
                   bool turned = false) {
  check_depthwise(kernels, x, weight, padding);
  const bool planes = !are_alike(x, out, c, /*planes=*/false);
  if (planes && !are_alike(x, out, c, /*planes=*/true)) return false;
  if (!is_contiguous(weight) || (!planes && !are_aligned(x, out, c))) return false;
  check_epilogue(kernels, out, epilogue);
  DepthwiseArgs args{};
  bool pixels = false;
  for (size_t i = 0; i < epilogue.tensors.size(); ++i) {
    args.operand[i] = conv_operand_of(epilogue.tensors[i]);
    pixels |= args.operand[i].per_pixel;
  }
  const ConvShape shape = conv_shape_of(x, weight, padding);
  const DepthwiseForm form{kernels.stride, static_cast<int>(x.element_size()), planes, pixels};
  const auto cut = depthwise_cut_of(shape, form, kernels.multiprocessors);
  const auto out_size = depthwise_out(shape, kernels.stride);
  if (!cut || !out_size) return false;
  const int device = x.get_device_index();
  const ImageSize size{shape.samples, shape.channels, out_size->h, out_size->w};
  check_result(out, "out", kernels.out, size, x, weight);
  if (c) check_result(*c, "c", kernels.x, size, x, weight);

  set_depthwise_grid(args, shape, *out_size, *cut, {x});
  args.all_rows = args.out_h;
  args.x = x.data_ptr();
  args.weight = weight.data_ptr();
  args.out = out.data_ptr();
  args.c = c ? c->data_ptr() : nullptr;
  std::copy(epilogue.scalars.begin(), epilogue.scalars.end(), args.scalar);
  args.turned = turned ? 1 : 0;
  const OnDevice on_device(device);
  launch(kernels.kernel[(planes ? 1 : 0) + (pixels ? 2 : 0)], cut->blocks, kDepthwiseThreads,
         current_stream(device), args);
  return true;
}

std::optional<Made> DepthwiseKernels::run(const Conv& conv, const Norm& norm,
                                          const EpilogueArgs& args) const {
  const Tensor& x = conv.x;
  const Tensor& weight = conv.weight;
  const auto are = [](const std::vector<int64_t>& values, int64_t value) {
    return std::all_of(values.begin(), values.end(), [=](int64_t v) { return v == value; });
  };
  if (norm.training || !are(conv.stride, stride) || !are(conv.dilation, 1) ||
      conv.groups != x.size(1) || conv.groups != weight.size(0)) {
    return {};
  }
  const bool channels_last = suggests_channels_last(x) || suggests_channels_last(weight);
  const auto out = depthwise_out(conv_shape_of(x, weight, conv.padding), stride);
  if (!out) return {};
  const auto [y, c] = new_results(conv, {x.size(0), x.size(1), out->h, out->w}, channels_last);
  const EpilogueArgs leaves = leaves_of(norm, args);
  if (!run_depthwise(*this, x, weight, conv.padding, y, c, leaves)) {
    return {};
  }
  return result_of(y, c, norm);
}

}  // namespace
}  // namespace fx_fuser
