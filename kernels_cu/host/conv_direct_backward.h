// Backward of the direct convolution: geometry, checks and launches.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "conv/conv_direct_backward_geometry.h"
#include "host/conv_direct.h"

namespace fx_fuser {
namespace {

struct ConvBackwardKernels : EpilogueTypes {
  Kernel sums;
  Kernel weight;
  Kernel sums_and_weight;
  Kernel reduce_sums;
  Kernel reduce_weight;
  Kernel input;
  int multiprocessors;

  explicit ConvBackwardKernels(const EpilogueTypes& types) : EpilogueTypes(types) {}
};

int64_t load_conv_direct_backward(const Sources& from) {
  const Signature types(from);
  types.check_operands(kConvMaxOperands);
  Library library = load_library(from.cubins.at(0));
  const auto kernel = [&](const char* suffix, int shared_bytes = 0) {
    return get_kernel(library, std::string("fx_fuser_conv_direct_") + suffix, shared_bytes);
  };
  auto kernels = std::make_unique<ConvBackwardKernels>(types);
  kernels->sums = kernel("sums", kConvMaxShared);
  kernels->weight = kernel("weight", kConvMaxShared);
  kernels->sums_and_weight = kernel("sums_and_weight", kConvMaxShared);
  kernels->reduce_sums = kernel("reduce_sums");
  kernels->reduce_weight = kernel("reduce_weight");
  kernels->input = kernel("input", kConvMaxShared);
  kernels->multiprocessors = multiprocessors_of(from.device);
  return keep<ConvBackwardKernels>(from, std::move(kernels));
}
const AddLoader kConvDirectBackwardLoader("conv_direct_backward", load_conv_direct_backward);

// How the input's gradient is divided into pieces: [units, units per sample, pieces per sample,
// units per piece, units ahead, slots, shared bytes, halo]; without it [units, units per sample].
// Empty if the kernels do not support the sizes.
std::vector<int64_t> conv_direct_backward_cut(const std::vector<int64_t>& sizes, int64_t x_bytes,
                                              bool with_input, int64_t multiprocessors) {
  const auto args = conv_backward_geometry(conv_shape_of(sizes), static_cast<int>(x_bytes),
                                           with_input, multiprocessors);
  if (!args) return {};
  std::vector<int64_t> cut{args->conv.units, args->conv.units_per_strip.size};
  if (with_input) {
    ConvDirectArgs conv = args->conv;
    conv.slots = args->input_slots;
    cut.insert(cut.end(), {args->sample_pieces, args->piece_units, args->units_ahead, conv.slots,
                           conv_input_bytes(conv), conv_halo(conv)});
  }
  return cut;
}

// Where the gradients go. dbeta and dgamma are always computed: the sums over each channel of dz,
// and of dz times the normalised c.
struct ConvGradients {
  std::optional<Tensor> dx;
  std::optional<Tensor> dweight;
  std::optional<Tensor> dbias;  // not in training: it is zero there
  Tensor dgamma;
  Tensor dbeta;
};

// Their data; null if not requested.
struct ConvGradientPlaces {
  float* dweight;
  float* dbias;
  float* dgamma;
  float* dbeta;
};

// Returns whether the tensor is contiguous. Raises if its type or device is wrong.
bool check_gradient(const Tensor& tensor, int device, const char* name, ScalarType type) {
  STD_TORCH_CHECK(
      tensor.is_cuda() && tensor.get_device_index() == device && tensor.scalar_type() == type,
      "fx_fuser: ", name, " must be of ", toString(type), " on cuda:", device);
  return is_contiguous(tensor);
}

// The data of a vector with one number per output channel of the weight.
float* vector_of(const Tensor& tensor, const Tensor& weight, const char* name) {
  const bool fits = check_gradient(tensor, weight.get_device_index(), name, ScalarType::Float) &&
                    tensor.dim() == 1 && tensor.size(0) == weight.size(0);
  STD_TORCH_CHECK(fits, "fx_fuser: ", name, " of shape ", to_string(tensor.sizes()),
                  " is not a contiguous vector of ", weight.size(0));
  return static_cast<float*>(tensor.data_ptr());
}

// The data of a contiguous tensor with the sizes of `like`.
void* image_of(const Tensor& tensor, const Tensor& like, const char* name, ScalarType type) {
  bool fits = check_gradient(tensor, like.get_device_index(), name, type) && tensor.dim() == 4;
  for (int d = 0; fits && d < 4; ++d) fits = tensor.size(d) == like.size(d);
  STD_TORCH_CHECK(fits, "fx_fuser: ", name, " of shape ", to_string(tensor.sizes()),
                  " is not a contiguous tensor of shape ", to_string(like.sizes()));
  return tensor.data_ptr();
}

void check_backward(const ConvDirectArgs& conv, const Tensor& dy, const Tensor& x,
                    const Tensor& weight, const Norm& norm, const ConvGradients& to) {
  STD_TORCH_CHECK(dy.dim() == 4 && dy.size(0) == conv.samples && dy.size(1) == conv.outputs &&
                      dy.size(2) == conv.out_h && dy.size(3) == conv.out_w,
                  "fx_fuser: dy of shape ", to_string(dy.sizes()),
                  " does not have the sizes of the convolution of x ", to_string(x.sizes()),
                  " and weight ", to_string(weight.sizes()));
  STD_TORCH_CHECK(
      norm.mean.has_value() == norm.variance.has_value() && (norm.variance || !norm.gamma),
      "fx_fuser: normalisation needs a mean and a variance");
  STD_TORCH_CHECK(!norm.training || (norm.variance && !norm.bias && !to.dbias),
                  "fx_fuser: in training there is a mean and a variance, and no bias");
}

// Sets what the epilogue reads. False if an operand is not one number per channel.
bool set_epilogue(ConvDirectArgs& conv, const EpilogueArgs& epilogue) {
  for (size_t i = 0; i < epilogue.tensors.size(); ++i) {
    if (!is_per_channel(epilogue.tensors[i])) return false;
    conv.operand[i] = conv_operand_of(epilogue.tensors[i]);
  }
  std::copy(epilogue.scalars.begin(), epilogue.scalars.end(), conv.scalar);
  return true;
}

void set_norm(ConvBackwardArgs& args, const Norm& norm, const Tensor& weight) {
  if (norm.variance) {
    args.mean = vector_of(*norm.mean, weight, "mean");
    args.variance = vector_of(*norm.variance, weight, "variance");
    args.eps = static_cast<float>(*norm.eps);
    if (norm.bias) args.bias = vector_of(*norm.bias, weight, "bias");
  }
  if (norm.gamma) args.gamma = vector_of(*norm.gamma, weight, "gamma");
}

// Launches `kernel`, which computes partial sums per split, and the kernels that add them up.
// options: of `kernel`'s launch; updated for the launches that follow.
void accumulate(const ConvBackwardKernels& kernels, Kernel kernel, bool with_sums, bool with_weight,
                const Tensor& x, const ConvGradientPlaces& to, ConvBackwardArgs& args,
                LaunchOptions& options, const Stream& stream) {
  const ConvDirectArgs& conv = args.conv;
  const int64_t parts = int64_t{conv.groups} * (with_weight ? args.tap_groups : 1);
  const int64_t of_part = std::max<int64_t>(kernels.multiprocessors / parts, 1);
  const int64_t blocks = std::min<int64_t>(of_part, conv.units) * parts;
  const int workers = with_weight ? kConvWeightWorkers : kConvSumWorkers;
  const int64_t splits = workers * blocks / parts;
  const int64_t outputs = conv.outputs;
  const int64_t values = outputs * conv.channels * conv.kernel_h * conv.kernel_w;
  std::optional<Tensor> sums;
  std::optional<Tensor> partial;
  if (with_sums) {
    sums = new_dense(x, {splits, 2, outputs}, ScalarType::Double);
    args.sums = static_cast<double*>(sums->data_ptr());
  }
  if (with_weight) {
    partial = new_dense(x, {splits, values}, ScalarType::Float);
    args.dweight = static_cast<float*>(partial->data_ptr());
  }
  launch(kernel, blocks, conv_accumulate_threads(workers), stream, args, options);
  options.dependent = true;  // for all launches that follow
  const auto reduce = [&](Kernel by, const ReduceArgs& of) {
    LaunchOptions dependent;
    dependent.dependent = true;
    launch(by, ceil_div(of.values, kConvReduceValues), kConvReduceThreads, stream, of, dependent);
  };
  if (with_sums) {
    reduce(kernels.reduce_sums, {args.sums, to.dbeta, to.dgamma, 2 * outputs, outputs, splits,
                                 to.dbias, args.variance, args.gamma, args.eps});
  }
  if (with_weight) {
    reduce(kernels.reduce_weight, {args.dweight, to.dweight, nullptr, values, values, splits});
  }
}

void launch_backward(const ConvBackwardKernels& kernels, bool training, const Tensor& x,
                     const ConvGradientPlaces& to, ConvBackwardArgs& args) {
  const OnDevice on_device(x.get_device_index());
  const Stream stream = current_stream(x.get_device_index());
  ConvDirectArgs& conv = args.conv;
  LaunchOptions options;
  options.shared_bytes = conv_accumulate_bytes(conv);
  if (training || to.dweight == nullptr) {
    accumulate(kernels, kernels.sums, true, false, x, to, args, options, stream);
    if (training) {
      args.dgamma = to.dgamma;
      args.dbeta = to.dbeta;
    }
    if (to.dweight != nullptr) {
      accumulate(kernels, kernels.weight, false, true, x, to, args, options, stream);
    }
  } else {
    accumulate(kernels, kernels.sums_and_weight, true, true, x, to, args, options, stream);
  }
  if (args.dx == nullptr) return;
  conv.slots = args.input_slots;
  options.shared_bytes = conv_input_bytes(conv);
  const int64_t blocks = std::min<int64_t>(args.pieces, kernels.multiprocessors);
  for (args.group = 0; args.group < conv.groups; ++args.group) {
    launch(kernels.input, blocks, kConvInputThreads, stream, args, options);
  }
}

// Gradients of y = epilogue(z), z = gamma (c + bias - mean) / √(variance + eps) + beta and
// c = conv2d(x, weight). The epilogue is linear in z, and its operands are one number per channel.
// Without a variance, z = c + bias. In training mean and variance are those of c. x, weight, dy and
// dx have one type, all else is float32. Returns false, without a launch, if the kernels do not
// support these shapes or strides.
bool run_conv_direct_backward(const ConvBackwardKernels& kernels, const Tensor& dy, const Tensor& x,
                              const Tensor& weight, const std::vector<int64_t>& padding,
                              const Norm& norm, const ConvGradients& to,
                              const EpilogueArgs& epilogue) {
  check_conv(kernels.x, x, weight, padding);
  if (!check_gradient(dy, x.get_device_index(), "dy", kernels.x)) return false;
  if (!is_contiguous(x) || !is_contiguous(weight)) return false;
  auto args =
      conv_backward_geometry(conv_shape_of(x, weight, padding), static_cast<int>(x.element_size()),
                             to.dx.has_value(), kernels.multiprocessors);
  if (!args) return false;
  ConvDirectArgs& conv = args->conv;
  check_backward(conv, dy, x, weight, norm, to);
  check_epilogue(kernels, dy, epilogue);
  if (!set_epilogue(conv, epilogue)) return false;
  conv.x = x.data_ptr();
  conv.weight = weight.data_ptr();
  args->dy = dy.data_ptr();
  set_norm(*args, norm, weight);
  ConvGradientPlaces places{};
  places.dgamma = vector_of(to.dgamma, weight, "dgamma");
  places.dbeta = vector_of(to.dbeta, weight, "dbeta");
  if (to.dbias) places.dbias = vector_of(*to.dbias, weight, "dbias");
  if (to.dx) args->dx = image_of(*to.dx, x, "dx", kernels.x);
  if (to.dweight) {
    places.dweight =
        static_cast<float*>(image_of(*to.dweight, weight, "dweight", ScalarType::Float));
  }
  const bool even = conv.strip.size % 2 == 0 && conv.kernel_w % 2 == 1;
  args->pairs = even && conv.strips.size == 1 &&
                reinterpret_cast<uintptr_t>(dy.data_ptr()) % (2 * dy.element_size()) == 0;
  launch_backward(kernels, norm.training, x, places, *args);
  return true;
}

}  // namespace
}  // namespace fx_fuser
