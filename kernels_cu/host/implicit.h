// Convolution of channels_last images as an implicit gemm (implicit.cuh): tiling and launch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "conv/implicit_args.h"
#include "host/conv_call.h"
#include "host/image.h"
#include "host/kernel.h"

namespace fx_fuser {
namespace {

struct ImplicitKernels : ConvKernel, EpilogueTypes {
  Kernel kernel;
  int resident;  // blocks per multiprocessor, as limited by registers
  int multiprocessors;
  int shared_bytes;  // of a multiprocessor
  int columns;
  bool is_window;
  int leaves;

  explicit ImplicitKernels(const EpilogueTypes& types) : EpilogueTypes(types) {}

  std::optional<Made> run(const Conv& conv, const Norm& norm,
                          const EpilogueArgs& args) const override;
};

int64_t load_implicit(const Sources& from) {
  const Signature types(from, 3);
  auto kernels = std::make_unique<ImplicitKernels>(types);
  kernels->columns = types.sizes[0];
  kernels->is_window = types.sizes[1] != 0;
  kernels->leaves = types.sizes[2];
  kernels->multiprocessors = multiprocessors_of(from.device);
  const int most_of_block = attribute_of(from.device, kDeviceMaxShared);
  kernels->shared_bytes = most_of_block + kImplicitReserved;
  kernels->kernel = get_kernel(load_library(from.cubins.at(0)), "fx_fuser_implicit", most_of_block);
  check(driver().OccupancyMaxActiveBlocksPerMultiprocessor(&kernels->resident, kernels->kernel,
                                                           kImplicitThreads, 0),
        "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  kernels->resident = std::min(kernels->resident, kImplicitResident);
  return keep<ConvKernel>(from, std::move(kernels));
}
const AddLoader kImplicitLoader("implicit", load_implicit);

// ---- tiling -------------------------------------------------------------------------------------

struct ImplicitWindow {
  ConvShape shape;
  int64_t stride[2];  // down and across
  int64_t dilation[2];

  int64_t out_h() const {
    return out_of(shape.h, shape.top, shape.bottom, shape.kernel_h, stride[0], dilation[0]);
  }
  int64_t out_w() const {
    return out_of(shape.w, shape.left, shape.right, shape.kernel_w, stride[1], dilation[1]);
  }
  ImageSize out_size() const { return {shape.samples, shape.outputs, out_h(), out_w()}; }
  int64_t vectors() const {
    return shape.kernel_h * shape.kernel_w * shape.channels / kImplicitVector;
  }
  bool is_one_by_one() const {
    return shape.kernel_h == 1 && shape.kernel_w == 1 && shape.left == 0 && shape.right == 0 &&
           shape.top == 0 && shape.bottom == 0;
  }

 private:
  static int64_t out_of(int64_t size, int64_t before, int64_t after, int64_t kernel, int64_t stride,
                        int64_t dilation) {
    const int64_t spare = size + before + after - dilation * (kernel - 1) - 1;
    return spare < 0 ? 0 : spare / stride + 1;
  }
};

ImplicitWindow window_of(const ConvShape& shape, const std::vector<int64_t>& stride,
                         const std::vector<int64_t>& dilation) {
  STD_TORCH_CHECK(stride.size() == 2 && dilation.size() == 2,
                  "fx_fuser: stride and dilation are pairs");
  return {shape, {stride[0], stride[1]}, {dilation[0], dilation[1]}};
}

// padding: left, right, top, bottom.
ImplicitWindow implicit_window(const Tensor& x, const Tensor& weight,
                               const std::vector<int64_t>& stride,
                               const std::vector<int64_t>& padding,
                               const std::vector<int64_t>& dilation) {
  return window_of(conv_shape_of(x, weight, padding), stride, dilation);
}

// True if the kernel supports these sizes. It counts pixels of the result and vectors of x in 32
// bits.
bool implicit_takes(const ImplicitWindow& window) {
  const ConvShape& s = window.shape;
  const auto is_in = [](int64_t value, int64_t least) {
    return value >= least && value <= kImplicitHighest;
  };
  for (const int64_t size : {s.h, s.w, s.kernel_h, s.kernel_w}) {
    if (!is_in(size, 1)) return false;
  }
  for (const int64_t padding : {s.left, s.right, s.top, s.bottom}) {
    if (!is_in(padding, 0)) return false;
  }
  for (int d = 0; d < 2; ++d) {
    if (!is_in(window.stride[d], 1) || !is_in(window.dilation[d], 1)) return false;
  }
  if (!is_in(window.dilation[0] * (s.kernel_h - 1), 0) ||
      !is_in(window.dilation[1] * (s.kernel_w - 1), 0)) {
    return false;
  }
  constexpr int64_t kMost = (int64_t{1} << 31) - (int64_t{1} << 24);  // with a stride of the grid
  const int64_t plane = window.out_h() * window.out_w();
  return s.samples >= 1 && s.channels >= 1 && s.channels % kImplicitVector == 0 && plane >= 1 &&
         s.outputs >= 1 && s.outputs <= kMost / 8 && s.samples <= kMost / plane &&
         s.channels <= kMost / (s.kernel_h * s.kernel_w) && window.vectors() <= kMost / s.outputs;
}

// Blocks per part of the columns, given how many blocks run at once.
int64_t implicit_workers(int64_t tiles, int64_t parts, int64_t at_once) {
  return std::min(tiles, std::max<int64_t>(at_once / parts, 1));
}

// [stages, keeps its weights, resident, parts, blocks, shared bytes]; empty if the kernel does not
// support these sizes or operands. sizes: as in `conv_shape_of`. operands: leaves and others.
// held: pieces per group of columns. shared_bytes: the most that a block may have.
std::vector<int64_t> implicit_cut(const std::vector<int64_t>& sizes,
                                  const std::vector<int64_t>& stride,
                                  const std::vector<int64_t>& dilation, int64_t columns,
                                  int64_t leaves, int64_t operands, int64_t held,
                                  int64_t multiprocessors, int64_t shared_bytes) {
  const ImplicitWindow window = window_of(conv_shape_of(sizes), stride, dilation);
  if (!implicit_takes(window) || operands > kImplicitMaxOperands ||
      operands - leaves > kImplicitMaxOthers) {
    return {};
  }
  const ImplicitShape shape{static_cast<int>(columns),
                            static_cast<int>(ceil_div(window.vectors(), kImplicitStepVectors)),
                            static_cast<int>(leaves), static_cast<int>(held)};
  const ImplicitGeometry cut = implicit_geometry(
      shape, static_cast<int>(shared_bytes) + kImplicitReserved, kImplicitResident);
  if (cut.resident == 0) return {};
  const int64_t parts = ceil_div(window.shape.outputs, columns);
  const int64_t tiles =
      ceil_div(window.shape.samples * window.out_h() * window.out_w(), kImplicitPixels);
  const int64_t workers = implicit_workers(tiles, parts, cut.resident * multiprocessors);
  return {cut.stages, cut.keeps, cut.resident, parts, workers * parts, cut.shared_bytes};
}

// ---- a call -------------------------------------------------------------------------------------

bool is_aligned(const Tensor& tensor) {
  return reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0;
}

// Sets the strides of x in vectors, for samples, rows and columns. False if channels are not
// adjacent or pixels are not 16-byte aligned.
bool find_x_strides(const Tensor& x, const ImplicitWindow& window, int32_t (&strides)[3]) {
  if (x.stride(1) != 1 || !is_aligned(x)) return false;
  const ConvShape& s = window.shape;
  const int64_t sizes[] = {s.samples, s.h, s.w};
  const int64_t outside[] = {0, s.top + s.bottom, s.left + s.right};
  int64_t extent = window.vectors();
  for (int i = 0; i < 3; ++i) {
    const int64_t stride = sizes[i] == 1 ? 0 : x.stride(i == 0 ? 0 : i + 1);
    if (stride % kImplicitVector != 0) return false;
    const int64_t vectors = stride / kImplicitVector;
    if (vectors > std::numeric_limits<int32_t>::max()) return false;
    // Positions in the padding are counted as well.
    extent += (sizes[i] + outside[i]) * vectors;
    strides[i] = static_cast<int32_t>(vectors);
  }
  return extent < std::numeric_limits<int32_t>::max() / 2;
}

// True if the weights of an output channel are dense [kernel_h][kernel_w][channels].
bool is_weight_taken(const Tensor& weight) {
  const bool one_tap = weight.size(2) == 1 && weight.size(3) == 1;
  return is_aligned(weight) &&
         (is_dense_channels_last(weight) || (one_tap && is_contiguous(weight)));
}

// Chooses how each operand is read: through the ring, as a list of pieces, as long as that has
// room for them, else directly.
class ImplicitOperands {
 public:
  ImplicitOperands(const ImplicitKernels& kernels, const Tensor& out, ImplicitArgs& args)
      : kernels_(kernels), out_(out), args_(args) {
    shape_ = {kernels.columns, args.steps, kernels.leaves, 0};
    cut = geometry(0);
  }

  void add(size_t index, const Tensor& tensor) {
    ImplicitOperand& operand = args_.operand[index];
    operand.of = conv_operand_of(tensor);
    if (index < static_cast<size_t>(kernels_.leaves)) {
      STD_TORCH_CHECK(is_per_channel(tensor), "fx_fuser: operand ", index, " of shape ",
                      to_string(tensor.sizes()), " is not one number per channel");
      return;
    }
    const int bytes = static_cast<int>(tensor.element_size());
    operand.mode = takes_quads(operand.of, bytes, out_.size(1)) ? ImplicitMode::kVectors
                                                                : ImplicitMode::kElements;
    if (!is_like_out(tensor) || (bytes != 2 && bytes != 4)) return;
    int found[kImplicitMaxGroups]{};
    int most = 0;
    for (int group = 0; group < groups(); ++group) {
      found[group] = static_cast<int>(ceil_div(columns_of(group) * bytes, kImplicitRow));
      most = std::max(most, args_.held[group] + found[group]);
    }
    if (most > kImplicitMaxHeld) return;
    const ImplicitGeometry with = geometry(most);
    // Not if the ring's larger slots would cost a resident block.
    if (with.resident < cut.resident) return;
    cut = with;
    operand.mode = ImplicitMode::kRing;
    for (int group = 0; group < groups(); ++group) {
      args_.held[group] += found[group];
      for (int piece = 0; piece < found[group]; ++piece) {
        const int first = piece * kImplicitRow;
        pieces_[group].push_back({tensor.data_ptr(), group * kImplicitGroupColumns * bytes + first,
                                  std::min(kImplicitRow, columns_of(group) * bytes - first),
                                  bytes});
      }
    }
  }

  // Call this after all operands are added.
  void list_pieces() {
    for (const auto& group : pieces_) {
      for (const ImplicitPiece& piece : group) args_.piece[args_.pieces++] = piece;
    }
  }

  ImplicitGeometry cut;

 private:
  int groups() const { return static_cast<int>(ceil_div(kernels_.columns, kImplicitGroupColumns)); }
  int columns_of(int group) const {
    return std::min(kImplicitGroupColumns, kernels_.columns - group * kImplicitGroupColumns);
  }
  ImplicitGeometry geometry(int held) {
    shape_.held = held;
    return implicit_geometry(shape_, kernels_.shared_bytes, kernels_.resident);
  }
  bool is_like_out(const Tensor& tensor) const {
    return tensor.dim() == 4 && is_dense_channels_last(tensor) && is_aligned(tensor) &&
           std::equal(tensor.sizes().begin(), tensor.sizes().end(), out_.sizes().begin()) &&
           out_.size(1) * tensor.element_size() % 16 == 0;
  }

  const ImplicitKernels& kernels_;
  const Tensor& out_;
  ImplicitArgs& args_;
  ImplicitShape shape_{};
  std::vector<ImplicitPiece> pieces_[kImplicitMaxGroups];
};

// The convolution's arguments; std::nullopt if the kernel does not support these shapes or strides.
std::optional<ImplicitArgs> implicit_args(const ImplicitKernels& kernels, const Tensor& x,
                                          const Tensor& weight, const ImplicitWindow& window) {
  const ConvShape& shape = window.shape;
  ImplicitArgs args{};
  const bool is_kernels = kernels.is_window || window.is_one_by_one();
  if (!is_kernels || !implicit_takes(window) || !find_x_strides(x, window, args.x_stride) ||
      !is_weight_taken(weight)) {
    return {};
  }
  args.x = x.data_ptr();
  args.weight = weight.data_ptr();
  args.vectors = static_cast<int32_t>(window.vectors());
  args.steps = static_cast<int32_t>(ceil_div(window.vectors(), kImplicitStepVectors));
  args.outputs = static_cast<int32_t>(shape.outputs);
  args.pixels = static_cast<int32_t>(shape.samples * window.out_h() * window.out_w());
  args.tiles = static_cast<int32_t>(ceil_div(args.pixels, kImplicitPixels));
  args.parts = make_divisor(static_cast<uint32_t>(ceil_div(shape.outputs, kernels.columns)));
  args.out_w = make_divisor(static_cast<uint32_t>(window.out_w()));
  args.out_h = make_divisor(static_cast<uint32_t>(window.out_h()));
  args.channel_vectors = make_divisor(static_cast<uint32_t>(shape.channels / kImplicitVector));
  args.kernel_w = make_divisor(static_cast<uint32_t>(shape.kernel_w));
  args.h = static_cast<int32_t>(shape.h);
  args.w = static_cast<int32_t>(shape.w);
  args.top = static_cast<int32_t>(shape.top);
  args.left = static_cast<int32_t>(shape.left);
  for (int d = 0; d < 2; ++d) {
    args.stride[d] = static_cast<int32_t>(window.stride[d]);
    args.dilation[d] = static_cast<int32_t>(window.dilation[d]);
  }
  args.is_flat = window.is_one_by_one() && window.stride[0] == 1 && window.stride[1] == 1 &&
                 is_dense_channels_last(x);
  if (args.is_flat) args.x_stride[2] = static_cast<int32_t>(shape.channels / kImplicitVector);
  return args;
}

// out = epilogue(conv2d(x, weight)), and c = conv2d(x, weight) if given. Returns false, without a
// launch, if the kernel does not support these shapes or strides.
bool run_implicit(const ImplicitKernels& kernels, const Tensor& x, const Tensor& weight,
                  const ImplicitWindow& window, const Tensor& out, const std::optional<Tensor>& c,
                  const EpilogueArgs& epilogue) {
  auto args = implicit_args(kernels, x, weight, window);
  if (!args) return false;
  const int device = x.get_device_index();
  const auto is_taken = [&](const Tensor& result, const char* name, ScalarType type) {
    check_result(result, name, type, window.out_size(), x, weight);
    return is_dense_channels_last(result);
  };
  if (!is_taken(out, "out", kernels.out) || (c && !is_taken(*c, "c", kernels.x))) return false;
  check_epilogue(kernels, out, epilogue);
  args->out = out.data_ptr();
  args->out_takes_vectors = takes_vectors(out, /*channels_last=*/true);
  args->c = c ? c->data_ptr() : nullptr;
  args->c_takes_vectors = c && takes_vectors(*c, /*channels_last=*/true);
  std::copy(epilogue.scalars.begin(), epilogue.scalars.end(), args->scalar);

  ImplicitOperands found(kernels, out, *args);
  for (size_t i = 0; i < epilogue.tensors.size(); ++i) found.add(i, epilogue.tensors[i]);
  found.list_pieces();
  const ImplicitGeometry& cut = found.cut;
  if (cut.resident == 0) return false;
  args->stages = cut.stages;
  args->stage_bytes = cut.stage_bytes;
  args->kept_at = cut.kept_at;
  args->ring_at = cut.ring_at;
  args->keeps = cut.keeps;
  const int64_t parts = args->parts.size;
  args->workers = static_cast<int32_t>(
      implicit_workers(args->tiles, parts, int64_t{cut.resident} * kernels.multiprocessors));
  LaunchOptions options;
  options.shared_bytes = cut.shared_bytes;
  const OnDevice on_device(device);
  launch(kernels.kernel, args->workers * parts, kImplicitThreads, current_stream(device), *args,
         options);
  return true;
}

std::optional<Made> ImplicitKernels::run(const Conv& conv, const Norm& norm,
                                         const EpilogueArgs& args) const {
  const Tensor& image = conv.x;
  // torch's result is channels_last if x or the weight is.
  const bool channels_last = suggests_channels_last(image) || suggests_channels_last(conv.weight);
  if (norm.training || conv.groups != 1 || !channels_last) return {};
  check_conv(x, image, conv.weight, conv.padding);
  const ImplicitWindow window =
      implicit_window(image, conv.weight, conv.stride, conv.padding, conv.dilation);
  if (!implicit_takes(window)) return {};
  const auto [y, c] = new_results(conv, window.out_size(), channels_last);
  const EpilogueArgs leaves = leaves_of(norm, args);
  if (!run_implicit(*this, image, conv.weight, window, y, c, leaves)) {
    return {};
  }
  return result_of(y, c, norm);
}

}  // namespace
}  // namespace fx_fuser
