// Losses of rows of logits, and their gradients in place: which tensors, launch.
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
  Kernel kernel;
  ScalarType logits;
};

int64_t load_head_loss(const Sources& from) {
  const Signature types(from);
  types.check_operands(0);
  auto kernels = std::make_unique<HeadLossKernels>();
  kernels->kernel = get_kernel(load_library(from.cubins.at(0)), "fx_fuser_head_loss");
  kernels->logits = types.x;
  return keep<>(from, std::move(kernels));
}
const AddLoader kHeadLossLoader("head_loss", load_head_loss);

void check_head_loss(const HeadLossKernels& kernels, const Tensor& logits, const Tensor& labels,
                     const Tensor& losses, const std::optional<Tensor>& scale, int64_t columns) {
  require_cuda(logits, "logits");
  require_cuda(labels, "labels");
  require_cuda(losses, "losses");
  STD_TORCH_CHECK(logits.dim() == 2 && logits.scalar_type() == kernels.logits && columns > 0 &&
                      columns <= logits.size(1) && logits.size(1) == logits.stride(0) &&
                      (logits.stride(1) == 1 || logits.size(1) == 1),
                  "fx_fuser: logits are ", to_string(logits.sizes()), " with strides ",
                  to_string(logits.strides()), " of ", toString(logits.scalar_type()),
                  ", not rows behind each other of ", toString(kernels.logits));
  // Columns are counted by rounds of a block.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - (1 << 16);
  STD_TORCH_CHECK(logits.size(1) <= kMost, "fx_fuser: ", logits.size(1),
                  " columns of logits are more than the kernel counts");
  const bool is_aligned = reinterpret_cast<uintptr_t>(logits.data_ptr()) % 16 == 0 &&
                          logits.size(1) * logits.element_size() % 16 == 0;
  STD_TORCH_CHECK(is_aligned, "fx_fuser: rows of logits are not aligned to 16 bytes");
  STD_TORCH_CHECK(labels.scalar_type() == ScalarType::Long && labels.is_contiguous() &&
                      labels.numel() == logits.size(0),
                  "fx_fuser: labels are not one int64 a row");
  STD_TORCH_CHECK(losses.scalar_type() == ScalarType::Float && losses.is_contiguous() &&
                      losses.numel() == logits.size(0),
                  "fx_fuser: losses are not one float32 a row");
  if (!scale) return;
  require_cuda(*scale, "scale");
  STD_TORCH_CHECK(scale->scalar_type() == ScalarType::Float && scale->numel() == 1,
                  "fx_fuser: the scale of gradients is not one float32");
}

void head_loss(int64_t handle, const Tensor& logits, const Tensor& labels, const Tensor& losses,
               const std::optional<Tensor>& scale, int64_t columns, int64_t ignore_index) {
  const auto& kernels = *reinterpret_cast<const HeadLossKernels*>(handle);
  check_head_loss(kernels, logits, labels, losses, scale, columns);
  if (logits.size(0) == 0) return;
  const int device = logits.get_device_index();
  const OnDevice on_device(device);
  const HeadLossArgs args{logits.data_ptr(),
                          scale ? static_cast<const float*>(scale->data_ptr()) : nullptr,
                          static_cast<const int64_t*>(labels.data_ptr()),
                          static_cast<float*>(losses.data_ptr()),
                          logits.stride(0),
                          ignore_index,
                          static_cast<int32_t>(columns),
                          static_cast<int32_t>(logits.stride(0) * logits.element_size() / 16)};
  launch(kernels.kernel, logits.size(0), kHeadLossThreads, current_stream(device), args);
}

}  // namespace
}  // namespace fx_fuser
