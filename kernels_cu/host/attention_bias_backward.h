// Backward of attention with 16-bit operands and a bias: checks, tensor maps, launches.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>

#include "host/attention_bias.h"

namespace fx_fuser {
namespace {

struct AttentionBiasBackwardKernels {
  Kernel delta;
  Kernel d_queries;
  Kernel d_keys;
  Kernel d_bias;
  BiasShape shape;
  ScalarType type;
  int64_t multiprocessors;
};

int64_t load_attention_bias_backward(const Sources& from) {
  auto kernels = bias_kernels<AttentionBiasBackwardKernels>(from);
  const BiasShape& shape = kernels->shape;
  const Library library = load_library(from.cubins.at(0));
  kernels->delta = get_kernel(library, "fx_fuser_attention_bias_delta");
  kernels->d_queries =
      get_kernel(library, "fx_fuser_attention_bias_d_queries", shape.d_queries.shared_bytes());
  kernels->d_keys =
      get_kernel(library, "fx_fuser_attention_bias_d_keys", shape.d_keys.shared_bytes());
  kernels->d_bias =
      get_kernel(library, "fx_fuser_attention_bias_d_bias", shape.bias_shared_bytes());
  return keep<AttentionBiasBackwardKernels>(from, std::move(kernels));
}
const AddLoader kAttentionBiasBackwardLoader("attention_bias_backward",
                                             load_attention_bias_backward);

// Rows per head of `of_queries`.
int64_t padded_bias_queries(const Tensor& q) {
  return ceil_div(q.size(2), kBiasQueriesPadded) * kBiasQueriesPadded;
}

struct AttentionBiasGradients {
  const AttentionBiasCall& call;
  const Tensor& out;
  const Tensor& lse;
  const Tensor& d_out;
  const Tensor& of_queries;  // workspace
  const Tensor& d_q;
  const Tensor& d_k;
  const Tensor& d_v;
  const std::optional<Tensor>&
      d_bias;  // all batches and heads, or size 1 where they share the bias
  AttentionDropout told{};

  void check(ScalarType type) const {
    call.check(type);
    call.check_lse(lse);
    check_heads_of(type,
                   {{&out, "out"}, {&d_out, "d_out"}, {&d_q, "d_q"}, {&d_k, "d_k"}, {&d_v, "d_v"}});
    const auto like_q = call.q.sizes();
    STD_TORCH_CHECK(out.sizes().equals(like_q) && d_out.sizes().equals(like_q) &&
                        d_q.sizes().equals(like_q) && d_k.sizes().equals(call.k.sizes()) &&
                        d_v.sizes().equals(call.k.sizes()),
                    "fx_fuser: attention's gradients do not have the sizes of its tensors");
    require_cuda(of_queries, "of_queries");
    STD_TORCH_CHECK(of_queries.is_contiguous() && of_queries.scalar_type() == ScalarType::Float &&
                        of_queries.numel() == call.all_heads() * padded_bias_queries(call.q) * 2,
                    "fx_fuser: of_queries of attention is not [batch, head, padded queries, 2] of ",
                    "float32");
    if (!d_bias) return;
    check_heads_of(type, {{&*d_bias, "d_bias"}});
    bool fits = d_bias->size(2) == call.q.size(2) && d_bias->size(3) == call.k.size(2);
    for (int64_t d = 0; d < 2; ++d) {
      fits = fits && (d_bias->size(d) == call.q.size(d) ||
                      (d_bias->size(d) == 1 && size_in_memory(call.bias, d) == 1));
    }
    STD_TORCH_CHECK(fits, "fx_fuser: a bias ", to_string(call.bias.sizes()),
                    " has no gradient of sizes ", to_string(d_bias->sizes()));
  }

  bool is_taken(const BiasShape& shape) const {
    if (d_bias && stride_along(*d_bias, 3) != 1) return false;
    return call.is_taken(shape.d_queries.d, {&out, &d_out, &d_q, &d_k, &d_v}) &&
           is_aligned(of_queries.data_ptr()) && units_of_bias(shape) <= kMostUnits;
  }
  static constexpr int64_t kMostUnits = std::numeric_limits<int32_t>::max() - (1 << 16);
  // Blocks per cluster: two neighbouring tiles of keys share q and dO.
  int cluster_of_bias(const BiasShape& shape) const {
    return !call.alone && call.k.size(2) > shape.d_bias.columns ? 2 : 1;
  }
  // Tiles of keys, rounded up to whole clusters; an added tile has no keys.
  int64_t tiles_of_bias(const BiasShape& shape) const {
    const int cluster = cluster_of_bias(shape);
    return ceil_div(call.k.size(2), int64_t{shape.d_bias.columns} * cluster) * cluster;
  }
  int64_t units_of_bias(const BiasShape& shape) const {
    if (!d_bias) return 0;
    return d_bias->size(0) * d_bias->size(1) * ceil_div(call.q.size(2), kBiasRows) *
           tiles_of_bias(shape);
  }

  AttentionOfQuery* queries() const {
    return reinterpret_cast<AttentionOfQuery*>(of_queries.data_ptr());
  }

  BiasDeltaArgs delta_args() const {
    BiasDeltaArgs args{};
    args.out = bias_rows(out);
    args.d_out = bias_rows(d_out);
    args.lse = static_cast<const float*>(lse.data_ptr());
    args.of_queries = queries();
    args.padded = static_cast<int32_t>(padded_bias_queries(call.q));
    args.count = call.all_heads() * args.padded;
    args.queries = static_cast<int32_t>(call.q.size(2));
    args.lse_rows = static_cast<int32_t>(lse.size(2));
    args.heads = static_cast<int32_t>(call.q.size(1));
    args.d = static_cast<int32_t>(call.q.size(3));
    return args;
  }

  // of_queries: queries per TMA box.
  BiasAttentionArgs pass_args(int64_t rows, int of_queries) const {
    BiasAttentionArgs args = call.args(ceil_div(rows, kBiasRows), told);
    args.d_out = map_of_boxes(d_out);
    args.of_query = queries();
    args.padded = static_cast<int32_t>(padded_bias_queries(call.q));
    constexpr uint64_t kOfLine = kAttentionSpanBytes / sizeof(AttentionOfQuery);
    const uint64_t lines = static_cast<uint64_t>(call.all_heads() * args.padded) / kOfLine;
    args.of_queries = tensor_map<2>(
        kMapFloat16, queries(), {kAttentionSpanBytes / 2, lines}, {kAttentionSpanBytes},
        {kAttentionSpanBytes / 2, static_cast<uint32_t>(of_queries / kOfLine)});
    return args;
  }
  BiasAttentionArgs queries_args() const {
    BiasAttentionArgs args = pass_args(call.q.size(2), kBiasRows);
    args.d_rows = bias_rows(d_q);
    return args;
  }
  BiasAttentionArgs keys_args(const BiasShape& shape) const {
    BiasAttentionArgs args = pass_args(call.k.size(2), shape.d_keys.columns);
    args.d_rows = bias_rows(d_k);
    args.d_values = bias_rows(d_v);
    return args;
  }
  BiasAttentionArgs bias_args(const BiasShape& shape) const {
    BiasAttentionArgs args = pass_args(call.q.size(2), kBiasRows);
    args.d_bias = bias_rows(*d_bias);
    args.d_bias_batches = static_cast<int32_t>(d_bias->size(0));
    args.d_bias_heads = static_cast<int32_t>(d_bias->size(1));
    args.tiles = static_cast<int32_t>(tiles_of_bias(shape));
    args.units = static_cast<int32_t>(units_of_bias(shape));
    bool in_pairs = reinterpret_cast<uintptr_t>(d_bias->data_ptr()) % 4 == 0;
    for (int64_t d = 0; d < 3; ++d) {
      in_pairs = in_pairs && (d_bias->size(d) == 1 || d_bias->stride(d) % 2 == 0);
    }
    args.in_pairs = in_pairs ? 1 : 0;
    return args;
  }
};

// The gradients, from out and lse as run_attention_bias computed them. A query that sees no key
// contributes nothing. Returns false, without a launch, if the kernels do not support these
// tensors.
bool run_attention_bias_backward(const AttentionBiasBackwardKernels& kernels,
                                 AttentionBiasGradients gradients) {
  gradients.check(kernels.type);
  const BiasShape& shape = kernels.shape;
  const std::optional<AttentionDropout> told = told_of(gradients.call.dropout, shape.drops());
  if (!told) return false;
  gradients.told = *told;
  if (!gradients.is_taken(shape)) return false;
  const int device = gradients.d_q.get_device_index();
  const OnDevice on_device(device);
  const BiasDeltaArgs of_queries = gradients.delta_args();
  launch(kernels.delta, ceil_div(of_queries.count, 2 * kBiasDeltaWarps), kBiasDeltaWarps * 32,
         current_stream(device), of_queries, LaunchOptions{});
  launch_bias_pass(kernels.d_queries, gradients.queries_args(), shape.d_queries.shared_bytes(),
                   gradients.call.cluster(), kernels.multiprocessors, device);
  launch_bias_pass(kernels.d_keys, gradients.keys_args(shape), shape.d_keys.shared_bytes(),
                   gradients.call.cluster(), kernels.multiprocessors, device);
  if (gradients.d_bias) {
    launch_bias_pass(kernels.d_bias, gradients.bias_args(shape), shape.bias_shared_bytes(),
                     gradients.cluster_of_bias(shape), kernels.multiprocessors, device);
  }
  return true;
}

}  // namespace
}  // namespace fx_fuser
