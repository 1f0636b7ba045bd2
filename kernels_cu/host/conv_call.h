// The interface of convolution kernels, as the ops call it, and what their files share.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "conv/conv_direct_geometry.h"
#include "conv/conv_operand.h"
#include "host/epilogue_args.h"
#include "host/image.h"
#include "host/made.h"
#include "host/pointwise.h"

namespace fx_fuser {
namespace {

// Arguments of both convolution functions; fx_fuser/ops/library.py documents them.
struct Conv {
  const Tensor& x;
  const Tensor& weight;
  const std::vector<int64_t>& stride;
  const std::vector<int64_t>& padding;  // left, right, top, bottom
  const std::vector<int64_t>& dilation;
  int64_t groups;
  bool tf32;
  const std::vector<std::string>& kernels;
  ScalarType out_type;
  bool save;
};

// What z depends on in addition to the convolution: vectors of O elements, and eps. In training,
// mean and variance are empty until those of the batch are computed.
struct Norm {
  std::optional<Tensor> bias;
  std::optional<Tensor> mean;
  std::optional<Tensor> variance;
  std::optional<Tensor> gamma;
  std::optional<Tensor> beta;
  std::optional<double> eps;
  bool training = false;
};

struct ConvKernel {
  virtual ~ConvKernel() = default;

  // std::nullopt if it does not support these sizes or strides. Wrong dtypes, devices and ranks
  // raise.
  virtual std::optional<Made> run(const Conv& conv, const Norm& norm,
                                  const EpilogueArgs& args) const = 0;
};

// ---- operands -----------------------------------------------------------------------------------

// The vectors that an epilogue may read, in its order; eps follows as a scalar.
struct NormLeaf {
  const char* name;  // in Python
  std::optional<Tensor> Norm::* vector;
};
constexpr NormLeaf kNormLeaves[] = {{"bias", &Norm::bias},
                                    {"mean", &Norm::mean},
                                    {"var", &Norm::variance},
                                    {"gamma", &Norm::gamma},
                                    {"beta", &Norm::beta}};
constexpr const char* kNormNumber = "eps";

// [O] viewed as [O, 1, 1], which broadcasts against [N, O, H, W].
Tensor per_channel(const Tensor& vector) {
  STD_TORCH_CHECK(vector.dim() == 1, "fx_fuser: one number per channel is a vector, not of shape ",
                  to_string(vector.sizes()));
  const std::array<int64_t, 3> sizes{vector.size(0), 1, 1};
  const std::array<int64_t, 3> strides{vector.stride(0), 1, 1};
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(vector.get(), sizes.size(), sizes.data(),
                                                        strides.data(), 0, &made));
  return Tensor(made);
}

// What the epilogue reads in addition to c.
EpilogueArgs leaves_of(const Norm& norm, const EpilogueArgs& args) {
  EpilogueArgs found;
  for (const NormLeaf& leaf : kNormLeaves) {
    const auto& vector = norm.*leaf.vector;
    if (vector) found.tensors.push_back(per_channel(*vector));
  }
  if (norm.eps) found.scalars.push_back(*norm.eps);
  found.tensors.insert(found.tensors.end(), args.tensors.begin(), args.tensors.end());
  found.scalars.insert(found.scalars.end(), args.scalars.begin(), args.scalars.end());
  return found;
}

// A tensor that broadcasts to [N, O, H, W].
ConvOperand conv_operand_of(const Tensor& tensor) {
  ConvOperand operand{};
  operand.data = tensor.data_ptr();
  const int64_t missing = 4 - tensor.dim();
  for (int64_t d = missing; d < 4; ++d) {
    operand.stride[d] = tensor.size(d - missing) == 1 ? 0 : tensor.stride(d - missing);
  }
  operand.per_pixel = operand.stride[2] != 0 || operand.stride[3] != 0;
  return operand;
}

// True if every four channels of a pixel are aligned.
bool takes_quads(const ConvOperand& operand, int64_t bytes, int64_t channels) {
  constexpr int64_t kFour = 4;
  const auto is_whole = [&](int64_t elements) { return elements % kFour == 0; };
  return operand.stride[1] == 1 && is_whole(channels) && is_whole(operand.stride[0]) &&
         is_whole(operand.stride[2]) && is_whole(operand.stride[3]) &&
         reinterpret_cast<uintptr_t>(operand.data) % std::min<int64_t>(kFour * bytes, 16) == 0;
}

// ---- sizes --------------------------------------------------------------------------------------

// [samples, channels, h, w, outputs, kernel h, kernel w, left, right, top, bottom]
ConvShape conv_shape_of(const std::vector<int64_t>& sizes) {
  STD_TORCH_CHECK(sizes.size() == 11, "fx_fuser: a convolution has 11 sizes here, not ",
                  sizes.size());
  return {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5],
          sizes[6], sizes[7], sizes[8], sizes[9], sizes[10]};
}

ConvShape conv_shape_of(const Tensor& x, const Tensor& weight,
                        const std::vector<int64_t>& padding) {
  return {x.size(0),      x.size(1),  x.size(2),  x.size(3),  weight.size(0), weight.size(2),
          weight.size(3), padding[0], padding[1], padding[2], padding[3]};
}

// The direct kernels support nothing else.
bool is_dense_window(const std::vector<int64_t>& stride, const std::vector<int64_t>& dilation,
                     int64_t groups) {
  const auto is_one = [](int64_t value) { return value == 1; };
  return std::all_of(stride.begin(), stride.end(), is_one) &&
         std::all_of(dilation.begin(), dilation.end(), is_one) && groups == 1;
}

bool is_contiguous(const Tensor& tensor) {
  int64_t dense = 1;
  for (int64_t d = tensor.dim() - 1; d >= 0; --d) {
    if (tensor.size(d) != 1 && tensor.stride(d) != dense) return false;
    dense *= tensor.size(d);
  }
  return true;
}

void check_conv(ScalarType type, const Tensor& x, const Tensor& weight,
                const std::vector<int64_t>& padding, int64_t groups = 1) {
  require_cuda(x, "x");
  for (const Tensor& tensor : {x, weight}) {
    STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == x.get_device_index() &&
                        tensor.scalar_type() == type && tensor.dim() == 4,
                    "fx_fuser: this convolution takes x [N, C, H, W] and weight "
                    "[O, C/groups, kh, kw] as ",
                    toString(type), " on one CUDA device");
  }
  STD_TORCH_CHECK(x.size(1) == weight.size(1) * groups, "fx_fuser: x of shape ",
                  to_string(x.sizes()), " does not have the channels of weight ",
                  to_string(weight.sizes()));
  STD_TORCH_CHECK(padding.size() == 4, "fx_fuser: padding is [left, right, top, bottom], not ",
                  to_string(padding));
}

// ---- results ------------------------------------------------------------------------------------

// y and, if c is saved for backward, c.
std::pair<Tensor, std::optional<Tensor>> new_results(const Conv& conv, const ImageSize& size,
                                                     bool channels_last) {
  std::optional<Tensor> c;
  if (conv.save) c = new_image(conv.x, size, conv.x.scalar_type(), channels_last);
  return {new_image(conv.x, size, conv.out_type, channels_last), c};
}

// Raises unless `result` has the convolution's size, type and device.
void check_result(const Tensor& result, const char* name, ScalarType type, const ImageSize& size,
                  const Tensor& x, const Tensor& weight) {
  const auto sizes = result.sizes();
  STD_TORCH_CHECK(result.is_cuda() && result.get_device_index() == x.get_device_index() &&
                      result.scalar_type() == type &&
                      std::equal(size.begin(), size.end(), sizes.begin(), sizes.end()),
                  "fx_fuser: ", name, " of shape ", to_string(sizes), " and ",
                  toString(result.scalar_type()), " does not hold the ", toString(type),
                  " convolution of x ", to_string(x.sizes()), " and weight ",
                  to_string(weight.sizes()), " on cuda:", x.get_device_index());
}

Made result_of(const Tensor& y, const std::optional<Tensor>& c, const Norm& norm) {
  Made made(y, c);
  if (norm.training) made.more.insert(made.more.end(), {*norm.mean, *norm.variance});
  return made;
}

// The epilogue of c as a separate kernel: in place if c is not saved and has y's type.
Made with_epilogue(const Conv& conv, const Norm& norm, EpilogueArgs leaves, const Tensor& c) {
  const auto& epilogue = registry<PointwiseKernels>().at(conv.kernels[0], c.get_device_index());
  leaves.tensors.insert(leaves.tensors.begin(), c);
  const bool in_place = !conv.save && c.scalar_type() == conv.out_type;
  const Tensor y = in_place ? c : new_like(c, conv.out_type);
  run_pointwise(epilogue, y, leaves.tensors, leaves.scalars);
  return result_of(y, conv.save ? std::optional(c) : std::nullopt, norm);
}

}  // namespace
}  // namespace fx_fuser
