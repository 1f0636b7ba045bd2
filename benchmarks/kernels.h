// Ops that launch one kernel on existing tensors, for benchmarks and tests: kernels.py says what
// they do. They take the handles that the shim's `load` returns. Graphs call fx_fuser::run.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "host/attention_backward.h"
#include "host/attention_bias.h"
#include "host/attention_bias_backward.h"
#include "host/attention_split.h"
#include "host/conv1d.h"
#include "host/conv_direct.h"
#include "host/conv_direct_backward.h"
#include "host/depthwise.h"
#include "host/depthwise_gradients.h"
#include "host/grouped_gradients.h"
#include "host/implicit.h"
#include "host/linear_combs.h"
#include "host/linear_dense.h"
#include "host/linear_split.h"
#include "host/linear_unaligned.h"
#include "host/stem.h"

namespace fx_fuser {
namespace {

template <class Kernels>
const Kernels& kernels_of(int64_t handle) {
  return *reinterpret_cast<const Kernels*>(handle);
}

// chunks: 0: as many as are fastest. first: "x", "weight" or "", the faster of the two. exact: no
// scales are guessed.
bool linear_split(int64_t handle, const Tensor& x, const Tensor& weight,
                  const std::optional<Tensor>& bias, const Tensor& out,
                  const std::optional<Tensor>& z, const std::vector<Tensor>& operands,
                  const std::vector<double>& scalars, int64_t chunks, const std::string& first,
                  bool exact) {
  SplitWish wish{chunks, std::nullopt, exact};
  if (!first.empty()) wish.weight_first = first == "weight";
  return run_linear_split(kernels_of<LinearSplitKernels>(handle), x, weight, bias, out, z,
                          {operands, scalars}, wish);
}

// sizes: batches, m, n, k of operands that need no copy. Returns into how many chunks k is divided,
// and 1 if the weight is split first, otherwise 0; then the modelled nanoseconds of that and of the
// library. Needs no GPU.
std::vector<int64_t> linear_split_choice(const std::vector<int64_t>& sizes,
                                         const std::vector<double>& given) {
  STD_TORCH_CHECK(sizes.size() == 4, "fx_fuser: ", to_string(sizes), " are not batches, m, n, k");
  for (const int64_t size : sizes) {
    STD_TORCH_CHECK(size > 0, "fx_fuser: no product has the sizes ", to_string(sizes));
  }
  const SplitRates rates = SplitRates::of(given);
  const SplitSizes product{sizes[0], sizes[1], sizes[2], sizes[3]};
  const SplitChoice choice = split_choice(product, {}, rates);
  const auto nanoseconds = [](double seconds) { return static_cast<int64_t>(1e9 * seconds); };
  return {choice.plan.chunks, choice.weight_first, nanoseconds(choice.seconds),
          nanoseconds(library_seconds(product, rates))};
}

bool linear_dense(int64_t handle, const Tensor& x, const Tensor& weight,
                  const std::optional<Tensor>& bias, const Tensor& out,
                  const std::optional<Tensor>& z, const std::vector<Tensor>& operands,
                  const std::vector<double>& scalars) {
  return run_linear_dense(kernels_of<LinearDenseKernels>(handle), x, weight, bias, out, z,
                          {operands, scalars});
}

bool linear_unaligned(int64_t handle, const Tensor& x, const Tensor& weight,
                      const std::optional<Tensor>& bias, const Tensor& out,
                      const std::optional<Tensor>& z, const std::vector<Tensor>& operands,
                      const std::vector<double>& scalars) {
  return run_linear_unaligned(kernels_of<LinearUnalignedKernels>(handle), x, weight, bias, out, z,
                              {operands, scalars});
}

bool linear_combs(int64_t handle, const Tensor& x, const Tensor& weight,
                  const std::optional<Tensor>& bias, const Tensor& out,
                  const std::optional<Tensor>& z, const std::vector<Tensor>& operands,
                  const std::vector<double>& scalars) {
  return run_linear_combs(kernels_of<LinearCombsKernels>(handle), x, weight, bias, out, z,
                          {operands, scalars});
}

bool conv_direct(int64_t handle, const Tensor& x, const Tensor& weight,
                 const std::vector<int64_t>& padding, const Tensor& out,
                 const std::optional<Tensor>& c, const std::vector<Tensor>& operands,
                 const std::vector<double>& scalars) {
  return run_conv_direct(kernels_of<ConvDirectKernels>(handle), x, weight, padding, out, c,
                         {operands, scalars});
}

bool conv_direct_statistics(int64_t handle, int64_t batch_stats_handle, const Tensor& x,
                            const Tensor& weight, const std::vector<int64_t>& padding,
                            const Tensor& mean, const Tensor& variance) {
  return run_conv_direct_statistics(kernels_of<ConvDirectKernels>(handle),
                                    kernels_of<StatsLibrary>(batch_stats_handle), x, weight,
                                    padding, mean, variance);
}

bool conv_direct_backward(int64_t handle, const Tensor& dy, const Tensor& x, const Tensor& weight,
                          const std::vector<int64_t>& padding, const std::optional<Tensor>& mean,
                          const std::optional<Tensor>& variance, const std::optional<Tensor>& gamma,
                          const std::optional<Tensor>& bias, double eps, bool training,
                          const std::optional<Tensor>& dx, const std::optional<Tensor>& dweight,
                          const Tensor& dgamma, const Tensor& dbeta,
                          const std::vector<Tensor>& operands, const std::vector<double>& scalars) {
  const Norm norm{bias, mean, variance, gamma, {}, eps, training};
  const ConvGradients to{dx, dweight, {}, dgamma, dbeta};
  return run_conv_direct_backward(kernels_of<ConvBackwardKernels>(handle), dy, x, weight, padding,
                                  norm, to, {operands, scalars});
}

bool depthwise(int64_t handle, const Tensor& x, const Tensor& weight,
               const std::vector<int64_t>& padding, const Tensor& out,
               const std::optional<Tensor>& c, const std::vector<Tensor>& operands,
               const std::vector<double>& scalars) {
  return run_depthwise(kernels_of<DepthwiseKernels>(handle), x, weight, padding, out, c,
                       {operands, scalars});
}

bool stem(int64_t handle, const Tensor& x, const Tensor& weight, const std::vector<int64_t>& stride,
          const std::vector<int64_t>& padding, const std::optional<Tensor>& out,
          const std::optional<Tensor>& c, const std::vector<Tensor>& operands,
          const std::vector<double>& scalars) {
  const auto& kernels = kernels_of<StemKernels>(handle);
  const auto call = stem_call(kernels, x, weight, stride, padding);
  if (call) run_stem(kernels, *call, out, c, {operands, scalars});
  return call.has_value();
}

bool implicit(int64_t handle, const Tensor& x, const Tensor& weight,
              const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
              const std::vector<int64_t>& dilation, const Tensor& out,
              const std::optional<Tensor>& c, const std::vector<Tensor>& operands,
              const std::vector<double>& scalars) {
  const auto& kernels = kernels_of<ImplicitKernels>(handle);
  check_conv(kernels.x, x, weight, padding);
  const ImplicitWindow window = implicit_window(x, weight, stride, padding, dilation);
  return run_implicit(kernels, x, weight, window, out, c, {operands, scalars});
}

bool grouped(int64_t handle, const Tensor& x, const Tensor& weight,
             const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
             const std::vector<int64_t>& dilation, int64_t groups, const Tensor& out,
             const std::optional<Tensor>& c, const std::vector<Tensor>& operands,
             const std::vector<double>& scalars, const std::vector<int64_t>& tile) {
  const auto& kernels = kernels_of<GroupedKernels>(handle);
  check_conv(kernels.x, x, weight, padding, groups);
  const GroupedWindow of{implicit_window(x, weight, stride, padding, dilation), groups};
  return run_grouped(kernels, x, weight, of, out, c, {operands, scalars}, tile);
}

bool grouped_input(int64_t handle, const Tensor& dz, const Tensor& weight,
                   const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                   const std::vector<int64_t>& dilation, int64_t groups, const Tensor& dx) {
  const GroupedWindow of{implicit_window(dx, weight, stride, padding, dilation), groups};
  return run_grouped_input(kernels_of<GroupedKernels>(handle), dz, weight, of, dx);
}

bool grouped_weight(int64_t handle, const Tensor& x, const Tensor& dz,
                    const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
                    const std::vector<int64_t>& dilation, int64_t groups, const Tensor& dw,
                    const std::vector<int64_t>& tile) {
  const GroupedWindow of{implicit_window(x, dw, stride, padding, dilation), groups};
  return run_grouped_weight(kernels_of<GroupedWeightKernels>(handle), x, dz, of, dw, tile);
}

bool attention_split(int64_t handle, const Tensor& q, const Tensor& k, const Tensor& v,
                     const Tensor& out, const std::optional<Tensor>& lse, double scale,
                     bool is_causal, const std::optional<Tensor>& seed, double dropout) {
  return run_attention_split(kernels_of<AttentionSplitKernels>(handle), q, k, v, out, lse, scale,
                             is_causal, {seed, dropout});
}

// tensors: q, k, v, bias. alone: no clusters of blocks.
bool attention_bias(int64_t handle, const std::vector<Tensor>& tensors, const Tensor& out,
                    const std::optional<Tensor>& lse, double scale, bool is_causal, bool alone,
                    const std::optional<Tensor>& seed, double dropout) {
  STD_TORCH_CHECK(tensors.size() == 4, "fx_fuser: attention with a bias takes 4 tensors");
  const AttentionBiasCall call{tensors[0], tensors[1], tensors[2],      tensors[3],
                               scale,      is_causal,  {seed, dropout}, alone};
  return run_attention_bias(kernels_of<AttentionBiasKernels>(handle), call, out, lse);
}

// tensors: q, k, v, bias, out, lse, dO, workspace for the queries. to: dq, dk, dv and, if
// wanted, the bias's.
bool attention_bias_backward(int64_t handle, const std::vector<Tensor>& tensors,
                             const std::vector<Tensor>& to, double scale, bool is_causal,
                             bool alone, const std::optional<Tensor>& seed, double dropout) {
  STD_TORCH_CHECK(tensors.size() == 8 && (to.size() == 3 || to.size() == 4),
                  "fx_fuser: the backward of attention with a bias takes 8 tensors");
  const AttentionBiasCall call{tensors[0], tensors[1], tensors[2],      tensors[3],
                               scale,      is_causal,  {seed, dropout}, alone};
  std::optional<Tensor> d_bias;
  if (to.size() == 4) d_bias = to[3];
  const AttentionBiasGradients gradients{call,  tensors[4], tensors[5], tensors[6], tensors[7],
                                         to[0], to[1],      to[2],      d_bias};
  return run_attention_bias_backward(kernels_of<AttentionBiasBackwardKernels>(handle), gradients);
}

// tensors: q, k, v, out, lse, dO, workspace for the queries. to: dq, and dk and dv of each
// query head.
bool attention_backward(int64_t handle, const std::vector<Tensor>& tensors,
                        const std::vector<Tensor>& to, double scale, bool is_causal,
                        const std::optional<Tensor>& seed, double dropout) {
  STD_TORCH_CHECK(tensors.size() == 7 && to.size() == 3,
                  "fx_fuser: attention's backward takes 7 tensors, and makes 3");
  const DropoutOfWeights of_weights{seed, dropout};
  const AttentionGradients call{tensors[0], tensors[1], tensors[2], tensors[3], tensors[4],
                                tensors[5], tensors[6], to[0],      to[1],      to[2],
                                scale,      is_causal,  of_weights};
  return run_attention_backward(kernels_of<AttentionBackwardKernels>(handle), call);
}

}  // namespace

bool conv1d(int64_t handle, const Tensor& x, const Tensor& weight,
            const std::optional<Tensor>& bias, const Tensor& z, int64_t padding) {
  return run_conv1d(kernels_of<Conv1dKernels>(handle), x, weight, bias, z, padding);
}

bool conv1d_weight(int64_t handle, const Tensor& x, const Tensor& dz, const Tensor& dw,
                   int64_t padding) {
  return run_conv1d_weight(kernels_of<Conv1dWeightKernels>(handle), x, dz, dw, padding);
}

bool depthwise_turned(int64_t handle, const Tensor& x, const Tensor& weight,
                      const std::vector<int64_t>& padding, const Tensor& out) {
  return run_depthwise(kernels_of<DepthwiseKernels>(handle), x, weight, padding, out, std::nullopt,
                       {{}, {}}, /*turned=*/true);
}

bool depthwise_input(int64_t handle, const Tensor& dz, const Tensor& weight,
                     const std::vector<int64_t>& padding, const Tensor& dx) {
  return run_depthwise_input(kernels_of<DepthwiseInputKernels>(handle), dz, weight, dx, padding);
}

bool depthwise_weight(int64_t handle, const Tensor& x, const Tensor& dz,
                      const std::vector<int64_t>& padding, const Tensor& dw) {
  return run_depthwise_weight(kernels_of<DepthwiseWeightKernels>(handle), x, dz, dw, padding);
}

STABLE_TORCH_LIBRARY_FRAGMENT(fx_fuser_bench, m) {
  m.def(
      "linear_split(int kernels, Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out, "
      "Tensor(b!)? z, Tensor[] operands, float[] scalars, int chunks, str first, bool exact) -> "
      "bool");
  m.def("linear_split_choice(int[] sizes, float[] rates) -> int[]");
  m.def(
      "linear_dense(int kernels, Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out, "
      "Tensor(b!)? z, Tensor[] operands, float[] scalars) -> bool");
  m.def(
      "linear_unaligned(int kernels, Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out, "
      "Tensor(b!)? z, Tensor[] operands, float[] scalars) -> bool");
  m.def(
      "linear_combs(int kernels, Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out, "
      "Tensor(b!)? z, Tensor[] operands, float[] scalars) -> bool");
  m.def(
      "conv_direct(int kernels, Tensor x, Tensor weight, int[] padding, Tensor(a!) out, "
      "Tensor(b!)? c, Tensor[] operands, float[] scalars) -> bool");
  m.def(
      "conv_direct_statistics(int kernels, int batch_stats, Tensor x, Tensor weight, "
      "int[] padding, Tensor(a!) mean, Tensor(b!) variance) -> bool");
  m.def(
      "conv_direct_backward(int kernels, Tensor dy, Tensor x, Tensor weight, int[] padding, "
      "Tensor? mean, Tensor? variance, Tensor? gamma, Tensor? bias, float eps, bool training, "
      "Tensor(a!)? dx, Tensor(b!)? dweight, Tensor(c!) dgamma, Tensor(d!) dbeta, "
      "Tensor[] operands, float[] scalars) -> bool");
  m.def(
      "depthwise(int kernels, Tensor x, Tensor weight, int[] padding, Tensor(a!) out, "
      "Tensor(b!)? c, Tensor[] operands, float[] scalars) -> bool");
  m.def(
      "depthwise_turned(int kernels, Tensor x, Tensor weight, int[] padding, Tensor(a!) out) -> "
      "bool");
  m.def(
      "depthwise_input(int kernels, Tensor dz, Tensor weight, int[] padding, Tensor(a!) dx) -> "
      "bool");
  m.def("depthwise_weight(int kernels, Tensor x, Tensor dz, int[] padding, Tensor(a!) dw) -> bool");
  m.def(
      "stem(int kernels, Tensor x, Tensor weight, int[] stride, int[] padding, Tensor(a!)? out, "
      "Tensor(b!)? c, Tensor[] operands, float[] scalars) -> bool");
  m.def(
      "implicit(int kernels, Tensor x, Tensor weight, int[] stride, int[] padding, "
      "int[] dilation, Tensor(a!) out, Tensor(b!)? c, Tensor[] operands, float[] scalars) -> bool");
  m.def(
      "grouped(int kernels, Tensor x, Tensor weight, int[] stride, int[] padding, int[] dilation, "
      "int groups, Tensor(a!) out, Tensor(b!)? c, Tensor[] operands, float[] scalars, int[] tile) "
      "-> bool");
  m.def(
      "grouped_input(int kernels, Tensor dz, Tensor weight, int[] stride, int[] padding, "
      "int[] dilation, int groups, Tensor(a!) dx) -> bool");
  m.def(
      "grouped_weight(int kernels, Tensor x, Tensor dz, int[] stride, int[] padding, "
      "int[] dilation, int groups, Tensor(a!) dw, int[] tile) -> bool");
  m.def(
      "attention_split(int kernels, Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!)? lse, "
      "float scale, bool is_causal, Tensor? seed, float dropout) -> bool");
  m.def(
      "attention_backward(int kernels, Tensor[] tensors, Tensor(a!)[] to, float scale, "
      "bool is_causal, Tensor? seed, float dropout) -> bool");
  m.def(
      "conv1d(int kernels, Tensor x, Tensor weight, Tensor? bias, Tensor(a!) z, int padding) -> "
      "bool");
  m.def("conv1d_weight(int kernels, Tensor x, Tensor dz, Tensor(a!) dw, int padding) -> bool");
  m.def(
      "attention_bias(int kernels, Tensor[] tensors, Tensor(a!) out, Tensor(b!)? lse, float scale, "
      "bool is_causal, bool alone, Tensor? seed, float dropout) -> bool");
  m.def(
      "attention_bias_backward(int kernels, Tensor[] tensors, Tensor(a!)[] to, float scale, "
      "bool is_causal, bool alone, Tensor? seed, float dropout) -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(fx_fuser_bench, CompositeExplicitAutograd, m) {
  m.impl("linear_split", TORCH_BOX(&linear_split));
  m.impl("linear_split_choice", TORCH_BOX(&linear_split_choice));
  m.impl("linear_dense", TORCH_BOX(&linear_dense));
  m.impl("linear_unaligned", TORCH_BOX(&linear_unaligned));
  m.impl("linear_combs", TORCH_BOX(&linear_combs));
  m.impl("conv_direct", TORCH_BOX(&conv_direct));
  m.impl("conv_direct_statistics", TORCH_BOX(&conv_direct_statistics));
  m.impl("conv_direct_backward", TORCH_BOX(&conv_direct_backward));
  m.impl("depthwise", TORCH_BOX(&depthwise));
  m.impl("depthwise_turned", TORCH_BOX(&depthwise_turned));
  m.impl("depthwise_input", TORCH_BOX(&depthwise_input));
  m.impl("depthwise_weight", TORCH_BOX(&depthwise_weight));
  m.impl("stem", TORCH_BOX(&stem));
  m.impl("implicit", TORCH_BOX(&implicit));
  m.impl("grouped", TORCH_BOX(&grouped));
  m.impl("grouped_input", TORCH_BOX(&grouped_input));
  m.impl("grouped_weight", TORCH_BOX(&grouped_weight));
  m.impl("attention_split", TORCH_BOX(&attention_split));
  m.impl("attention_backward", TORCH_BOX(&attention_backward));
  m.impl("conv1d", TORCH_BOX(&conv1d));
  m.impl("conv1d_weight", TORCH_BOX(&conv1d_weight));
  m.impl("attention_bias", TORCH_BOX(&attention_bias));
  m.impl("attention_bias_backward", TORCH_BOX(&attention_bias_backward));
}

}  // namespace fx_fuser
