// fx_fuser::attention on CUDA: two split products with a softmax between them, a chunk of planes,
// that is heads of a batch, after the other.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "attention_args.h"
#include "shim_conv_backward.h"
#include "shim_linear.h"
#include "shim_linear_split.h"

namespace fx_fuser {
namespace {

// ---- the kernels that are no products -----------------------------------------------------------

struct SoftmaxKernels {
  cudaKernel_t of_short;
  cudaKernel_t of_warp;
  cudaKernel_t of_block;
  cudaKernel_t of_long;
  cudaKernel_t row_dots;
  cudaKernel_t count;
};

constexpr const char* kSoftmax = "attention";  // their only name

int64_t load_attention(const std::string& cubin, int64_t device) {
  const OnDevice on_device(static_cast<int>(device));
  cudaLibrary_t library = load_library(cubin);
  const auto kernel = [&](const char* name) {
    return get_kernel(library, std::string("fx_fuser_attention_") + name);
  };
  const auto* loaded =
      new SoftmaxKernels{kernel("softmax_short"), kernel("softmax_warp"), kernel("softmax_block"),
                         kernel("softmax_long"),  kernel("row_dots"),     kernel("count")};
  registry<SoftmaxKernels>().add(kSoftmax, static_cast<int>(device), loaded);
  return reinterpret_cast<int64_t>(loaded);
}

void launch_softmax(const SoftmaxKernels& kernels, const SoftmaxArgs& args, cudaStream_t stream) {
  const bool by_warps = args.keys <= kWarpRow;
  const cudaKernel_t kernel = args.keys <= kShortRow   ? kernels.of_short
                              : by_warps               ? kernels.of_warp
                              : args.keys <= kBlockRow ? kernels.of_block
                                                       : kernels.of_long;
  constexpr int kWarps = kAttentionThreads / 32;
  launch(kernel, by_warps ? ceil_div(args.count, kWarps) : args.count, kAttentionThreads, stream,
         args);
}

// ---- views --------------------------------------------------------------------------------------

// Without calls through the dispatcher (see new_strided). offset: elements from the tensor's first.
Tensor viewed(const Tensor& tensor, const std::vector<int64_t>& sizes,
              const std::vector<int64_t>& strides, int64_t offset = 0) {
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(
      aoti_torch__reinterpret_tensor(tensor.get(), static_cast<int64_t>(sizes.size()), sizes.data(),
                                     strides.data(), offset, &made));
  return Tensor(made);
}

std::vector<int64_t> listed(const Tensor& tensor, bool strides) {
  const auto values = strides ? tensor.strides() : tensor.sizes();
  return {values.begin(), values.end()};
}

Tensor narrowed(const Tensor& tensor, int64_t d, int64_t first, int64_t count) {
  std::vector<int64_t> sizes = listed(tensor, false);
  const std::vector<int64_t> strides = listed(tensor, true);
  sizes[d] = count;
  return viewed(tensor, sizes, strides, first * strides[d]);
}

// Heads of batches that are computed together; tensors are [batch, head, rows, columns].
struct Part {
  int64_t batch;
  int64_t batches;
  int64_t head;
  int64_t heads;

  Tensor of(const Tensor& tensor) const {
    return narrowed(narrowed(tensor, 0, batch, batches), 1, head, heads);
  }
  int64_t planes() const { return batches * heads; }
  int64_t first_plane(int64_t of_batch) const { return batch * of_batch + head; }
};

// As many planes at once as fit, all heads of some batches or some heads of one.
std::vector<Part> parts_of(int64_t batches, int64_t heads, int64_t at_once) {
  const auto even = [](int64_t whole, int64_t most) {
    return ceil_div(whole, ceil_div(whole, std::clamp(most, int64_t{1}, whole)));
  };
  const int64_t of_heads = even(heads, at_once);
  const int64_t of_batches = of_heads < heads ? 1 : even(batches, at_once / heads);
  std::vector<Part> parts;
  for (int64_t batch = 0; batch < batches; batch += of_batches) {
    for (int64_t head = 0; head < heads; head += of_heads) {
      parts.push_back(
          {batch, std::min(of_batches, batches - batch), head, std::min(of_heads, heads - head)});
    }
  }
  return parts;
}

// ---- a call -------------------------------------------------------------------------------------

constexpr std::string_view kAttentionNames = "q, k, v, bias, causal, scale, with_lse, kernels";
constexpr std::string_view kAttentionBackwardNames =
    "dout, q, k, v, bias, out, lse, causal, scale, wanted, kernels";

constexpr int64_t kPlaneBytes = 512ll << 20;  // a plane's scores at most

// How a call is divided: bytes of scores at once, and blocks of rows under a causal mask. A
// backward keeps all rows of a plane, twice; with fewer bytes a block of it has too few tiles for
// the GPU.
struct Division {
  int64_t bytes;
  int64_t blocks;
};
constexpr Division kForwardDivision{64ll << 20, 4};
constexpr Division kBackwardDivision{128ll << 20, 2};
constexpr int64_t kLsePadding = 32;  // PyTorch's backward wants that many rows

struct Attention {
  int64_t batches;
  int64_t heads;
  int64_t rows;
  int64_t keys;
  int64_t columns;    // of q and k
  int64_t v_columns;  // of v and out
  int64_t pitch;      // of a row of scores
  int64_t at_once;    // rows, and keys, of a block
  bool causal;
  double scale;
  Division division;
  std::optional<Tensor> bias;  // [batches, heads, rows, keys]

  Attention(const Tensor& q, const Tensor& k, const Tensor& v,
            const std::optional<Tensor>& given_bias, bool is_causal, double factor,
            const Division& into)
      : causal(is_causal), scale(factor), division(into) {
    require_cuda(q, "q");
    STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && q.size(3) == k.size(3) &&
                        k.size(2) == v.size(2) && q.size(0) == k.size(0) &&
                        q.size(0) == v.size(0) && q.size(1) == k.size(1) && q.size(1) == v.size(1),
                    "fx_fuser: there is no attention of q ", to_string(q.sizes()), ", k ",
                    to_string(k.sizes()), " and v ", to_string(v.sizes()));
    batches = q.size(0);
    heads = q.size(1);
    rows = q.size(2);
    keys = k.size(2);
    columns = q.size(3);
    v_columns = v.size(3);
    pitch = ceil_div(keys, kAttentionWidth) * kAttentionWidth;
    at_once = block();
    if (given_bias) bias = expanded(*given_bias);
  }

  // What a causal mask hides is not computed where whole blocks of it are: row blocks see the keys
  // before their end. Blocks of keys have the same bounds.
  int64_t block() const {
    constexpr int64_t kLeast = 256;
    if (!causal) return std::max(rows, keys);
    return std::max(kLeast, ceil_div(ceil_div(rows, division.blocks), kLinearTileM) * kLinearTileM);
  }

  Tensor expanded(const Tensor& tensor) const {
    const int64_t missing = 4 - tensor.dim();
    const std::vector<int64_t> sizes{batches, heads, rows, keys};
    std::vector<int64_t> strides(4, 0);
    STD_TORCH_CHECK(missing >= 0, "fx_fuser: an attention's bias has at most 4 dimensions");
    for (int64_t d = missing; d < 4; ++d) {
      const int64_t size = tensor.size(d - missing);
      STD_TORCH_CHECK(size == 1 || size == sizes[d], "fx_fuser: a bias of shape ",
                      to_string(tensor.sizes()), " does not broadcast to ", to_string(sizes));
      if (size != 1) strides[d] = tensor.stride(d - missing);
    }
    return viewed(tensor, sizes, strides);
  }

  // Can kernels of ours compute it?  Indices of rows are of 32 bits, and numbers of them floats.
  bool is_in_reach() const {
    constexpr int64_t kWhole = 1 << 24;
    return batches * heads * rows > 0 && keys > 0 && columns > 0 && v_columns > 0 &&
           rows < kWhole && keys < kWhole && batches * heads * rows < (int64_t{1} << 31) &&
           rows * pitch * 4 <= kPlaneBytes;
  }

  std::vector<Part> parts(int64_t score_rows) const {
    return parts_of(batches, heads, division.bytes / (4 * score_rows * pitch));
  }

  // Scores of a part's rows and keys, in memory for more of them.
  Tensor scores(const Tensor& memory, const Part& part, int64_t some_rows,
                int64_t some_keys) const {
    const int64_t plane = some_rows * pitch;
    return viewed(memory, {part.batches, part.heads, some_rows, some_keys},
                  {part.heads * plane, plane, pitch, 1});
  }

  Tensor memory_of_scores(const Tensor& like, int64_t planes, int64_t some_rows) const {
    return new_dense(like, {planes * some_rows * pitch}, ScalarType::Float);
  }

  int64_t padded_rows() const { return ceil_div(rows, kLsePadding) * kLsePadding; }
};

// [B, H, rows, columns] in the memory of [B, rows, H, columns], as PyTorch's op returns it.
Tensor new_heads(const Tensor& like, const Attention& call, int64_t rows, int64_t columns) {
  const int64_t sizes[] = {call.batches, call.heads, rows, columns};
  const int64_t strides[] = {rows * call.heads * columns, columns, call.heads * columns, 1};
  return new_strided(like, sizes, strides, 4, ScalarType::Float);
}

// The kernels a graph names; where its code came out of a cache, nobody has loaded them yet.
void make_sure_of(const std::vector<std::string>& kernels, const Tensor& like) {
  const int device = like.get_device_index();
  bool all = registry<SoftmaxKernels>().holds(kSoftmax, device);
  for (const std::string& name : kernels) {
    all = all && registry<LinearSplitKernels>().holds(name, device);
  }
  if (!all) call_in_torch("fx_fuser::load_attention", like, kernels);
}

const LinearSplitKernels& split_kernels(const std::string& name, const Tensor& like) {
  return registry<LinearSplitKernels>().at(name, like.get_device_index());
}

// out = epilogue(a bᵀ)
bool multiply(const LinearSplitKernels& kernels, const Tensor& a, const Tensor& b,
              const Tensor& out, const std::vector<Tensor>& operands,
              const std::vector<double>& scalars) {
  return run_linear_split(kernels, a, b, std::nullopt, out, std::nullopt, operands, scalars);
}

// out = a bᵀ with probabilities or their gradient as a, which are split first: in a row that has
// one large value its scale, guessed from the first keys, would often be wrong.
bool multiply_scores(const LinearSplitKernels& kernels, const Tensor& a, const Tensor& b,
                     const Tensor& out) {
  SplitWish wish;
  wish.weight_first = false;
  return run_linear_split(kernels, a, b, std::nullopt, out, std::nullopt, {}, {}, wish);
}

// ---- forward ------------------------------------------------------------------------------------

struct ForwardKernels {
  const LinearSplitKernels& scores;
  const LinearSplitKernels& product;
  const SoftmaxKernels& others;
};

// Rows [first, first + count) of a part.
bool attend(const ForwardKernels& kernels, const Attention& call, const Part& part, int64_t first,
            const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out,
            const std::optional<Tensor>& lse, const Tensor& memory) {
  const int64_t count = std::min(call.at_once, call.rows - first);
  const int64_t keys = std::min(call.keys, call.causal ? first + call.at_once : call.keys);
  const Tensor scores = call.scores(memory, part, count, keys);
  std::vector<Tensor> operands;
  if (call.bias) {
    operands.push_back(narrowed(narrowed(part.of(*call.bias), 2, first, count), 3, 0, keys));
  }
  const auto rows_of = [&](const Tensor& tensor) {
    return narrowed(part.of(tensor), 2, first, count);
  };
  const auto keys_of = [&](const Tensor& tensor) { return narrowed(part.of(tensor), 2, 0, keys); };
  if (!multiply(kernels.scores, rows_of(q), keys_of(k), scores, operands, {call.scale})) {
    return false;
  }
  SoftmaxArgs args{};
  args.scores = static_cast<float*>(memory.data_ptr());
  args.lse_pitch = call.padded_rows();
  if (lse) {
    args.lse = static_cast<float*>(lse->data_ptr()) + part.first_plane(call.heads) * args.lse_pitch;
  }
  args.pitch = call.pitch;
  args.rows = make_divisor(static_cast<uint32_t>(count));
  args.count = static_cast<uint32_t>(part.planes() * count);
  args.keys = static_cast<int32_t>(keys);
  args.first_row = static_cast<int32_t>(first);
  args.last_row = static_cast<int32_t>(call.rows - 1);
  args.causal = call.causal;
  const int device = q.get_device_index();
  {
    const OnDevice on_device(device);
    launch_softmax(kernels.others, args, current_stream(device));
  }
  return multiply_scores(kernels.product, scores, transposed(keys_of(v)), rows_of(out));
}

std::optional<std::tuple<Tensor, Tensor>> attention_by_kernels(
    const Attention& call, const Tensor& q, const Tensor& k, const Tensor& v, bool with_lse,
    const std::vector<std::string>& names) {
  if (!call.is_in_reach()) return {};
  make_sure_of(names, q);
  const ForwardKernels kernels{split_kernels(names.at(0), q), split_kernels(names.at(1), q),
                               registry<SoftmaxKernels>().at(kSoftmax, q.get_device_index())};
  if (kernels.scores.precision->takes_any_call()) return {};
  const Tensor out = new_heads(q, call, call.rows, call.v_columns);
  const Tensor lse = new_dense(q, {call.batches, call.heads, with_lse ? call.padded_rows() : 0},
                               ScalarType::Float);
  const int64_t rows = std::min(call.at_once, call.rows);
  const std::vector<Part> parts = call.parts(rows);
  const Tensor memory = call.memory_of_scores(q, parts[0].planes(), rows);
  const std::optional<Tensor> kept = with_lse ? std::optional(lse) : std::nullopt;
  for (const Part& part : parts) {
    for (int64_t first = 0; first < call.rows; first += call.at_once) {
      if (!attend(kernels, call, part, first, q, k, v, out, kept, memory)) return {};
    }
  }
  return std::tuple{out, lse};
}

// fx_fuser/attention.py has the schemas of both, and what their arguments mean.
std::tuple<Tensor, Tensor> attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                     const std::optional<Tensor>& bias, bool causal, double scale,
                                     bool with_lse, const std::vector<std::string>& kernels) {
  const Attention call(q, k, v, bias, causal, scale, kForwardDivision);
  STD_TORCH_CHECK(kernels.size() == 2, "fx_fuser: attention needs 2 kernels, not ", kernels.size());
  auto done = attention_by_kernels(call, q, k, v, with_lse, kernels);
  if (done) return *std::move(done);
  const auto found = call_in_torch("fx_fuser::attention_in_torch", q, k, v, bias, causal, scale,
                                   with_lse, kernels);
  return {found.at(0), found.at(1)};
}

}  // namespace
}  // namespace fx_fuser
