// Attention as graphs call it: allocates results with torch's layouts and calls the kernels.
// fx_fuser/ops/attention_split.py and the folder attention_bias document the arguments.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <vector>

#include "host/attention_backward.h"
#include "host/attention_bias.h"
#include "host/attention_bias_backward.h"
#include "host/attention_split.h"
#include "host/attention_window.h"
#include "host/made.h"

namespace fx_fuser {
namespace {

// The kernels of this name. Loads them on first use; null if that fails.
template <class Kernels>
const Kernels* attention_kernels(const std::string& name, const Tensor& q) {
  return kernels_named<Kernels>(name, q, "fx_fuser::load_attention");
}

// A tensor [batch, head, row, element] with q's batches, heads and elements; its memory order is
// [batch, row, head, element].
Tensor new_heads(const Tensor& q, int64_t rows) {
  const int64_t heads = q.size(1);
  const int64_t d = q.size(3);
  const std::array<int64_t, 4> sizes{q.size(0), heads, rows, d};
  const std::array<int64_t, 4> strides{rows * heads * d, d, heads * d, 1};
  return new_strided(q, sizes.data(), strides.data(), sizes.size(), q.scalar_type());
}

// out and, if `save`, lse. std::nullopt if the kernel does not support these tensors.
std::optional<Made> make_attention(const Tensor& q, const Tensor& k, const Tensor& v,
                                   const std::string& kernel, double scale, bool is_causal,
                                   bool save, const std::optional<Tensor>& seed, double dropout) {
  const auto* kernels = attention_kernels<AttentionSplitKernels>(kernel, q);
  if (kernels == nullptr) return std::nullopt;
  const Tensor out = new_heads(q, q.size(2));
  std::optional<Tensor> lse;
  if (save) {
    lse = new_dense(q, {q.size(0), q.size(1), padded_lse(q.size(2))}, ScalarType::Float);
  }
  const DropoutOfWeights of_weights{seed, dropout};
  if (!run_attention_split(*kernels, q, k, v, out, lse, scale, is_causal, of_weights)) {
    return std::nullopt;
  }
  return Made(out, lse);
}

// dq, and dk and dv per query head. std::nullopt if the kernel does not support these tensors.
std::optional<Made> make_attention_backward(const Tensor& d_out, const Tensor& q, const Tensor& k,
                                            const Tensor& v, const Tensor& out, const Tensor& lse,
                                            const std::string& kernel, double scale, bool is_causal,
                                            const std::optional<Tensor>& seed, double dropout) {
  const auto* kernels = attention_kernels<AttentionBackwardKernels>(kernel, q);
  if (kernels == nullptr) return std::nullopt;
  const Tensor d_q = new_heads(q, q.size(2));
  const Tensor d_k = new_heads(q, k.size(2));
  const Tensor d_v = new_heads(q, k.size(2));
  const Tensor of_queries = new_dense(
      q, {q.size(0), q.size(1), padded_queries(q), kAttentionQueryFloats}, ScalarType::Float);
  const DropoutOfWeights of_weights{seed, dropout};
  const AttentionGradients call{q,   k,   v,   out,   lse,       d_out,     of_queries,
                                d_q, d_k, d_v, scale, is_causal, of_weights};
  if (!run_attention_backward(*kernels, call)) return std::nullopt;
  return Made(std::vector<Tensor>{d_q, d_k, d_v});
}

// ---- with a bias --------------------------------------------------------------------------------

std::optional<Made> make_attention_bias(const Tensor& q, const Tensor& k, const Tensor& v,
                                        const Tensor& bias, const std::string& kernel, double scale,
                                        bool is_causal, bool save,
                                        const std::optional<Tensor>& seed, double dropout) {
  const auto* kernels = attention_kernels<AttentionBiasKernels>(kernel, q);
  if (kernels == nullptr) return std::nullopt;
  const Tensor out = new_heads(q, q.size(2));
  std::optional<Tensor> lse;
  if (save) {
    lse = new_dense(q, {q.size(0), q.size(1), padded_lse(q.size(2))}, ScalarType::Float);
  }
  const AttentionBiasCall call{q, k, v, bias, scale, is_causal, {seed, dropout}};
  if (!run_attention_bias(*kernels, call, out, lse)) return std::nullopt;
  return Made(out, lse);
}

// Forms of a bias's gradient.
constexpr int64_t kOfBiasSummed = 1;  // summed over the batches and heads that share the bias
constexpr int64_t kOfBiasWhole = 2;   // of every batch and head

// A whole gradient has torch's layout: rows padded to a multiple of 16.
Tensor new_bias_gradient(const Tensor& q, const Tensor& bias, int64_t of_bias) {
  constexpr int64_t kPitch = 16;
  const bool whole = of_bias == kOfBiasWhole;
  const int64_t queries = bias.size(2);
  const int64_t keys = bias.size(3);
  const int64_t pitch = whole ? ceil_div(keys, kPitch) * kPitch : keys;
  const std::array<int64_t, 4> sizes{whole ? q.size(0) : bias.size(0),
                                     whole ? q.size(1) : bias.size(1), queries, keys};
  const std::array<int64_t, 4> strides{sizes[1] * queries * pitch, queries * pitch, pitch, 1};
  return new_strided(q, sizes.data(), strides.data(), sizes.size(), q.scalar_type());
}

std::optional<Made> make_attention_bias_backward(
    const Tensor& d_out, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bias,
    const Tensor& out, const Tensor& lse, const std::string& kernel, double scale, bool is_causal,
    int64_t of_bias, const std::optional<Tensor>& seed, double dropout) {
  const auto* kernels = attention_kernels<AttentionBiasBackwardKernels>(kernel, q);
  if (kernels == nullptr) return std::nullopt;
  const Tensor d_q = new_heads(q, q.size(2));
  const Tensor d_k = new_heads(q, k.size(2));
  const Tensor d_v = new_heads(q, k.size(2));
  std::optional<Tensor> d_bias;
  if (of_bias != 0) d_bias = new_bias_gradient(q, bias, of_bias);
  const Tensor of_queries =
      new_dense(q, {q.size(0), q.size(1), padded_bias_queries(q), 2}, ScalarType::Float);
  const AttentionBiasCall call{q, k, v, bias, scale, is_causal, {seed, dropout}};
  const AttentionBiasGradients gradients{call, out, lse, d_out, of_queries, d_q, d_k, d_v, d_bias};
  if (!run_attention_bias_backward(*kernels, gradients)) return std::nullopt;
  std::vector<Tensor> made{d_q, d_k, d_v};
  if (d_bias) made.push_back(*d_bias);
  return Made(std::move(made));
}

// ---- of windows ---------------------------------------------------------------------------------

std::optional<Made> make_attention_window(const Tensor& q, const Tensor& k, const Tensor& v,
                                          const Tensor& bias, const std::string& kernel,
                                          double scale, bool is_safe) {
  const auto* kernels = attention_kernels<AttentionWindowKernels>(kernel, q);
  if (kernels == nullptr) return std::nullopt;
  const Tensor out = new_heads(q, q.size(2));
  const AttentionWindowCall call{q, k, v, bias, scale, is_safe};
  if (!run_attention_window(*kernels, call, out)) return std::nullopt;
  return Made(out);
}

std::optional<Made> make_attention_window_backward(const Tensor& d_out, const Tensor& q,
                                                   const Tensor& k, const Tensor& v,
                                                   const Tensor& bias, const std::string& kernel,
                                                   double scale, bool is_safe, bool of_bias) {
  const auto* kernels = attention_kernels<AttentionWindowBackwardKernels>(kernel, q);
  if (kernels == nullptr) return std::nullopt;
  const Tensor d_q = new_heads(q, q.size(2));
  const Tensor d_k = new_heads(q, k.size(2));
  const Tensor d_v = new_heads(q, k.size(2));
  std::optional<Tensor> d_bias;
  if (of_bias) {
    d_bias =
        new_dense(q, {bias.size(0), bias.size(1), bias.size(2), bias.size(3)}, ScalarType::Float);
  }
  const AttentionWindowGradients gradients{d_out, d_q, d_k, d_v, d_bias};
  const AttentionWindowCall call{q, k, v, bias, scale, is_safe};
  if (!run_attention_window_backward(*kernels, call, gradients)) return std::nullopt;
  std::vector<Tensor> made{d_q, d_k, d_v};
  if (d_bias) made.push_back(*d_bias);
  return Made(std::move(made));
}

}  // namespace
}  // namespace fx_fuser
