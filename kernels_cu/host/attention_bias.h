// Attention with 16-bit operands and a bias: checks, tensor maps, launch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "attention/attention_bias_args.h"
#include "host/attention_split.h"

namespace fx_fuser {
namespace {

struct AttentionBiasKernels {
  Kernel kernel;
  BiasShape shape;
  ScalarType type;
  int64_t multiprocessors;
};

// A kernel's shape and type, from its signature.
template <class Kernels>
std::unique_ptr<Kernels> bias_kernels(const Sources& from) {
  const Signature types(from, 1);
  types.check_operands(0);
  const int shape = types.sizes[0];
  STD_TORCH_CHECK(shape >= 0 && shape < kBiasShapeCount, "fx_fuser: there is no shape ", shape,
                  " of attention with a bias");
  auto kernels = std::make_unique<Kernels>();
  kernels->shape = kBiasShapes[shape];
  kernels->type = types.x;
  kernels->multiprocessors = multiprocessors_of(from.device);
  return kernels;
}

int64_t load_attention_bias(const Sources& from) {
  auto kernels = bias_kernels<AttentionBiasKernels>(from);
  kernels->kernel = get_kernel(load_library(from.cubins.at(0)), "fx_fuser_attention_bias",
                               kernels->shape.forward.shared_bytes());
  return keep<AttentionBiasKernels>(from, std::move(kernels));
}
const AddLoader kAttentionBiasLoader("attention_bias", load_attention_bias);

// True if TMA can load boxes of the tensor. expanded: how many leading dimensions may have stride
// 0; the map has size 1 there.
bool has_boxes(const Tensor& tensor, int64_t expanded = 0) {
  if (!is_aligned(tensor.data_ptr()) || stride_along(tensor, 3) != 1) return false;
  constexpr int64_t kVector = 8;
  for (int64_t d = 0; d < 3; ++d) {
    const int64_t stride = tensor.stride(d);
    const bool is_there = stride > 0 || (stride == 0 && d < expanded);
    if (tensor.size(d) > 1 && (!is_there || stride % kVector != 0)) return false;
  }
  return true;
}

// A dimension's size in memory: 1 if it is expanded.
int64_t size_in_memory(const Tensor& tensor, int64_t d) {
  return tensor.stride(d) == 0 ? 1 : tensor.size(d);
}

TensorMap map_of_boxes(const Tensor& tensor) {
  std::array<uint64_t, 4> sizes{};
  std::array<uint64_t, 3> strides{};
  for (int64_t d = 0; d < 4; ++d) {
    sizes[d] = static_cast<uint64_t>(d < 2 ? tensor.size(3 - d) : size_in_memory(tensor, 3 - d));
  }
  for (int64_t d = 0; d < 3; ++d) {
    // The stride of a single line is never used, but must be valid for TMA.
    const bool is_single = sizes[d + 1] == 1;
    strides[d] = is_single ? 16 : static_cast<uint64_t>(tensor.stride(2 - d)) * 2;
  }
  return tensor_map<4>(kMapFloat16, tensor.data_ptr(), sizes, strides, {kBiasBox, kBiasBox, 1, 1});
}

BiasRows bias_rows(const Tensor& tensor) {
  return {tensor.data_ptr(), tensor.stride(0), tensor.stride(1), tensor.stride(2)};
}

void check_heads_of(ScalarType type,
                    std::initializer_list<std::pair<const Tensor*, const char*>> tensors) {
  for (const auto& [tensor, name] : tensors) {
    require_cuda(*tensor, name);
    STD_TORCH_CHECK(tensor->dim() == 4 && tensor->scalar_type() == type, "fx_fuser: ", name,
                    " of attention with a bias has not four dimensions of the kernel's type");
  }
}

// The inputs of forward and backward.
struct AttentionBiasCall {
  const Tensor& q;
  const Tensor& k;
  const Tensor& v;
  const Tensor& bias;  // [batch, head, query, key]; the first two may be expanded, or 1
  double scale;
  bool is_causal;
  DropoutOfWeights dropout{};
  bool alone = false;  // no clusters of blocks

  int64_t all_heads() const { return q.size(0) * q.size(1); }

  void check(ScalarType type) const {
    check_heads_of(type, {{&q, "q"}, {&k, "k"}, {&v, "v"}, {&bias, "bias"}});
    bool fits = v.sizes().equals(k.sizes()) && k.size(3) == q.size(3);
    const int64_t wanted[] = {q.size(0), q.size(1), q.size(2), k.size(2)};
    for (int64_t d = 0; d < 4; ++d) {
      fits = fits && bias.dim() == 4 && (bias.size(d) == wanted[d] || (d < 2 && bias.size(d) == 1));
    }
    for (int64_t d = 0; d < 2; ++d) fits = fits && k.size(d) == q.size(d);
    STD_TORCH_CHECK(fits, "fx_fuser: attention of q ", to_string(q.sizes()), ", k ",
                    to_string(k.sizes()), ", v ", to_string(v.sizes()), " with a bias ",
                    to_string(bias.sizes()));
  }

  void check_lse(const Tensor& lse) const {
    require_cuda(lse, "lse");
    const bool is_of_heads = lse.dim() == 3 && lse.is_contiguous() &&
                             lse.scalar_type() == ScalarType::Float && lse.size(0) == q.size(0) &&
                             lse.size(1) == q.size(1);
    STD_TORCH_CHECK(
        is_of_heads && lse.size(2) >= q.size(2) && lse.size(2) <= padded_lse(q.size(2)),
        "fx_fuser: lse of attention is not [batch, head, query] of float32, with at most ",
        "the queries to a multiple of ", kLseRows);
  }

  // others: tensors whose rows are written, or read in vectors.
  bool is_taken(int64_t d_of_shape, std::initializer_list<const Tensor*> others) const {
    const int64_t d = q.size(3);
    if (d > d_of_shape || d % 8 != 0 || q.size(2) == 0 || k.size(2) == 0 || !std::isfinite(scale)) {
      return false;
    }
    if (!has_boxes(bias, 2)) return false;
    for (const Tensor* tensor : {&q, &k, &v}) {
      if (!has_boxes(*tensor)) return false;
    }
    for (const Tensor* tensor : others) {
      if (!has_boxes(*tensor)) return false;
    }
    // Units are counted in 32 bits, and so are rows.
    constexpr int64_t kHighest = std::numeric_limits<int32_t>::max() - (1 << 16);
    const int64_t longest = std::max(q.size(2), k.size(2));
    return longest <= kHighest && all_heads() <= kHighest / (longest + kBiasQueriesPadded);
  }

  // told: dropout arguments.
  BiasAttentionArgs args(int64_t blocks, const AttentionDropout& told) const {
    BiasAttentionArgs args{};
    args.dropout = told;
    args.q = map_of_boxes(q);
    args.k = map_of_boxes(k);
    args.v = map_of_boxes(v);
    args.bias = map_of_boxes(bias);
    args.scale = static_cast<float>(scale);
    args.d = static_cast<int32_t>(q.size(3));
    args.queries = static_cast<int32_t>(q.size(2));
    args.keys = static_cast<int32_t>(k.size(2));
    args.batches = static_cast<int32_t>(q.size(0));
    args.heads = static_cast<int32_t>(q.size(1));
    args.bias_batches = static_cast<int32_t>(size_in_memory(bias, 0));
    args.bias_heads = static_cast<int32_t>(size_in_memory(bias, 1));
    args.blocks = static_cast<int32_t>(blocks);
    args.units = static_cast<int32_t>(all_heads() * blocks);
    args.is_causal = is_causal ? 1 : 0;
    return args;
  }

  // Blocks per cluster: two, of two batches, if batches share the bias, so that one block's load of
  // a tile of the bias serves both.
  int cluster() const {
    return !alone && q.size(0) % 2 == 0 && size_in_memory(bias, 0) == 1 ? 2 : 1;
  }
};

// Persistent blocks if all units take equally long. Causal units differ: one block each, so that an
// SM starts the next one as soon as it is done. A cluster has neighbouring units; its size divides
// their number.
void launch_bias_pass(const Kernel& kernel, const BiasAttentionArgs& args, int shared_bytes,
                      int cluster, int64_t multiprocessors, int device) {
  LaunchOptions options;
  options.shared_bytes = shared_bytes;
  options.cluster = cluster;
  const int64_t resident = std::max<int64_t>(multiprocessors / cluster, 1) * cluster;
  const int64_t grid = args.is_causal != 0 ? args.units : std::min<int64_t>(args.units, resident);
  launch(kernel, grid, kBiasThreads, current_stream(device), args, options);
}

// out = dropout(softmax(scale · q kᵀ + bias)) v and, if given, lse = log(sum(exp(…))), which is
// infinity in rows beyond the queries. Causal: query i sees keys 0...i. For a query that sees no
// key, out is 0. Returns false, without a launch, if the kernel does not support these tensors.
bool run_attention_bias(const AttentionBiasKernels& kernels, const AttentionBiasCall& call,
                        const Tensor& out, const std::optional<Tensor>& lse) {
  call.check(kernels.type);
  check_heads_of(kernels.type, {{&out, "out"}});
  STD_TORCH_CHECK(out.sizes().equals(call.q.sizes()),
                  "fx_fuser: attention's result does not have q's sizes");
  const std::optional<AttentionDropout> told = told_of(call.dropout, kernels.shape.drops());
  if (!told) return false;
  if (lse) call.check_lse(*lse);
  if (out.numel() == 0) return true;
  if (!call.is_taken(kernels.shape.forward.d, {&out})) return false;
  const int device = out.get_device_index();
  const OnDevice on_device(device);
  BiasAttentionArgs args = call.args(ceil_div(call.q.size(2), kBiasRows), *told);
  args.out = bias_rows(out);
  args.lse = lse ? static_cast<float*>(lse->data_ptr()) : nullptr;
  args.lse_rows = lse ? static_cast<int32_t>(lse->size(2)) : 0;
  launch_bias_pass(kernels.kernel, args, kernels.shape.forward.shared_bytes(), call.cluster(),
                   kernels.multiprocessors, device);
  return true;
}

}  // namespace
}  // namespace fx_fuser
