// fx_fuser::attention_backward on CUDA: with P the probabilities, computed again from lse,
//
//   dv = Pᵀ dout    dS = scale P (dout vᵀ - rowsum(dout out))    dq = dS k    dk = dSᵀ q
//
// five split products, two of them with P and dS as their epilogues' results.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "shim_attention.h"

namespace fx_fuser {
namespace {

enum Gradient : int64_t { kDq, kDk, kDv, kGradients };

struct BackwardKernels {
  const LinearSplitKernels& probability;
  const LinearSplitKernels& score_gradient;
  const LinearSplitKernels& product;
  const SoftmaxKernels& others;
};

// [..., rows] of evenly spaced rows as a column of each plane.
Tensor as_column(const Tensor& of_rows, int64_t rows) {
  return viewed(of_rows, {of_rows.size(0), of_rows.size(1), rows, 1},
                {of_rows.stride(0), of_rows.stride(1), of_rows.stride(2), 1});
}

Tensor new_row_dots(const SoftmaxKernels& kernels, const Tensor& a, const Tensor& b,
                    cudaStream_t stream) {
  const Tensor dots = new_dense(a, {a.size(0), a.size(1), a.size(2)}, ScalarType::Float);
  const auto operand = [](const Tensor& tensor) -> RowDotsArgs::Operand {
    return {static_cast<const float*>(tensor.data_ptr()), tensor.stride(0), tensor.stride(1),
            tensor.stride(2), tensor.stride(3)};
  };
  RowDotsArgs args{};
  args.a = operand(a);
  args.b = operand(b);
  args.dots = static_cast<float*>(dots.data_ptr());
  args.rows = make_divisor(static_cast<uint32_t>(a.size(2)));
  args.inner = make_divisor(static_cast<uint32_t>(a.size(1)));
  args.count = static_cast<uint32_t>(dots.numel());
  args.columns = static_cast<int32_t>(a.size(3));
  launch(kernels.row_dots, ceil_div(args.count, kAttentionThreads / 32), kAttentionThreads, stream,
         args);
  return dots;
}

// 0, 1, 2...: a key's number is at its own place, and how many keys a row sees one further on.
Tensor new_numbers(const SoftmaxKernels& kernels, const Tensor& like, int64_t count,
                   cudaStream_t stream) {
  const Tensor numbers = new_dense(like, {count}, ScalarType::Float);
  const CountArgs args{static_cast<float*>(numbers.data_ptr()), static_cast<uint32_t>(count)};
  launch(kernels.count, ceil_div(count, kAttentionThreads), kAttentionThreads, stream, args);
  return numbers;
}

struct Backward {
  const BackwardKernels& kernels;
  const Attention& call;
  const Tensor& dout;
  const Tensor& q;
  const Tensor& k;
  const Tensor& v;
  Tensor lse;   // a column, as dots
  Tensor dots;  // of dout and out
  std::optional<Tensor> numbers;
  std::vector<std::optional<Tensor>> gradients;  // by Gradient

  bool wants_scores() const { return gradients[kDq] || gradients[kDk]; }

  // P and, where it is asked for, dS of a block of rows, and with it the block's dq.
  bool rows_from(const Part& part, int64_t first, const Tensor& p, const Tensor& ds) const {
    const int64_t count = std::min(call.at_once, call.rows - first);
    const int64_t keys = std::min(call.keys, call.causal ? first + call.at_once : call.keys);
    const auto rows_of = [&](const Tensor& tensor) {
      return narrowed(part.of(tensor), 2, first, count);
    };
    const auto keys_of = [&](const Tensor& tensor) {
      return narrowed(part.of(tensor), 2, 0, keys);
    };
    const auto block_of = [&](const Tensor& scores) {
      return narrowed(narrowed(scores, 2, first, count), 3, 0, keys);
    };
    std::vector<Tensor> operands;
    std::vector<double> scalars{call.scale};
    if (call.bias) operands.push_back(narrowed(rows_of(*call.bias), 3, 0, keys));
    operands.push_back(rows_of(lse));
    if (call.causal) {
      operands.push_back(viewed(*numbers, {1, 1, count, 1}, {0, 0, 1, 1}, first + 1));
      operands.push_back(viewed(*numbers, {keys}, {1}));
      scalars.push_back(0);
    }
    if (!multiply(kernels.probability, rows_of(q), keys_of(k), block_of(p), operands, scalars)) {
      return false;
    }
    if (!wants_scores()) return true;
    if (!multiply(kernels.score_gradient, rows_of(dout), keys_of(v), block_of(ds),
                  {block_of(p), rows_of(dots)}, {call.scale})) {
      return false;
    }
    if (!gradients[kDq]) return true;
    return multiply_scores(kernels.product, block_of(ds), transposed(keys_of(k)),
                           rows_of(*gradients[kDq]));
  }

  // dk and dv of a block of keys: of all rows that see them.
  bool keys_from(const Part& part, int64_t first, const Tensor& p, const Tensor& ds) const {
    const int64_t count = std::min(call.at_once, call.keys - first);
    const int64_t first_row = call.causal ? first : 0;
    const auto result_of = [&](Gradient which) {
      return narrowed(part.of(*gradients[which]), 2, first, count);
    };
    const auto of = [&](Gradient which, const Tensor& scores, const Tensor& by) {
      if (!gradients[which]) return true;
      Tensor result = result_of(which);
      if (first_row >= call.rows) {  // nobody sees them
        torch::stable::zero_(result);
        return true;
      }
      const int64_t rows = call.rows - first_row;
      const Tensor seen = narrowed(narrowed(scores, 2, first_row, rows), 3, first, count);
      return multiply_scores(kernels.product, transposed(seen),
                             transposed(narrowed(part.of(by), 2, first_row, rows)), result);
    };
    return of(kDv, p, dout) && of(kDk, ds, q);
  }
};

bool attention_backward_by_kernels(const Attention& call, const Tensor& dout, const Tensor& q,
                                   const Tensor& k, const Tensor& v, const Tensor& out,
                                   const Tensor& lse,
                                   const std::vector<std::optional<Tensor>>& gradients,
                                   const std::vector<std::string>& names) {
  make_sure_of(names, q);
  const int device = q.get_device_index();
  const BackwardKernels kernels{split_kernels(names.at(0), q), split_kernels(names.at(1), q),
                                split_kernels(names.at(2), q),
                                registry<SoftmaxKernels>().at(kSoftmax, device)};
  if (kernels.probability.precision->takes_any_call() ||
      kernels.score_gradient.precision->takes_any_call()) {
    return false;
  }
  const OnDevice on_device(device);
  const cudaStream_t stream = current_stream(device);
  const Tensor dots = new_row_dots(kernels.others, dout, out, stream);
  std::optional<Tensor> numbers;
  if (call.causal) {
    numbers = new_numbers(kernels.others, q, std::max(call.rows, call.keys) + 1, stream);
  }
  const Backward backward{
      kernels, call,     dout, q, k, v, as_column(lse, call.rows), as_column(dots, call.rows),
      numbers, gradients};
  const std::vector<Part> parts = call.parts(call.rows);
  const Tensor p_memory = call.memory_of_scores(q, parts[0].planes(), call.rows);
  const Tensor ds_memory = backward.wants_scores()
                               ? call.memory_of_scores(q, parts[0].planes(), call.rows)
                               : p_memory;  // not written
  for (const Part& part : parts) {
    const Tensor p = call.scores(p_memory, part, call.rows, call.keys);
    const Tensor ds = call.scores(ds_memory, part, call.rows, call.keys);
    for (int64_t first = 0; first < call.rows; first += call.at_once) {
      if (!backward.rows_from(part, first, p, ds)) return false;
    }
    for (int64_t first = 0; first < call.keys; first += call.at_once) {
      if (!backward.keys_from(part, first, p, ds)) return false;
    }
  }
  return true;
}

std::vector<Tensor> attention_backward(const Tensor& dout, const Tensor& q, const Tensor& k,
                                       const Tensor& v, const std::optional<Tensor>& bias,
                                       const Tensor& out, const Tensor& lse, bool causal,
                                       double scale, const std::vector<int64_t>& wanted,
                                       const std::vector<std::string>& kernels) {
  const Attention call(q, k, v, bias, causal, scale, kBackwardDivision);
  const auto like_out = [&](const Tensor& tensor) {
    return tensor.dim() == 4 && tensor.size(0) == call.batches && tensor.size(1) == call.heads &&
           tensor.size(2) == call.rows && tensor.size(3) == call.v_columns &&
           tensor.scalar_type() == ScalarType::Float && tensor.is_cuda() &&
           tensor.get_device_index() == q.get_device_index();
  };
  STD_TORCH_CHECK(kernels.size() == 3, "fx_fuser: attention_backward needs 3 kernels, not ",
                  kernels.size());
  STD_TORCH_CHECK(like_out(dout) && like_out(out), "fx_fuser: an attention of q ",
                  to_string(q.sizes()), " and v ", to_string(v.sizes()), " has no result ",
                  to_string(out.sizes()), " with gradient ", to_string(dout.sizes()),
                  " in float32");
  STD_TORCH_CHECK(lse.dim() == 3 && lse.size(0) == call.batches && lse.size(1) == call.heads &&
                      lse.size(2) >= call.rows && lse.scalar_type() == ScalarType::Float,
                  "fx_fuser: lse of shape ", to_string(lse.sizes()), " does not fit q ",
                  to_string(q.sizes()));
  std::vector<std::optional<Tensor>> gradients(kGradients);
  std::vector<Tensor> found;
  if (call.is_in_reach()) {
    for (const int64_t which : wanted) {
      STD_TORCH_CHECK(which >= 0 && which < kGradients, "fx_fuser: no gradient has the number ",
                      which);
      gradients[which] = new_heads(q, call, which == kDq ? call.rows : call.keys,
                                   which == kDv ? call.v_columns : call.columns);
      found.push_back(*gradients[which]);
    }
    if (attention_backward_by_kernels(call, dout, q, k, v, out, lse, gradients, kernels)) {
      return found;
    }
  }
  return call_in_torch("fx_fuser::attention_backward_in_torch", dout, q, k, v, bias, out, lse,
                       causal, scale, wanted, kernels);
}

}  // namespace
}  // namespace fx_fuser
