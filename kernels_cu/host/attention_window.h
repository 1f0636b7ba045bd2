// 16-bit attention of windows with a bias, and its backward: which tensors, launches.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "attention/attention_window_args.h"
#include "host/attention_bias.h"

namespace fx_fuser {
namespace {

struct AttentionWindowKernels {
  Kernel kernel;
  WindowShape shape;
  ScalarType type;
  int64_t multiprocessors;
};

struct AttentionWindowBackwardKernels : AttentionWindowKernels {
  Kernel sum;
};

template <class Kernels>
std::unique_ptr<Kernels> window_kernels(const Sources& from) {
  const Signature types(from, 1);
  types.check_operands(0);
  const int shape = types.sizes[0];
  STD_TORCH_CHECK(shape >= 0 && shape < kWindowShapeCount, "fx_fuser: there is no shape ", shape,
                  " of attention of windows");
  auto kernels = std::make_unique<Kernels>();
  kernels->shape = kWindowShapes[shape];
  kernels->type = types.x;
  kernels->multiprocessors = multiprocessors_of(from.device);
  return kernels;
}

int64_t load_attention_window(const Sources& from) {
  auto kernels = window_kernels<AttentionWindowKernels>(from);
  kernels->kernel = get_kernel(load_library(from.cubins.at(0)), "fx_fuser_attention_window",
                               kernels->shape.forward_bytes());
  return keep<AttentionWindowKernels>(from, std::move(kernels));
}
const AddLoader kAttentionWindowLoader("attention_window", load_attention_window);

int64_t load_attention_window_backward(const Sources& from) {
  auto kernels = window_kernels<AttentionWindowBackwardKernels>(from);
  const Library library = load_library(from.cubins.at(0));
  kernels->kernel =
      get_kernel(library, "fx_fuser_attention_window_backward", kernels->shape.backward_bytes());
  kernels->sum = get_kernel(library, "fx_fuser_attention_window_sum");
  return keep<AttentionWindowBackwardKernels>(from, std::move(kernels));
}
const AddLoader kAttentionWindowBackwardLoader("attention_window_backward",
                                               load_attention_window_backward);

// What forward and backward read.
struct AttentionWindowCall {
  const Tensor& q;
  const Tensor& k;
  const Tensor& v;
  const Tensor& bias;  // [period, head, query, key] of fp32, of any strides
  double scale;
  bool is_safe;  // a row that sees nothing is 0, not NaN

  void check(ScalarType type) const {
    check_heads_of(type, {{&q, "q"}, {&k, "k"}, {&v, "v"}});
    check_heads_of(ScalarType::Float, {{&bias, "bias"}});
    bool fits = v.sizes().equals(k.sizes()) && k.size(3) == q.size(3) && bias.size(0) > 0 &&
                q.size(0) % bias.size(0) == 0 && bias.size(1) == q.size(1) &&
                bias.size(2) == q.size(2) && bias.size(3) == k.size(2);
    for (int64_t d = 0; d < 2; ++d) fits = fits && k.size(d) == q.size(d);
    STD_TORCH_CHECK(fits, "fx_fuser: attention of q ", to_string(q.sizes()), ", k ",
                    to_string(k.sizes()), ", v ", to_string(v.sizes()), " with a bias ",
                    to_string(bias.sizes()));
  }

  bool is_taken(const WindowShape& shape, std::initializer_list<const Tensor*> others) const {
    const int64_t d = q.size(3);
    const auto is_short = [](int64_t rows) { return 0 < rows && rows <= kWindowRows; };
    if (d > shape.d || d % 8 != 0 || d == 0 || !std::isfinite(scale)) return false;
    if (!is_short(q.size(2)) || !is_short(k.size(2))) return false;
    // Heads of all batches are counted in 32 bits, and so are blocks, at most as many.
    constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - (1 << 16);
    if (q.size(0) == 0 || q.size(1) == 0 || q.size(0) > kMost / q.size(1)) return false;
    for (const Tensor* tensor : {&q, &k, &v}) {
      if (!has_boxes(*tensor)) return false;
    }
    for (const Tensor* tensor : others) {
      if (!has_boxes(*tensor)) return false;
    }
    return true;
  }

  int64_t slots() const { return bias.size(0) * bias.size(1); }
  int64_t shares() const { return q.size(0) / bias.size(0); }
  // Of the batches that share a bias, how many a block has, so that all blocks are resident at once
  // if there are enough.
  int64_t chunk(int64_t resident) const {
    const int64_t chunks = std::max<int64_t>(resident / slots(), 1);
    return ceil_div(shares(), chunks);
  }

  WindowArgs args(int64_t chunk) const {
    WindowArgs args{};
    args.q = bias_rows(q);
    args.k = bias_rows(k);
    args.v = bias_rows(v);
    args.bias = static_cast<const float*>(bias.data_ptr());
    for (int64_t d = 0; d < 4; ++d) args.bias_stride[d] = bias.stride(d);
    args.scale = static_cast<float>(scale);
    using Limits = std::numeric_limits<float>;
    args.least = is_safe ? Limits::lowest() : -Limits::infinity();
    args.d = static_cast<int32_t>(q.size(3));
    args.queries = static_cast<int32_t>(q.size(2));
    args.keys = static_cast<int32_t>(k.size(2));
    args.heads = static_cast<int32_t>(q.size(1));
    args.period = static_cast<int32_t>(bias.size(0));
    args.shares = static_cast<int32_t>(shares());
    args.chunk = static_cast<int32_t>(chunk);
    return args;
  }
};

// out = softmax(scale · q kᵀ + bias of the batch modulo the period) v.
// Returns false, and launches nothing, if the kernel does not take these tensors.
bool run_attention_window(const AttentionWindowKernels& kernels, const AttentionWindowCall& call,
                          const Tensor& out) {
  call.check(kernels.type);
  if (!call.is_taken(kernels.shape, {&out})) return false;
  const int device = out.get_device_index();
  const OnDevice on_device(device);
  const int64_t chunk = call.chunk(kernels.multiprocessors * kernels.shape.forward_resident);
  WindowArgs args = call.args(chunk);
  args.out = bias_rows(out);
  LaunchOptions options;
  options.shared_bytes = kernels.shape.forward_bytes();
  launch(kernels.kernel, ceil_div(call.shares(), chunk) * call.slots(), kWindowThreads,
         current_stream(device), args, options);
  return true;
}

struct AttentionWindowGradients {
  const Tensor& d_out;
  const Tensor& d_q;
  const Tensor& d_k;
  const Tensor& d_v;
  const std::optional<Tensor>& d_bias;  // of the bias's sizes, dense
};

// The gradients of `run_attention_window`'s out, likewise. Deterministic.
bool run_attention_window_backward(const AttentionWindowBackwardKernels& kernels,
                                   const AttentionWindowCall& call,
                                   const AttentionWindowGradients& given) {
  call.check(kernels.type);
  check_heads_of(kernels.type, {{&given.d_out, "d_out"}});
  STD_TORCH_CHECK(given.d_out.sizes().equals(call.q.sizes()),
                  "fx_fuser: the gradient of attention's result is not of q's sizes");
  if (!call.is_taken(kernels.shape, {&given.d_out, &given.d_q, &given.d_k, &given.d_v})) {
    return false;
  }
  const int device = call.q.get_device_index();
  const OnDevice on_device(device);
  const int64_t chunk = call.chunk(kernels.multiprocessors * kernels.shape.backward_resident);
  const int64_t chunks = ceil_div(call.shares(), chunk);
  WindowArgs args = call.args(chunk);
  args.d_out = bias_rows(given.d_out);
  args.out = bias_rows(given.d_q);
  args.d_k = bias_rows(given.d_k);
  args.d_v = bias_rows(given.d_v);
  std::optional<Tensor> parts;
  if (given.d_bias && chunks > 1) {
    parts = new_dense(call.q, {chunks, given.d_bias->numel()}, ScalarType::Float);
  }
  if (given.d_bias) {
    args.d_bias = static_cast<float*>((parts ? *parts : *given.d_bias).data_ptr());
  }
  LaunchOptions options;
  options.shared_bytes = kernels.shape.backward_bytes();
  const auto stream = current_stream(device);
  launch(kernels.kernel, chunks * call.slots(), kWindowThreads, stream, args, options);
  if (!parts) return true;
  WindowSumArgs sum{};
  sum.from = args.d_bias;
  sum.to = static_cast<float*>(given.d_bias->data_ptr());
  sum.count = given.d_bias->numel();
  sum.chunks = static_cast<int32_t>(chunks);
  launch(kernels.sum, ceil_div(sum.count, int64_t{kWindowSumColumns}),
         kWindowSumColumns * kWindowSumRows, stream, sum);
  return true;
}

}  // namespace
}  // namespace fx_fuser
