// The convolution of a first layer (stem.cuh): tiling and launch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "conv/stem_args.h"
#include "host/conv_call.h"
#include "host/image.h"
#include "host/kernel.h"

namespace fx_fuser {
namespace {

struct StemKernels : ConvKernel, EpilogueTypes {
  Kernel channels_last;
  Kernel contiguous;
  int resident[2];  // blocks per multiprocessor: contiguous, channels_last
  int multiprocessors;
  StemShape shape;
  StemGeometry geometry;

  explicit StemKernels(const EpilogueTypes& types) : EpilogueTypes(types) {}

  std::optional<Made> run(const Conv& conv, const Norm& norm,
                          const EpilogueArgs& args) const override;
};

int64_t load_stem(const Sources& from) {
  const Signature types(from, 5);
  auto kernels = std::make_unique<StemKernels>(types);
  const auto& size = types.sizes;
  kernels->shape = {size[0], size[1], size[2], size[3], size[4]};
  const int x_bytes = kernels->x == ScalarType::Float ? 4 : 2;
  kernels->geometry =
      stem_geometry(kernels->shape, x_bytes, static_cast<int>(kernels->operands.size()));
  kernels->multiprocessors = multiprocessors_of(from.device);
  const int shared_bytes = kernels->geometry.shared_bytes;
  Library library = load_library(from.cubins.at(0));
  kernels->channels_last = get_kernel(library, "fx_fuser_stem_channels_last", shared_bytes);
  kernels->contiguous = get_kernel(library, "fx_fuser_stem_contiguous", shared_bytes);
  for (const bool is_last : {false, true}) {
    check(driver().OccupancyMaxActiveBlocksPerMultiprocessor(
              &kernels->resident[is_last], is_last ? kernels->channels_last : kernels->contiguous,
              kStemThreads, shared_bytes),
          "cuOccupancyMaxActiveBlocksPerMultiprocessor");
  }
  return keep<ConvKernel>(from, std::move(kernels));
}
const AddLoader kStemLoader("stem", load_stem);

// For tests. sizes: [channels, kernel h, kernel w, stride, output channels]. Returns [tiles,
// groups, parts, a warp's rows, bytes of shared memory]; empty if no kernel supports it.
std::vector<int64_t> stem_cut(const std::vector<int64_t>& sizes, int64_t x_bytes,
                              int64_t operands) {
  STD_TORCH_CHECK(sizes.size() == 5, "fx_fuser: a stem has 5 sizes here, not ", sizes.size());
  const auto size = [&](int i) { return static_cast<int>(sizes[i]); };
  const StemShape shape{size(0), size(1), size(2), size(3), size(4)};
  if (!stem_takes(shape) || operands > kStemMaxOperands) return {};
  const StemGeometry cut =
      stem_geometry(shape, static_cast<int>(x_bytes), static_cast<int>(operands));
  return {cut.tiles, cut.groups, cut.parts, cut.warp_rows, cut.shared_bytes};
}

// A call that the kernels support.
struct StemCall {
  StemArgs args;
  ImageSize size;      // of the result
  bool channels_last;  // as torch's own convolution lays the result out
};

// True if the rows of x can be copied to shared memory unchanged, in 16-byte vectors.
bool copies_vectors(const Tensor& x, int channels, int width) {
  const auto is_whole = [&](int64_t elements) { return elements % width == 0; };
  return (channels == 1 || x.stride(1) == 1) && (x.size(3) == 1 || x.stride(3) == channels) &&
         is_whole(x.size(3) * channels) && (x.size(2) == 1 || is_whole(x.stride(2))) &&
         (x.size(0) == 1 || is_whole(x.stride(0))) &&
         reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0;
}

// padding: left, right, top, bottom. std::nullopt if the kernels do not support the call.
std::optional<StemCall> stem_call(const StemKernels& kernels, const Tensor& x, const Tensor& weight,
                                  const std::vector<int64_t>& stride,
                                  const std::vector<int64_t>& padding) {
  check_conv(kernels.x, x, weight, padding);
  const StemShape& shape = kernels.shape;
  const StemGeometry& cut = kernels.geometry;
  if (weight.size(0) != shape.outputs || weight.size(1) != shape.channels ||
      weight.size(2) != shape.kernel_h || weight.size(3) != shape.kernel_w || stride.size() != 2 ||
      stride[0] != shape.stride || stride[1] != shape.stride) {
    return {};
  }
  const int64_t height = x.size(2) + padding[2] + padding[3];
  const int64_t width = x.size(3) + padding[0] + padding[1];
  const int64_t highest = std::max(height, width * shape.channels);
  if (x.numel() == 0 || *std::min_element(padding.begin(), padding.end()) < 0 ||
      height < shape.kernel_h || width < shape.kernel_w || highest > kStemHighest) {
    return {};
  }
  StemCall call{};
  call.channels_last = suggests_channels_last(x) || suggests_channels_last(weight);
  call.size = {x.size(0), weight.size(0), (height - shape.kernel_h) / shape.stride + 1,
               (width - shape.kernel_w) / shape.stride + 1};
  const int64_t tiles_x = ceil_div(call.size[3], kStemColumns);
  const int64_t tiles_y = ceil_div(call.size[2], cut.rows());
  if (call.size[0] > kStemHighest / (tiles_x * tiles_y)) return {};
  StemArgs& args = call.args;
  args.x = x.data_ptr();
  args.weight = weight.data_ptr();
  for (int d = 0; d < 4; ++d) {
    args.x_stride[d] = x.stride(d);
    args.weight_stride[d] = weight.stride(d);
  }
  args.h = static_cast<int32_t>(x.size(2));
  args.w = static_cast<int32_t>(x.size(3));
  args.out_h = static_cast<int32_t>(call.size[2]);
  args.out_w = static_cast<int32_t>(call.size[3]);
  args.top = static_cast<int32_t>(padding[2]);
  args.left = static_cast<int32_t>(padding[0]);
  args.tiles_x = static_cast<int32_t>(tiles_x);
  args.tiles_y = static_cast<int32_t>(tiles_y);
  args.tiles = static_cast<int32_t>(call.size[0] * tiles_x * tiles_y);
  args.copies_vectors = copies_vectors(x, shape.channels, cut.vector);
  // Elements between the vector boundary ahead of a tile and its first element.
  const int64_t into = padding[0] * shape.channels % cut.vector;
  args.delta = args.copies_vectors ? static_cast<int32_t>((cut.vector - into) % cut.vector) : 0;
  return call;
}

// c = conv2d(x, weight) and out = epilogue(c), whose operands are one number per channel or a
// single number. Either may be absent.
void run_stem(const StemKernels& kernels, const StemCall& call, const std::optional<Tensor>& out,
              const std::optional<Tensor>& c, const EpilogueArgs& epilogue) {
  StemArgs args = call.args;
  int device = 0;
  const auto place_of = [&](const Tensor& result, const char* name, ScalarType type) {
    require_cuda(result, name);
    const auto sizes = result.sizes();
    STD_TORCH_CHECK(
        result.scalar_type() == type && result.dim() == 4 &&
            std::equal(call.size.begin(), call.size.end(), sizes.begin()) &&
            (call.channels_last ? is_dense_channels_last(result) : is_contiguous(result)),
        "fx_fuser: ", name, " of ", toString(result.scalar_type()), ", shape ", to_string(sizes),
        " and strides ", to_string(result.strides()), " does not hold the convolution, ",
        to_string(call.size), " of ", toString(type),
        call.channels_last ? " in channels_last" : "");
    device = result.get_device_index();
    return result.data_ptr();
  };
  if (c) {
    args.c = place_of(*c, "c", kernels.x);
    args.c_takes_vectors = takes_vectors(*c, call.channels_last);
  }
  if (out) {
    args.out = place_of(*out, "out", kernels.out);
    args.out_takes_vectors = takes_vectors(*out, call.channels_last);
    check_epilogue(kernels, *out, epilogue);
    for (size_t i = 0; i < epilogue.tensors.size(); ++i) {
      const Tensor& operand = epilogue.tensors[i];
      STD_TORCH_CHECK(is_per_channel(operand), "fx_fuser: operand ", i, " of shape ",
                      to_string(operand.sizes()), " is not one number per channel");
      args.operand[i] = {operand.data_ptr(), {conv_operand_of(operand).stride[1]}};
    }
    std::copy(epilogue.scalars.begin(), epilogue.scalars.end(), args.scalar);
  }
  const int parts = kernels.geometry.parts;
  const int64_t at_once = int64_t{kernels.resident[call.channels_last]} * kernels.multiprocessors;
  const int64_t blocks = std::min<int64_t>(args.tiles, std::max<int64_t>(at_once / parts, 1));
  LaunchOptions options;
  options.shared_bytes = kernels.geometry.shared_bytes;
  const OnDevice on_device(device);
  launch(call.channels_last ? kernels.channels_last : kernels.contiguous, blocks * parts,
         kStemThreads, current_stream(device), args, options);
}

// If an operand is not per channel, the kernel computes c and the epilogue is a separate kernel.
std::optional<Made> StemKernels::run(const Conv& conv, const Norm& norm,
                                     const EpilogueArgs& args) const {
  const std::vector<int64_t> none{1, 1};
  if (norm.training || conv.groups != 1 || conv.dilation != none) return {};
  const auto call = stem_call(*this, conv.x, conv.weight, conv.stride, conv.padding);
  if (!call) return {};
  const EpilogueArgs leaves = leaves_of(norm, args);
  const auto& read = leaves.tensors;
  const bool applies = std::all_of(read.begin(), read.end(), is_per_channel);
  std::optional<Tensor> c;
  if (conv.save || !applies) c = new_image(conv.x, call->size, x, call->channels_last);
  if (!applies) {
    run_stem(*this, *call, std::nullopt, c, {});
    return with_epilogue(conv, norm, leaves, *c);
  }
  const Tensor y = new_image(conv.x, call->size, conv.out_type, call->channels_last);
  run_stem(*this, *call, y, c, leaves);
  return result_of(y, c, norm);
}

}  // namespace
}  // namespace fx_fuser
