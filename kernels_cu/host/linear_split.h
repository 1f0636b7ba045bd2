// The fp32 product on tensor cores (the split product): tensor maps, workspace, launch.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "host/gemm_call.h"
#include "host/kernel.h"
#include "host/split_call.h"
#include "host/split_fallback.h"
#include "host/split_operands.h"
#include "host/split_part.h"
#include "host/split_plan.h"
#include "host/split_result.h"
#include "linear/linear_split_args.h"

namespace fx_fuser {
namespace {

// How the product's kernels are launched.
struct SplitLoop {
  int threads;
  int shared_bytes;
  int stages;     // of the mma.sync loop; 0: the wgmma loop, with tensor maps
  bool clusters;  // has_clusters

  static SplitLoop hopper() { return {kLinearThreads, kLinearSharedBytes, 0, true}; }

  static SplitLoop mma(int device) {
    const int stages = mma_stages(attribute_of(device, kDeviceMaxShared));
    STD_TORCH_CHECK(stages >= kMmaLeastStages, "fx_fuser: cuda:", device,
                    " has too little shared memory for the split product");
    return {kMmaThreads, mma_shared_bytes(stages), stages, has_clusters(device)};
  }
};

// x: the type of the pre-split operand: fp32, or a 16-bit type if the other operand is fp32.
struct LinearSplitKernels : GemmKernel, EpilogueTypes {
  SplitLoop loop;
  Kernel split_rows;
  Kernel split_columns;
  std::array<Kernel, 2> product;  // for a K-major weight, for an N-major one
  std::array<Kernel, 2> chunk;
  Kernel sum;
  Kernel copy_rows;
  SplitRates rates;
  std::unique_ptr<Fallback> precision;  // to the library's product
  std::unique_ptr<Fallback> guesses;    // to scales that are computed ahead

  explicit LinearSplitKernels(const EpilogueTypes& types) : EpilogueTypes(types) {}

  bool is_profitable(const Tensor& x, const Tensor& weight) const override;
  bool run(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
           const Tensor& y, const std::optional<Tensor>& c,
           const EpilogueArgs& args) const override;
};

int64_t load_split(const Sources& from, bool mma) {
  const Signature types(from);
  const Library own = load_library(from.cubins.at(0));
  const Library shared = load_library(from.cubins.at(1));
  auto kernels = std::make_unique<LinearSplitKernels>(types);
  kernels->loop = mma ? SplitLoop::mma(from.device) : SplitLoop::hopper();
  kernels->split_rows = get_kernel(shared, "fx_fuser_linear_split_rows");
  kernels->split_columns = get_kernel(shared, "fx_fuser_linear_split_columns");
  kernels->sum = get_kernel(own, "fx_fuser_linear_split_sum");
  kernels->copy_rows = get_kernel(shared, "fx_fuser_copy_rows");
  const auto product = [&](Library library, const char* name) {
    return get_kernel(library, name, kernels->loop.shared_bytes);
  };
  kernels->product = {product(own, "fx_fuser_linear_split"),
                      product(own, "fx_fuser_linear_split_n_major")};
  kernels->chunk = {product(shared, "fx_fuser_linear_split_chunk"),
                    product(shared, "fx_fuser_linear_split_chunk_n_major")};
  kernels->rates = SplitRates::of(from.rates);
  kernels->precision = std::make_unique<Fallback>();
  kernels->guesses = std::make_unique<Fallback>();
  return keep<GemmKernel, LinearSplitKernels>(from, std::move(kernels));
}

// linear_split loads linear/linear_split.cuh, whose main loop uses wgmma if the GPU has it;
// linear_split_mma loads linear/linear_split_mma.cuh, which runs on every GPU.
int64_t load_linear_split(const Sources& from) {
  const bool has_wgmma = attribute_of(from.device, kDeviceMajor) == 9;
  return load_split(from, /*mma=*/!has_wgmma);
}
int64_t load_linear_split_mma(const Sources& from) { return load_split(from, /*mma=*/true); }
const AddLoader kLinearSplitLoader("linear_split", load_linear_split);
const AddLoader kLinearSplitMmaLoader("linear_split_mma", load_linear_split_mma);

// The row stride of a tensor viewed as [rows, columns], whose leading dimensions broadcast to those
// of `like`; std::nullopt if the rows are not evenly spaced.
std::optional<int64_t> row_stride(const Tensor& tensor, const Tensor& like) {
  const int rank = static_cast<int>(like.dim());
  const int missing = rank - static_cast<int>(tensor.dim());
  int64_t rows = 1;
  int64_t stride = 0;
  for (int d = rank - 2; d >= 0; --d) {
    if (like.size(d) == 1) continue;
    const bool broadcast = d < missing || tensor.size(d - missing) == 1;
    const int64_t step = broadcast ? 0 : tensor.stride(d - missing);
    if (rows == 1) stride = step;
    if (step != stride * rows) return std::nullopt;
    rows *= like.size(d);
  }
  return stride;
}

// True if 16-byte loads and TMA can read the rows.
bool has_aligned_rows(const Tensor& tensor, int64_t rows, int64_t stride) {
  const bool dense = tensor.stride(-1) == 1 || tensor.size(-1) == 1;
  return dense && reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0 &&
         (rows == 1 || stride * static_cast<int64_t>(tensor.element_size()) % 16 == 0);
}

// The operands' types.
struct LinearTypes {
  ScalarType x;
  ScalarType weight;
};

// `in` is the type of bias and z.
template <class Kernels>
void check_linear(const Kernels& kernels, ScalarType in, const LinearTypes& types, const Tensor& x,
                  const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& out,
                  const std::optional<Tensor>& z, const EpilogueArgs& epilogue) {
  const int device = out.get_device_index();
  const auto check_one = [&](const Tensor& tensor, const char* name, ScalarType type) {
    STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == device, "fx_fuser: ", name,
                    " is not on out's device, cuda:", device);
    STD_TORCH_CHECK(tensor.scalar_type() == type, "fx_fuser: the kernel takes ", name, " as ",
                    toString(type), ", but it is ", toString(tensor.scalar_type()));
  };
  require_cuda(out, "out");
  check_one(out, "out", kernels.out);
  check_one(x, "x", types.x);
  check_one(weight, "weight", types.weight);
  bool multiply = x.dim() >= 1 && weight.dim() >= 2 && x.size(-1) == weight.size(-1) &&
                  (weight.dim() == 2 || weight.dim() == x.dim());
  for (int64_t d = 0; multiply && d + 2 < weight.dim(); ++d) {
    multiply = weight.size(d) == x.size(d);
  }
  STD_TORCH_CHECK(multiply, "fx_fuser: x of shape ", to_string(x.sizes()),
                  " cannot be multiplied by weight ", to_string(weight.sizes()));
  const auto check_result = [&](const Tensor& result, const char* name) {
    bool fits = result.dim() == x.dim() && result.size(-1) == weight.size(-2);
    for (int64_t d = 0; fits && d + 1 < x.dim(); ++d) fits = result.size(d) == x.size(d);
    STD_TORCH_CHECK(fits, "fx_fuser: ", name, " of shape ", to_string(result.sizes()),
                    " does not hold the product of x ", to_string(x.sizes()), " and weight ",
                    to_string(weight.sizes()));
  };
  check_result(out, "out");
  if (z) {
    check_one(*z, "z", in);
    check_result(*z, "z");
  }
  if (bias) {
    check_one(*bias, "bias", in);
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(-2),
                    "fx_fuser: bias of shape ", to_string(bias->sizes()), " does not fit weight ",
                    to_string(weight.sizes()));
  }
  check_epilogue(kernels, out, epilogue);
}

// ---- the launch ---------------------------------------------------------------------------------

// Which operand is pre-split if one is 16-bit: that one. Otherwise there is a choice.
std::optional<bool> forced_weight_first(const LinearSplitKernels& kernels, const Tensor& weight) {
  if (kernels.x == ScalarType::Float) return std::nullopt;
  return weight.scalar_type() == kernels.x;
}

LinearTypes split_types(const LinearSplitKernels& kernels, const Tensor& weight) {
  const bool weight_first = forced_weight_first(kernels, weight).value_or(false);
  return weight_first ? LinearTypes{ScalarType::Float, kernels.x}
                      : LinearTypes{kernels.x, ScalarType::Float};
}

// fp16 per value of the pre-split operand.
int64_t split_parts(const LinearSplitKernels& kernels) {
  return kernels.x == ScalarType::Float ? 2 : 1;
}

float least_sum(const SplitPlan& plan) { return kLeastSum * std::sqrt(static_cast<float>(plan.k)); }

// Arguments of the product of `first`, which is pre-split, and `second`, which is streamed.
LinearSplitArgs split_product_args(const SplitOperand& first, const SplitOperand& second,
                                   const SplitSizes& sizes, const SplitPlan& plan,
                                   const Planes& planes, const SplitWorkspace& work, int64_t parts,
                                   int stages) {
  LinearSplitArgs args{};
  args.planes = planes;
  const int64_t padded_k = ceil_div(plan.k, kLinearTileK) * kLinearTileK;
  if (stages == 0) {
    args.weight_map = second.map();
    args.x_map = split_map(work.split, padded_k, first.rows, plan.chunks * sizes.batches, parts);
  }
  args.split = work.split;
  args.padded_k = static_cast<int32_t>(padded_k);
  args.stages = stages;
  args.x_factors = work.factors;
  args.weight_factors = work.other_factors;
  args.spilled = work.spilled;
  args.unsure = work.unsure;
  args.redo = work.redo;
  args.least_sum = least_sum(plan);
  args.x = first.data;
  args.weight = static_cast<const float*>(second.data);
  args.x_plane = {plan.k * first.stride_k, first.outer, first.inner};
  args.weight_plane = {plan.k * second.stride_k, second.outer, second.inner};
  args.x_stride_m = first.stride_row;
  args.x_stride_k = first.stride_k;
  args.weight_stride_n = second.stride_row;
  args.weight_stride_k = second.stride_k;
  const auto m_tiles = static_cast<uint32_t>(ceil_div(first.rows, kLinearTileM));
  const auto n_tiles = static_cast<uint32_t>(ceil_div(second.rows, kLinearTileN));
  args.plane_tiles = make_divisor(m_tiles * n_tiles);
  args.group_tiles = make_divisor(kLinearGroupM * n_tiles);
  args.last_width = make_divisor(std::max(m_tiles % kLinearGroupM, 1u));
  args.whole_groups = m_tiles / kLinearGroupM;
  args.m = static_cast<int32_t>(first.rows);
  args.n = static_cast<int32_t>(second.rows);
  args.tiles = static_cast<int32_t>(plan.chunks * sizes.tiles());
  args.weight_outer = second.outer != 0;
  args.weight_inner = second.inner != 0;
  return args;
}

// What all launches of a call share.
struct SplitLaunch {
  const LinearSplitKernels& kernels;
  const SplitCall& call;
  const SplitWish& wish;
  const Tensor& like;  // for workspaces
  bool stores_pairs;
  Stream stream;

  void run(const SplitPart& part) const {
    const SplitSizes& sizes = part.sizes;
    const SplitPlan plan =
        SplitCall::plan_of(part.weight_first ? sizes.transposed() : sizes, wish, kernels.rates);
    const int64_t planes = plan.chunks * sizes.batches;
    const int64_t padded_k = ceil_div(plan.k, kLinearTileK) * kLinearTileK;
    const int64_t tiles = plan.chunks * sizes.tiles();
    const int64_t blocks = persistent_blocks(tiles, multiprocessors());
    const bool whole = plan.chunks == 1;
    const int64_t pitch = partial_pitch(sizes.n);
    const int64_t parts = split_parts(kernels);
    const SplitWorkspace work(like, parts, planes * part.first.rows, padded_k,
                              plan.k > kLinearChunkK ? blocks : 0, tiles,
                              wish.exact ? planes * part.second.rows : 0,
                              whole ? 0 : plan.chunks * sizes.batches * sizes.m * pitch);
    const Planes of_product{divisor(sizes.batches), divisor(part.rows.inner),
                            static_cast<int32_t>(plan.chunks), static_cast<int32_t>(plan.k),
                            static_cast<int32_t>(sizes.k - (plan.chunks - 1) * plan.k)};
    const auto split = [&](const SplitOperand& operand, void* to, SplitRowFactors* factors) {
      SplitArgs args = split_args(operand, of_product, padded_k, part.second.transposed(),
                                  to != nullptr ? kernels.x : ScalarType::Float);
      args.split = to;
      args.factors = factors;
      args.least_sum = least_sum(plan);
      launch_split(kernels.split_rows, kernels.split_columns, args, planes, multiprocessors(),
                   kernels.loop.clusters, stream);
    };
    if (wish.exact) split(part.second, nullptr, work.other_factors);
    split(part.first, work.split, work.factors);

    LinearSplitArgs args = split_product_args(part.first, part.second, sizes, plan, of_product,
                                              work, parts, kernels.loop.stages);
    args.result = whole ? part.result : partial_result(work.partial, part.rows, sizes.n);
    args.precision_flag = kernels.precision->flag(call.sizes.all());
    args.bearable = call.bearable();
    args.guesses_flag = kernels.guesses->flag(call.sizes.all());
    args.transposed = part.weight_first;
    args.pairs = !whole || stores_pairs;
    LaunchOptions overlapped;
    overlapped.shared_bytes = kernels.loop.shared_bytes;
    overlapped.dependent = kernels.loop.clusters;
    launch((whole ? kernels.product : kernels.chunk)[part.second.transposed()], blocks,
           kernels.loop.threads, stream, args, overlapped);
    if (!whole) sum(part, plan, work, pitch);
  }

 private:
  int64_t multiprocessors() const { return kernels.rates.multiprocessors; }
  static Divisor<uint32_t> divisor(int64_t size) {
    return make_divisor(static_cast<uint32_t>(size));
  }

  void sum(const SplitPart& part, const SplitPlan& plan, const SplitWorkspace& work,
           int64_t pitch) const {
    const SplitSizes& sizes = part.sizes;
    const int64_t rows = sizes.batches * sizes.m;
    const int64_t count = rows * sizes.n;
    const LinearSumArgs args{work.partial,
                             part.result,
                             divisor(sizes.n),
                             divisor(sizes.m),
                             divisor(part.rows.inner),
                             static_cast<uint32_t>(count),
                             static_cast<int32_t>(rows),
                             static_cast<int32_t>(pitch),
                             static_cast<int32_t>(plan.chunks)};
    LaunchOptions overlapped;
    overlapped.dependent = kernels.loop.clusters;
    launch(kernels.sum, ceil_div(count, kSumThreads), kSumThreads, stream, args, overlapped);
  }
};

// out = epilogue(z) with z = x weightᵀ + bias, which is stored too if given. x is [*, K], weight
// [N, K]; or x [*, M, K] and weight [*, N, K] with equal leading sizes. Both are fp32, or one has
// the kernels' 16-bit type. Returns false, without a launch, if the kernels do not support these
// shapes or strides.
bool run_linear_split(const LinearSplitKernels& kernels, const Tensor& x, const Tensor& weight,
                      const std::optional<Tensor>& bias, const Tensor& out,
                      const std::optional<Tensor>& z, const EpilogueArgs& epilogue,
                      SplitWish wish = {}) {
  check_linear(kernels, ScalarType::Float, split_types(kernels, weight), x, weight, bias, out, z,
               epilogue);
  if (weight.size(-1) == 0) return false;
  if (out.numel() == 0) return true;

  std::vector<const Tensor*> tensors{&weight, &x, &out};
  if (z) tensors.push_back(&*z);
  for (const Tensor& operand : epilogue.tensors) tensors.push_back(&operand);
  const auto forced = forced_weight_first(kernels, weight);
  if (forced) wish.weight_first = forced;
  const auto call = SplitCall::of(out, tensors, kernels.rates, wish);
  if (!call) return false;
  // Kernels with a 16-bit operand cannot compute the other's scales; is_profitable has asked
  // `guesses` already.
  wish.exact = !forced && (kernels.guesses->takes_call(call->sizes.all()) || wish.exact);
  const SplitSizes& sizes = call->sizes;
  const SplitChoice& choice = call->choice;
  // A weight matrix has batches only if x's or the result's strides force them, which adds tiles.
  if (weight.dim() == 2 && sizes.batches > 1 && !call->is_profitable()) return false;
  const auto result = linear_result(call->rows, out, z, bias, epilogue);
  if (!result || !is_in_reach(choice.weight_first ? sizes.transposed() : sizes, choice.plan)) {
    return false;
  }

  const OnDevice on_device(out.get_device_index());
  const Stream stream = current_stream(out.get_device_index());
  SplitPart all{choice.weight_first ? call->weight : call->x,
                choice.weight_first ? call->x : call->weight,
                sizes,
                call->rows,
                *result,
                choice.weight_first};
  std::optional<Tensor> copy;
  if (!all.second.is_taken_as_it_lies()) {
    copy = all.second.move_to_aligned_lines(kernels.copy_rows, x, stream);
  }
  const SplitLaunch launch{
      kernels, *call, wish, x, is_stored_in_pairs(*result, sizes.n, out.element_size()), stream};
  const int64_t padded_k = ceil_div(sizes.k, kLinearTileK) * kLinearTileK;
  const int64_t at_once = rows_at_once(choice.weight_first ? sizes.transposed() : sizes,
                                       split_parts(kernels) * 2 * padded_k, kernels.rates);
  if (at_once >= all.first.rows) {
    launch.run(all);
    return true;
  }
  PlaceSizes bytes{};
  bytes[LinearResult::kOut] = static_cast<int64_t>(out.element_size());
  bytes[LinearResult::kZ] = sizeof(float);
  for (size_t i = 0; i < epilogue.tensors.size(); ++i) {
    bytes[LinearResult::kFirstOperand + i] =
        static_cast<int64_t>(epilogue.tensors[i].element_size());
  }
  const int64_t size = kernels.x == ScalarType::Float ? 4 : 2;
  for (int64_t row = 0; row < all.first.rows; row += at_once) {
    launch.run(all.of_rows(row, std::min(at_once, all.first.rows - row), size, bytes));
  }
  return true;
}

bool LinearSplitKernels::is_profitable(const Tensor& x, const Tensor& weight) const {
  const auto forced = forced_weight_first(*this, weight);
  const auto call = SplitCall::of(x, {&weight, &x}, rates, {0, forced});
  if (!call || !call->is_profitable()) return false;
  // The streamed operand's scales are guessed; if they are often wrong, the roles cannot be swapped
  // and the scales cannot be computed ahead.
  if (forced && guesses->takes_call(call->sizes.all())) return false;
  return !precision->takes_call(call->sizes.all());
}

bool LinearSplitKernels::run(const Tensor& x, const Tensor& weight,
                             const std::optional<Tensor>& bias, const Tensor& y,
                             const std::optional<Tensor>& c, const EpilogueArgs& args) const {
  return run_linear_split(*this, x, weight, bias, y, c, args);
}

void reset_linear_split(int64_t handle) {
  const auto& kernels = *reinterpret_cast<const LinearSplitKernels*>(handle);
  kernels.precision->reset();
  kernels.guesses->reset();
}

}  // namespace
}  // namespace fx_fuser
