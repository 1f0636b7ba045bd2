// Losses of rows of logits, and their gradients: checks, launch.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <utility>

#include "host/kernel.h"
#include "loss/head_loss_args.h"

namespace fx_fuser {
namespace {

struct HeadLossKernels {
  Kernel in_place;
  Kernel kept;
  Kernel kept_unaligned;
  Kernel gradient;
  Kernel gradient_unaligned;
  ScalarType logits;
  bool has_tail;
};

int64_t load_head_loss(const Sources& from, bool has_tail) {
  const Signature types(from);
  types.check_operands(0);
  Library library = load_library(from.cubins.at(0));
  auto kernels = std::make_unique<HeadLossKernels>(HeadLossKernels{
      get_kernel(library, "fx_fuser_head_loss"), get_kernel(library, "fx_fuser_head_loss_kept"),
      get_kernel(library, "fx_fuser_head_loss_kept_unaligned"),
      get_kernel(library, "fx_fuser_head_loss_gradient"),
      get_kernel(library, "fx_fuser_head_loss_gradient_unaligned"), types.x, has_tail});
  return keep<>(from, std::move(kernels));
}
const AddLoader kHeadLossLoader("head_loss",
                                [](const Sources& from) { return load_head_loss(from, false); });
const AddLoader kHeadLossTailLoader("head_loss_tail",
                                    [](const Sources& from) { return load_head_loss(from, true); });

LogitTail tail_of(const HeadLossKernels& kernels, double before, double after, double smoothing) {
  const bool is_plain = before == 1.0 && after == 0.0 && smoothing == 0.0;
  STD_TORCH_CHECK(kernels.has_tail || is_plain,
                  "fx_fuser: this kernel does not scale, cap or smooth");
  STD_TORCH_CHECK(0.0 <= smoothing && smoothing < 1.0,
                  "fx_fuser: label smoothing must be at least 0 and less than 1, not ", smoothing);
  return {static_cast<float>(before), static_cast<float>(after), static_cast<float>(smoothing)};
}

bool has_vectors(const Tensor& rows) {
  return reinterpret_cast<uintptr_t>(rows.data_ptr()) % 16 == 0 &&
         rows.stride(0) * rows.element_size() % 16 == 0;
}

void check_rows(const HeadLossKernels& kernels, const Tensor& rows, const char* what) {
  require_cuda(rows, what);
  const bool are_rows = rows.dim() == 2 && rows.size(1) > 0 &&
                        (rows.stride(1) == 1 || rows.size(1) == 1) &&
                        rows.scalar_type() == kernels.logits;
  STD_TORCH_CHECK(are_rows, "fx_fuser: ", what, " are ", to_string(rows.sizes()), " with strides ",
                  to_string(rows.strides()), " of ", toString(rows.scalar_type()), ", not rows of ",
                  toString(kernels.logits));
  // A block's last round counts beyond the last column.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - (1 << 16);
  STD_TORCH_CHECK(rows.size(1) <= kMost, "fx_fuser: ", rows.size(1), " columns of ", what,
                  " are more than the kernel counts");
}

// For what the kernels write gradients to: they store whole vectors of each row.
void check_padded_rows(const HeadLossKernels& kernels, const Tensor& rows, const char* what,
                       int64_t columns) {
  check_rows(kernels, rows, what);
  STD_TORCH_CHECK(columns > 0 && columns <= rows.size(1) && rows.size(1) == rows.stride(0),
                  "fx_fuser: ", what, " are not ", columns, " columns in dense rows");
  STD_TORCH_CHECK(has_vectors(rows), "fx_fuser: rows of ", what, " are not aligned to 16 bytes");
}

void check_one_a_row(const Tensor& given, const Tensor& logits, const char* what, ScalarType type,
                     int64_t count) {
  require_cuda(given, what);
  STD_TORCH_CHECK(given.scalar_type() == type && given.is_contiguous() &&
                      given.numel() == logits.size(0) * count,
                  "fx_fuser: ", what, " are not ", count, " ", toString(type), " per row");
}

void launch_rows(const Kernel& kernel, const Tensor& logits, const HeadLossArgs& args) {
  if (logits.size(0) == 0) return;
  const int device = logits.get_device_index();
  const OnDevice on_device(device);
  launch(kernel, logits.size(0), kHeadLossThreads, current_stream(device), args);
}

void head_loss(int64_t handle, const Tensor& logits, const Tensor& labels, const Tensor& losses,
               const std::optional<Tensor>& scale, int64_t columns, int64_t ignore_index,
               double before, double after, double smoothing) {
  const auto& kernels = *reinterpret_cast<const HeadLossKernels*>(handle);
  check_padded_rows(kernels, logits, "logits", columns);
  check_one_a_row(labels, logits, "labels", ScalarType::Long, 1);
  check_one_a_row(losses, logits, "losses", ScalarType::Float, 1);
  if (scale) {
    require_cuda(*scale, "scale");
    STD_TORCH_CHECK(scale->scalar_type() == ScalarType::Float && scale->numel() == 1,
                    "fx_fuser: the scale of gradients is not one float32");
  }
  HeadLossArgs args{};
  args.logits = args.gradient = logits.data_ptr();
  args.scale = scale ? static_cast<const float*>(scale->data_ptr()) : nullptr;
  args.labels = static_cast<const int64_t*>(labels.data_ptr());
  args.losses = static_cast<float*>(losses.data_ptr());
  args.pitch = logits.stride(0);
  args.gradient_pitch = static_cast<int32_t>(logits.stride(0));
  args.columns = static_cast<int32_t>(columns);
  args.ignore_index = ignore_index;
  args.tail = tail_of(kernels, before, after, smoothing);
  launch_rows(kernels.in_place, logits, args);
}

// Arguments of both kernels for logits that are kept.
HeadLossArgs kept_args(const HeadLossKernels& kernels, const Tensor& logits, const Tensor& sums,
                       const Tensor& labels, int64_t ignore_index, const LogitTail& tail) {
  check_rows(kernels, logits, "logits");
  check_one_a_row(sums, logits, "sums", ScalarType::Float, 2);
  check_one_a_row(labels, logits, "labels", ScalarType::Long, 1);
  HeadLossArgs args{};
  args.logits = logits.data_ptr();
  args.sums = static_cast<RowSums*>(sums.data_ptr());
  args.labels = static_cast<const int64_t*>(labels.data_ptr());
  args.pitch = logits.stride(0);
  args.columns = static_cast<int32_t>(logits.size(1));
  args.ignore_index = ignore_index;
  args.tail = tail;
  return args;
}

void head_loss_kept(int64_t handle, const Tensor& logits, const Tensor& labels,
                    const Tensor& losses, const Tensor& sums, int64_t ignore_index, double before,
                    double after, double smoothing) {
  const auto& kernels = *reinterpret_cast<const HeadLossKernels*>(handle);
  const LogitTail tail = tail_of(kernels, before, after, smoothing);
  HeadLossArgs args = kept_args(kernels, logits, sums, labels, ignore_index, tail);
  check_one_a_row(losses, logits, "losses", ScalarType::Float, 1);
  args.losses = static_cast<float*>(losses.data_ptr());
  launch_rows(has_vectors(logits) ? kernels.kept : kernels.kept_unaligned, logits, args);
}

void head_loss_gradient(int64_t handle, const Tensor& logits, const Tensor& sums,
                        const Tensor& labels, const Tensor& scale, const Tensor& hot,
                        const Tensor& gradient, int64_t ignore_index, double before, double after,
                        double smoothing) {
  const auto& kernels = *reinterpret_cast<const HeadLossKernels*>(handle);
  const LogitTail tail = tail_of(kernels, before, after, smoothing);
  HeadLossArgs args = kept_args(kernels, logits, sums, labels, ignore_index, tail);
  check_padded_rows(kernels, gradient, "gradients", logits.size(1));
  STD_TORCH_CHECK(gradient.size(0) == logits.size(0), "fx_fuser: gradients of ", gradient.size(0),
                  " rows, not of ", logits.size(0));
  check_one_a_row(scale, logits, "scales", ScalarType::Float, 1);
  check_one_a_row(hot, logits, "scales of labels", ScalarType::Float, 1);
  args.hot = static_cast<const float*>(hot.data_ptr());
  args.gradient = gradient.data_ptr();
  args.gradient_pitch = static_cast<int32_t>(gradient.stride(0));
  args.scale = static_cast<const float*>(scale.data_ptr());
  launch_rows(has_vectors(logits) ? kernels.gradient : kernels.gradient_unaligned, logits, args);
}

}  // namespace
}  // namespace fx_fuser
