// Backward of attention with fp32 operands split into fp16 halves: checks, tensor maps, launches.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>

#include "attention/attention_backward_args.h"
#include "host/attention_split.h"

namespace fx_fuser {
namespace {

struct AttentionBackwardKernels {
  Kernel delta;
  Kernel d_queries;
  Kernel d_keys;
  Kernel d_values;  // only if the shape computes dv in a pass of its own
  AttentionBackwardShape shape;
  bool drops;
  int64_t multiprocessors;
};

int64_t load_attention_backward(const Sources& from) {
  const Signature types(from, 2);
  types.check_operands(0);
  const int shape = types.sizes[0];
  STD_TORCH_CHECK(shape >= 0 && shape < kAttentionBackwardShapeCount,
                  "fx_fuser: the split attention backward has no shape ", shape);
  auto kernels = std::make_unique<AttentionBackwardKernels>();
  kernels->shape = kAttentionBackwardShapes[shape];
  kernels->drops = types.sizes[1] != 0;
  const Library library = load_library(from.cubins.at(0));
  const auto pass = [&](const char* name) {
    return get_kernel(library, name, kernels->shape.shared_bytes(kernels->drops));
  };
  kernels->delta = get_kernel(library, "fx_fuser_attention_delta");
  kernels->d_queries = pass("fx_fuser_attention_d_queries");
  kernels->d_keys = pass("fx_fuser_attention_d_keys");
  if (kernels->shape.apart) kernels->d_values = pass("fx_fuser_attention_d_values");
  kernels->multiprocessors = multiprocessors_of(from.device);
  return keep<AttentionBackwardKernels>(from, std::move(kernels));
}
const AddLoader kAttentionBackwardLoader("attention_backward", load_attention_backward);

// Rows per head of `of_queries`.
int64_t padded_queries(const Tensor& q) {
  return ceil_div(q.size(2), kAttentionQueriesPadded) * kAttentionQueriesPadded;
}

// One call's tensors. d_k and d_v are per query head.
struct AttentionGradients {
  const Tensor& q;
  const Tensor& k;
  const Tensor& v;
  const Tensor& out;
  const Tensor& lse;
  const Tensor& d_out;
  const Tensor& of_queries;
  const Tensor& d_q;
  const Tensor& d_k;
  const Tensor& d_v;
  double scale;
  bool is_causal;
  const DropoutOfWeights& dropout;

  int64_t heads_of_key() const { return q.size(1) / k.size(1); }
  int64_t all_heads() const { return q.size(0) * q.size(1); }
  int64_t padded() const { return padded_queries(q); }

  void check() const {
    check_attention(q, k, v, out, lse);
    check_heads({{&d_out, "d_out"}, {&d_q, "d_q"}, {&d_k, "d_k"}, {&d_v, "d_v"}});
    bool fits = d_out.sizes().equals(q.sizes()) && d_q.sizes().equals(q.sizes()) &&
                d_v.sizes().equals(d_k.sizes());
    const int64_t wanted[] = {q.size(0), q.size(1), k.size(2), k.size(3)};
    for (int64_t d = 0; d < 4; ++d) fits = fits && d_k.size(d) == wanted[d];
    STD_TORCH_CHECK(fits, "fx_fuser: attention's gradients do not have the sizes of its tensors");
    require_cuda(of_queries, "of_queries");
    STD_TORCH_CHECK(of_queries.is_contiguous() && of_queries.scalar_type() == ScalarType::Float &&
                        of_queries.numel() == all_heads() * padded() * kAttentionQueryFloats,
                    "fx_fuser: of_queries of attention is not [batch, head, padded queries, ",
                    kAttentionQueryFloats, "] of float32");
  }

  bool is_taken(const AttentionBackwardShape& shape, const AttentionDropout& told) const {
    constexpr int64_t kHighest = std::numeric_limits<int32_t>::max() - (1 << 16);
    if (q.size(3) > shape.tiles.d || q.size(3) % 8 != 0 || q.size(2) == 0 || k.size(2) == 0 ||
        !is_attention_scale(scale * told.factor)) {
      return false;
    }
    for (const Tensor* tensor : {&q, &k, &v, &out, &d_out, &d_q, &d_k, &d_v}) {
      if (!has_aligned_heads(*tensor)) return false;
    }
    // Rows of of_queries and units are counted in 32 bits.
    return std::max(q.size(2), k.size(2)) <= kHighest && all_heads() <= kHighest / padded() &&
           all_heads() <= kHighest / ceil_div(k.size(2), shape.tiles.rows());
  }

  AttentionQuery* queries() const {
    return reinterpret_cast<AttentionQuery*>(of_queries.data_ptr());
  }

  AttentionDeltaArgs delta_args(const AttentionDropout& told) const {
    AttentionDeltaArgs args{};
    args.out = rows_of(out);
    args.d_out = rows_of(d_out);
    args.lse = static_cast<const float*>(lse.data_ptr());
    args.of_queries = queries();
    args.count = all_heads() * padded();
    args.queries = static_cast<int32_t>(q.size(2));
    args.lse_rows = static_cast<int32_t>(lse.size(2));
    args.padded = static_cast<int32_t>(padded());
    args.heads = static_cast<int32_t>(q.size(1));
    args.d = static_cast<int32_t>(q.size(3));
    args.keys = static_cast<int32_t>(k.size(2));
    args.is_causal = is_causal ? 1 : 0;
    args.truncated_by_key = static_cast<float>(truncated_by(1));
    args.d_weights_truncated = static_cast<float>(d_weights_truncated_by(q.size(3)));
    args.dropout = told;
    return args;
  }

  // The arguments of the pass over rows of queries, or over rows of keys.
  AttentionBackwardArgs pass_args(const AttentionBackwardShape& shape, const AttentionDropout& told,
                                  bool of_queries_rows) const {
    const Tensor& first = of_queries_rows ? q : k;
    const Tensor& second = of_queries_rows ? d_out : v;
    const Tensor& first_tiles = of_queries_rows ? k : q;
    const Tensor& second_tiles = of_queries_rows ? v : d_out;
    const int64_t shared_by = heads_of_key();
    const int64_t blocks = ceil_div(first.size(2), shape.tiles.rows());
    AttentionBackwardArgs args{};
    args.tile_map[0] = map_of_heads(first_tiles, shape.tiles);
    args.tile_map[1] = map_of_heads(second_tiles, shape.tiles);
    args.tiles[0] = rows_of(first_tiles);
    args.tiles[1] = rows_of(second_tiles);
    args.rows[0] = rows_of(first);
    args.rows[1] = rows_of(second);
    args.d_rows = rows_of(of_queries_rows ? d_q : d_k);
    args.d_values = rows_of(d_v);
    args.of_queries = queries();
    constexpr double kLog2OfE = 1.4426950408889634;
    args.log_scale = static_cast<float>(scale * kLog2OfE);
    args.scale_of_sums = static_cast<float>(scale * kLog2OfE * (1 + truncated_by(q.size(3))));
    args.undo_truncation = static_cast<float>(1 / (1 - d_weights_truncated_by(q.size(3))));
    args.scale = static_cast<float>(scale * told.factor);
    args.scale_of_values = static_cast<float>(told.factor * (1 + truncated_by(kAttentionPromoted)));
    args.d = static_cast<int32_t>(q.size(3));
    args.row_count = static_cast<int32_t>(first.size(2));
    args.column_count = static_cast<int32_t>(first_tiles.size(2));
    args.padded = static_cast<int32_t>(padded());
    args.heads = static_cast<int32_t>(q.size(1));
    args.heads_of_rows = static_cast<int32_t>(of_queries_rows ? 1 : shared_by);
    args.heads_of_tiles = static_cast<int32_t>(of_queries_rows ? shared_by : 1);
    args.all_heads = static_cast<int32_t>(all_heads());
    args.blocks = static_cast<int32_t>(blocks);
    args.units = static_cast<int32_t>(all_heads() * blocks);
    args.group =
        static_cast<int32_t>(std::min(all_heads(), near_heads(first_tiles, args.heads_of_tiles)));
    args.is_causal = is_causal ? 1 : 0;
    args.dropout = told;
    return args;
  }
};

// The gradients, from out and lse as run_attention_split computed them. of_queries: a workspace.
// Returns false, without a launch, if the kernels do not support these tensors.
bool run_attention_backward(const AttentionBackwardKernels& kernels,
                            const AttentionGradients& call) {
  call.check();
  const AttentionBackwardShape& shape = kernels.shape;
  const std::optional<AttentionDropout> told = told_of(call.dropout, kernels.drops);
  if (!told || !call.is_taken(shape, *told)) return false;
  const int device = call.d_q.get_device_index();
  const OnDevice on_device(device);
  const AttentionDeltaArgs of_queries = call.delta_args(*told);
  launch(kernels.delta, ceil_div(of_queries.count, kAttentionDeltaWarps), kAttentionDeltaWarps * 32,
         current_stream(device), of_queries, LaunchOptions{});
  const auto pass = [&](const Kernel& kernel, const AttentionBackwardArgs& args) {
    LaunchOptions options;
    options.shared_bytes = shape.shared_bytes(kernels.drops);
    const int64_t grid =
        call.is_causal ? args.units : std::min<int64_t>(args.units, kernels.multiprocessors);
    launch(kernel, grid, shape.tiles.threads(), current_stream(device), args, options);
  };
  pass(kernels.d_queries, call.pass_args(shape, *told, /*of_queries_rows=*/true));
  const AttentionBackwardArgs of_keys = call.pass_args(shape, *told, /*of_queries_rows=*/false);
  pass(kernels.d_keys, of_keys);
  if (shape.apart) pass(kernels.d_values, of_keys);
  return true;
}

}  // namespace
}  // namespace fx_fuser
