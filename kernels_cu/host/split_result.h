// The split product's result: addresses and strides of it, its operands and partial sums.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "host/device.h"
#include "host/epilogue_args.h"
#include "host/split_operands.h"
#include "host/split_plan.h"
#include "linear/linear_split_args.h"

namespace fx_fuser {
namespace {

// Addresses and strides of the result and the operands, the third and later tensors of `rows`.
std::optional<LinearResult> linear_result(const MergedRows& rows, const Tensor& out,
                                          const std::optional<Tensor>& z,
                                          const std::optional<Tensor>& bias,
                                          const EpilogueArgs& epilogue) {
  LinearResult result{};
  int next = 2;
  const bool whole = out.size(-1) % kLinearVector == 0;
  const auto place = [&](const Tensor& tensor, int i, int64_t along_columns) {
    const MergedRows::Strides& stride = rows.of[next++];
    const auto bytes = static_cast<int64_t>(tensor.element_size());
    result.place[i] = {tensor.data_ptr(), {0, stride.outer * bytes, stride.inner * bytes}};
    const int64_t vector = std::min<int64_t>(kLinearVector * bytes, 16);
    const bool aligned = reinterpret_cast<uintptr_t>(tensor.data_ptr()) % vector == 0 &&
                         stride.outer * bytes % vector == 0 && stride.inner * bytes % vector == 0 &&
                         stride.row * bytes % vector == 0;
    if (whole && aligned && along_columns == 1) result.vectors |= 1u << i;
    return stride.row;
  };
  const auto is_dense = [](const Tensor& tensor) { return stride_along(tensor, -1) == 1; };
  if (!is_dense(out) || (z && !is_dense(*z)) || (bias && !is_dense(*bias))) return std::nullopt;
  result.out_stride = place(out, LinearResult::kOut, 1);
  if (z) {
    result.z_stride = place(*z, LinearResult::kZ, 1);
  } else {
    result.vectors |= 1u << LinearResult::kZ;
  }
  for (size_t i = 0; i < epilogue.tensors.size(); ++i) {
    const Tensor& operand = epilogue.tensors[i];
    const bool has_columns = operand.dim() > 0 && operand.size(-1) != 1;
    result.operand[i].n = has_columns ? operand.stride(-1) : 0;
    result.operand[i].m =
        place(operand, LinearResult::kFirstOperand + static_cast<int>(i), result.operand[i].n);
  }
  result.bias = bias ? static_cast<const float*>(bias->data_ptr()) : nullptr;
  std::copy(epilogue.scalars.begin(), epilogue.scalars.end(), result.scalar);
  return result;
}

// Row pitch of partial sums, in elements: even, so that pairs can be stored together.
int64_t partial_pitch(int64_t columns) { return ceil_div(columns, 2) * 2; }

// The chunks' partial sums, [chunk, outer, inner, row, pitch].
LinearResult partial_result(float* partial, const MergedRows& rows, int64_t columns) {
  LinearResult result{};
  const int64_t pitch = partial_pitch(columns);
  const int64_t bytes = rows.rows * pitch * 4;
  result.place[LinearResult::kOut] = {partial, {rows.batches() * bytes, rows.inner * bytes, bytes}};
  result.out_stride = pitch;
  return result;
}

// True if two adjacent elements of the result can always be stored together.
bool is_stored_in_pairs(const LinearResult& result, int64_t columns, int64_t element_size) {
  const LinearPlace& out = result.place[LinearResult::kOut];
  const int64_t bytes = 2 * element_size;
  return columns % 2 == 0 && result.out_stride % 2 == 0 && out.plane.outer % bytes == 0 &&
         out.plane.inner % bytes == 0 && reinterpret_cast<uintptr_t>(out.data) % bytes == 0;
}

}  // namespace
}  // namespace fx_fuser
