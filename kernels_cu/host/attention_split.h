// Attention with fp32 operands split into fp16 halves: checks, tensor maps, launch.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "attention/attention_split_args.h"
#include "host/linear_split.h"

namespace fx_fuser {
namespace {

struct AttentionSplitKernels {
  Kernel kernel;
  AttentionShape shape;
  bool drops;
  int64_t multiprocessors;
};

int64_t load_attention_split(const Sources& from) {
  const Signature types(from, 2);
  types.check_operands(0);
  const int shape = types.sizes[0];
  STD_TORCH_CHECK(shape >= 0 && shape < kAttentionShapeCount,
                  "fx_fuser: the split attention kernel has no shape ", shape);
  auto kernels = std::make_unique<AttentionSplitKernels>();
  kernels->shape = kAttentionShapes[shape];
  kernels->drops = types.sizes[1] != 0;
  kernels->kernel = get_kernel(load_library(from.cubins.at(0)), "fx_fuser_attention_split",
                               kernels->shape.shared_bytes(kernels->drops));
  kernels->multiprocessors = multiprocessors_of(from.device);
  return keep<AttentionSplitKernels>(from, std::move(kernels));
}
const AddLoader kAttentionSplitLoader("attention_split", load_attention_split);

// tensor: [batch, head, row, element]. True if it can be read and written in 16-byte vectors.
bool has_aligned_heads(const Tensor& tensor) {
  if (!is_aligned(tensor.data_ptr()) || stride_along(tensor, 3) != 1) return false;
  for (int64_t d = 0; d < 3; ++d) {
    const int64_t stride = tensor.stride(d);
    if (tensor.size(d) > 1 && (stride <= 0 || stride % 4 != 0)) return false;
  }
  return true;
}

AttentionRows rows_of(const Tensor& tensor) {
  return {static_cast<float*>(tensor.data_ptr()), tensor.stride(0), tensor.stride(1),
          tensor.stride(2)};
}

// The map declares each fp32 element as two of 16 bits: TMA only copies bits.
TensorMap map_of_heads(const Tensor& tensor, const AttentionShape& shape) {
  std::array<uint64_t, 4> sizes{};
  std::array<uint64_t, 3> strides{};
  for (int64_t d = 0; d < 4; ++d) sizes[d] = static_cast<uint64_t>(tensor.size(3 - d));
  for (int64_t d = 0; d < 3; ++d) {
    // The stride of a single row is never used, but must be valid for TMA.
    const bool is_single = tensor.size(2 - d) == 1;
    strides[d] = is_single ? 16 : static_cast<uint64_t>(tensor.stride(2 - d)) * sizeof(float);
  }
  sizes[0] *= 2;
  constexpr uint32_t kSpanElements = kAttentionSpanBytes / 2;
  return tensor_map<4>(kMapFloat16, tensor.data_ptr(), sizes, strides,
                       {kSpanElements, static_cast<uint32_t>(shape.keys), 1, 1});
}

void check_heads(std::initializer_list<std::pair<const Tensor*, const char*>> tensors) {
  for (const auto& [tensor, name] : tensors) {
    require_cuda(*tensor, name);
    STD_TORCH_CHECK(tensor->dim() == 4 && tensor->scalar_type() == ScalarType::Float,
                    "fx_fuser: ", name,
                    " of attention is not [batch, head, row, element] of float32");
  }
}

// torch pads the queries of lse to a multiple of this.
constexpr int64_t kLseRows = 32;
int64_t padded_lse(int64_t queries) { return ceil_div(queries, kLseRows) * kLseRows; }

void check_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
                     const std::optional<Tensor>& lse) {
  check_heads({{&q, "q"}, {&k, "k"}, {&v, "v"}, {&out, "out"}});
  const bool fits = k.size(0) == q.size(0) && k.size(3) == q.size(3) && k.size(1) > 0 &&
                    q.size(1) % k.size(1) == 0;
  STD_TORCH_CHECK(fits && v.sizes().equals(k.sizes()) && out.sizes().equals(q.sizes()),
                  "fx_fuser: attention of q ", to_string(q.sizes()), ", k ", to_string(k.sizes()),
                  ", v ", to_string(v.sizes()), " into ", to_string(out.sizes()));
  if (!lse) return;
  require_cuda(*lse, "lse");
  const bool is_of_heads = lse->dim() == 3 && lse->is_contiguous() &&
                           lse->scalar_type() == ScalarType::Float && lse->size(0) == q.size(0) &&
                           lse->size(1) == q.size(1);
  STD_TORCH_CHECK(
      is_of_heads && lse->size(2) >= q.size(2) && lse->size(2) <= padded_lse(q.size(2)),
      "fx_fuser: lse of attention is not [batch, head, query] of float32, with at most ",
      "the queries to a multiple of ", kLseRows);
}

// True if the scale, times log2(e), is finite in float.
bool is_attention_scale(double scale) { return scale > 0 && scale < 0x1p126; }

// Dropout of attention weights with probability p; the seed is in GPU memory.
struct DropoutOfWeights {
  std::optional<Tensor> seed;
  double p = 0;
};

// The kernels' dropout arguments; std::nullopt if p is too small or too large for their steps.
std::optional<AttentionDropout> told_of(const DropoutOfWeights& given, bool drops) {
  STD_TORCH_CHECK(drops == (given.p != 0), "fx_fuser: attention's dropout is ", given.p,
                  ", for which this kernel was not compiled");
  if (!drops) return AttentionDropout{};
  STD_TORCH_CHECK(given.seed.has_value(), "fx_fuser: dropout of attention has no seed");
  require_cuda(*given.seed, "seed");
  STD_TORCH_CHECK(given.seed->scalar_type() == ScalarType::Long && given.seed->numel() == 1,
                  "fx_fuser: seed of attention's dropout is not one number of int64");
  const double steps = std::nearbyint(given.p * kDropoutSteps);
  if (!(steps >= 1 && steps <= kMostDropped)) return std::nullopt;
  const double kept = 1 - steps / kDropoutSteps;
  const auto below = static_cast<uint32_t>(steps);
  return AttentionDropout{static_cast<const int64_t*>(given.seed->data_ptr()), below << 16 | below,
                          static_cast<float>(kept), static_cast<float>(1 / kept)};
}

// How many heads' keys and values stay in L2 with room for other traffic.
int64_t near_heads(const Tensor& k, int64_t heads_of_key) {
  constexpr int64_t kNearBytes = 24 << 20;
  const int64_t bytes = 2 * k.size(2) * k.size(3) * int64_t{sizeof(float)};
  return heads_of_key * std::max<int64_t>(kNearBytes / bytes, 1);
}

// out = dropout(softmax(scale · q kᵀ)) v and, if given, lse = log(sum(exp(scale · q kᵀ))), which is
// infinity in rows beyond the queries. Causal: query i sees keys 0...i. Returns false, without a
// launch, if the kernel does not support these tensors.
bool run_attention_split(const AttentionSplitKernels& kernels, const Tensor& q, const Tensor& k,
                         const Tensor& v, const Tensor& out, const std::optional<Tensor>& lse,
                         double scale, bool is_causal, const DropoutOfWeights& dropout = {}) {
  check_attention(q, k, v, out, lse);
  const AttentionShape& shape = kernels.shape;
  const std::optional<AttentionDropout> told = told_of(dropout, kernels.drops);
  if (!told) return false;
  if (out.numel() == 0) return true;
  const int64_t d = q.size(3);
  if (d > shape.d || d % 8 != 0 || k.size(2) == 0 || !is_attention_scale(scale)) return false;
  for (const Tensor* tensor : {&q, &k, &v, &out}) {
    if (!has_aligned_heads(*tensor)) return false;
  }
  const int64_t all_heads = q.size(0) * q.size(1);
  const int64_t blocks = ceil_div(q.size(2), shape.rows());
  constexpr int64_t kHighest = std::numeric_limits<int32_t>::max() - (1 << 16);
  if (std::max(q.size(2), k.size(2)) > kHighest || all_heads > kHighest / blocks) return false;

  const OnDevice on_device(out.get_device_index());
  AttentionSplitArgs args{};
  args.tile_map[0] = map_of_heads(k, shape);
  args.tile_map[1] = map_of_heads(v, shape);
  args.q = rows_of(q);
  args.k = rows_of(k);
  args.v = rows_of(v);
  args.out = rows_of(out);
  args.lse = lse ? static_cast<float*>(lse->data_ptr()) : nullptr;
  constexpr double kLog2OfE = 1.4426950408889634;
  args.scale = static_cast<float>(scale * kLog2OfE);
  args.scale_of_sums = static_cast<float>(scale * kLog2OfE * (1 + truncated_by(d)));
  args.d = static_cast<int32_t>(d);
  args.queries = static_cast<int32_t>(q.size(2));
  args.lse_rows = lse ? static_cast<int32_t>(lse->size(2)) : 0;
  args.keys = static_cast<int32_t>(k.size(2));
  args.heads = static_cast<int32_t>(q.size(1));
  args.heads_of_key = static_cast<int32_t>(q.size(1) / k.size(1));
  args.all_heads = static_cast<int32_t>(all_heads);
  args.blocks = static_cast<int32_t>(blocks);
  args.units = static_cast<int32_t>(all_heads * blocks);
  args.group = static_cast<int32_t>(std::min(all_heads, near_heads(k, args.heads_of_key)));
  args.is_causal = is_causal ? 1 : 0;
  args.dropout = *told;
  LaunchOptions options;
  options.shared_bytes = shape.shared_bytes(kernels.drops);
  // Persistent blocks if all units take equally long. Causal units differ: one block each, so that
  // an SM starts the next one as soon as it is done.
  const int64_t grid =
      is_causal ? args.units : std::min<int64_t>(args.units, kernels.multiprocessors);
  launch(kernels.kernel, grid, shape.threads(), current_stream(out.get_device_index()), args,
         options);
  return true;
}

}  // namespace
}  // namespace fx_fuser
