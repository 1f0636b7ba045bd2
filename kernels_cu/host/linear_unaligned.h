// The gemm of unaligned 16-bit operands: checks, launch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "host/linear_split.h"
#include "linear/linear_unaligned_args.h"

namespace fx_fuser {
namespace {

struct LinearUnalignedKernels : GemmKernel, EpilogueTypes {
  Kernel kernel;
  UnalignedShape shape;
  int step_k;
  int form_a;
  int form_b;

  explicit LinearUnalignedKernels(const EpilogueTypes& types) : EpilogueTypes(types) {}

  // Chosen by measurement for these sizes; there is no cost model for others.
  bool is_profitable(const Tensor& /*x*/, const Tensor& /*weight*/) const override { return true; }
  bool run(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
           const Tensor& y, const std::optional<Tensor>& c,
           const EpilogueArgs& args) const override;
};

int64_t load_linear_unaligned(const Sources& from) {
  const Signature types(from, 4);
  types.check_operands(kMaxInputs - 1);
  const int shape = types.sizes[0];
  STD_TORCH_CHECK(shape >= 0 && shape < kUnalignedShapeCount,
                  "fx_fuser: the unaligned gemm has no shape ", shape);
  auto kernels = std::make_unique<LinearUnalignedKernels>(types);
  kernels->shape = kUnalignedShapes[shape];
  kernels->step_k = types.sizes[1];
  kernels->form_a = types.sizes[2];
  kernels->form_b = types.sizes[3];
  const int element_bytes = types.out == ScalarType::Float ? 4 : 2;
  kernels->kernel =
      get_kernel(load_library(from.cubins.at(0)), "fx_fuser_unaligned",
                 kernels->shape.shared_bytes(kUnalignedStages, kernels->step_k, element_bytes));
  return keep<GemmKernel, LinearUnalignedKernels>(from, std::move(kernels));
}
const AddLoader kLinearUnalignedLoader("linear_unaligned", load_linear_unaligned);

// The kernel's view of a tensor whose last dimensions are rows and k. stride: of the merged leading
// dimensions and rows. std::nullopt if the tensor does not have the form.
std::optional<UnalignedOperand> unaligned_operand(const Tensor& tensor, const MergedRows& merged,
                                                  const MergedRows::Strides& stride, int64_t rows,
                                                  int form) {
  const bool along_k = is_along_k(form);
  const int64_t k = tensor.size(-1);
  const int64_t stride_k = k == 1 ? 1 : tensor.stride(-1);
  if (along_k ? stride_k != 1 : rows > 1 && stride.row != 1) return std::nullopt;
  const int64_t lines = along_k ? rows : k;
  const int64_t line_size = along_k ? k : rows;
  const int64_t line_stride = lines == 1 ? 0 : along_k ? stride.row : stride_k;
  const int64_t steps[] = {stride.outer, stride.inner, line_stride};
  if (*std::min_element(std::begin(steps), std::end(steps)) < 0) return std::nullopt;
  const int64_t last = (merged.outer - 1) * stride.outer + (merged.inner - 1) * stride.inner +
                       (lines - 1) * line_stride + line_size - 1;
  const auto* data = static_cast<const uint8_t*>(tensor.data_ptr());
  const bool is_whole = std::all_of(std::begin(steps), std::end(steps),
                                    [](int64_t step) { return step % kUnalignedChunk == 0; });
  if (has_aligned_lines(form) && !(is_whole && is_aligned(data))) return std::nullopt;
  return UnalignedOperand{data, data + 2 * (last + 1), {stride.outer, stride.inner}, line_stride};
}

// out = epilogue(z) with z = x weightᵀ + bias, which is stored too if given. x is [*, K], weight
// [N, K]; or x [*, M, K] and weight [*, N, K] with equal leading sizes. Returns false, without a
// launch, if the kernel does not support these strides.
bool run_linear_unaligned(const LinearUnalignedKernels& kernels, const Tensor& x,
                          const Tensor& weight, const std::optional<Tensor>& bias,
                          const Tensor& out, const std::optional<Tensor>& z,
                          const EpilogueArgs& epilogue) {
  check_linear(kernels, kernels.x, {kernels.x, kernels.x}, x, weight, bias, out, z, epilogue);
  const int64_t n = weight.size(-2);
  const int64_t k = weight.size(-1);
  if (k == 0) return false;
  if (out.numel() == 0) return true;

  std::vector<const Tensor*> tensors{&weight, &x, &out};
  if (z) tensors.push_back(&*z);
  const size_t first_operand = tensors.size();
  for (const Tensor& operand : epilogue.tensors) tensors.push_back(&operand);
  const auto merged = merge_rows(out, tensors);
  if (!merged) return false;
  const auto is_dense = [&](const Tensor& tensor) {
    return tensor.size(-1) == 1 || tensor.stride(-1) == 1;
  };
  if (!is_dense(out) || (z && !is_dense(*z)) || (bias && !is_dense(*bias))) return false;
  MergedRows::Strides of_weight = merged->of[0];
  of_weight.row = n == 1 ? 0 : weight.stride(-2);
  const auto a = unaligned_operand(x, *merged, merged->of[1], merged->rows, kernels.form_a);
  const auto b = unaligned_operand(weight, *merged, of_weight, n, kernels.form_b);
  if (!a || !b) return false;

  const UnalignedShape& shape = kernels.shape;
  constexpr int64_t kHighest = std::numeric_limits<int32_t>::max() - (1 << 16);
  const int64_t m_tiles = ceil_div(merged->rows, shape.tile_m());
  const int64_t tiles = m_tiles * ceil_div(n, shape.tile_n());
  if (merged->rows > kHighest || n > kHighest || k > kHighest || tiles > kHighest ||
      merged->batches() > kHighest / tiles) {
    return false;
  }
  UnalignedArgs args{};
  args.a = *a;
  args.b = *b;
  const auto result = [&](const Tensor& tensor, size_t place) {
    const MergedRows::Strides& stride = merged->of[place];
    return UnalignedResult{tensor.data_ptr(), {stride.outer, stride.inner}, stride.row};
  };
  args.out = result(out, 2);
  if (z) args.c = result(*z, 3);
  args.bias = bias ? bias->data_ptr() : nullptr;
  for (size_t i = 0; i < epilogue.tensors.size(); ++i) {
    const Tensor& operand = epilogue.tensors[i];
    const MergedRows::Strides& stride = merged->of[first_operand + i];
    const bool along_n = operand.dim() > 0 && operand.size(-1) != 1;
    args.operand[i] = {operand.data_ptr(),
                       {stride.outer, stride.inner, stride.row, along_n ? operand.stride(-1) : 0}};
  }
  std::copy(epilogue.scalars.begin(), epilogue.scalars.end(), args.scalar);
  args.m = static_cast<int32_t>(merged->rows);
  args.n = static_cast<int32_t>(n);
  args.k = static_cast<int32_t>(k);
  args.inner = make_divisor(static_cast<uint32_t>(merged->inner));
  args.m_tiles = static_cast<int32_t>(m_tiles);
  args.tiles = make_divisor(static_cast<uint32_t>(tiles));

  const int64_t stages = std::min<int64_t>(ceil_div(k, kernels.step_k), kUnalignedStages);
  const int widest = static_cast<int>(std::max(out.element_size(), z ? z->element_size() : 0));
  LaunchOptions options;
  options.shared_bytes = shape.shared_bytes(static_cast<int>(stages), kernels.step_k, widest);
  const OnDevice on_device(out.get_device_index());
  launch(kernels.kernel, tiles * merged->batches(), shape.threads(),
         current_stream(out.get_device_index()), args, options);
  return true;
}

bool LinearUnalignedKernels::run(const Tensor& x, const Tensor& weight,
                                 const std::optional<Tensor>& bias, const Tensor& y,
                                 const std::optional<Tensor>& c, const EpilogueArgs& args) const {
  return run_linear_unaligned(*this, x, weight, bias, y, c, args);
}

}  // namespace
}  // namespace fx_fuser
