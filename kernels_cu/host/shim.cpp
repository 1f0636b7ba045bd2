// The one translation unit between torch and the kernels: loads cubins, reads tensors, launches.
//
// Built on the LibTorch stable ABI at version 2.11 and not linked with any CUDA library, so that a
// single binary loads into CPU-only torch (which has no CUDA symbols: hence the weak declaration in
// host/device.h) and into every CUDA torch from 2.11 on. `use_driver` passes in the driver's
// functions.
#include "host/attention_backward.h"
#include "host/attention_bias.h"
#include "host/attention_bias_backward.h"
#include "host/attention_split.h"
#include "host/attention_window.h"
#include "host/batch_stats.h"
#include "host/contract.h"
#include "host/conv.h"
#include "host/conv1d.h"
#include "host/conv_backward.h"
#include "host/conv_direct.h"
#include "host/conv_direct_backward.h"
#include "host/depthwise.h"
#include "host/depthwise_gradients.h"
#include "host/fold.h"
#include "host/folded.h"
#include "host/gather_rows.h"
#include "host/grouped_gradients.h"
#include "host/head_loss.h"
#include "host/implicit.h"
#include "host/kernel.h"
#include "host/linear.h"
#include "host/linear_combs.h"
#include "host/linear_dense.h"
#include "host/linear_split.h"
#include "host/linear_unaligned.h"
#include "host/pixels.h"
#include "host/pointwise.h"
#include "host/run.h"
#include "host/stem.h"

namespace fx_fuser {

STABLE_TORCH_LIBRARY(fx_fuser_native, m) {
  m.def("contract() -> str[]");
  m.def("use_driver(int get_proc_address) -> ()");
  m.def("gpu_figures(int device) -> int[]");
  m.def(
      "load(str family, str name, str[] cubins, str[] signature, int device, float[] rates) -> "
      "int");
  m.def("pointwise(int kernels, Tensor(a!) out, Tensor[] inputs, float[] scalars) -> ()");
  m.def("batch_stats(int kernels, Tensor x) -> (Tensor, Tensor)");
  m.def(
      "head_loss(int kernels, Tensor(a!) logits, Tensor labels, Tensor(b!) losses, Tensor? scale, "
      "int columns, int ignore_index, float before, float after, float smoothing) -> ()");
  m.def(
      "head_loss_kept(int kernels, Tensor logits, Tensor labels, Tensor(a!) losses, Tensor(b!) "
      "sums, int ignore_index, float before, float after, float smoothing) -> ()");
  m.def(
      "head_loss_gradient(int kernels, Tensor logits, Tensor sums, Tensor labels, Tensor scale, "
      "Tensor hot, Tensor(a!) gradient, int ignore_index, float before, float after, float "
      "smoothing) -> ()");
  m.def("reset_linear_split(int kernels) -> ()");
  m.def(
      "conv_direct_cut(int[] sizes, int x_bytes, int out_bytes, int operands, int "
      "multiprocessors) -> int[]");
  m.def(
      "depthwise_cut(int[] sizes, int stride, int x_bytes, bool channels_last, int operands, int "
      "multiprocessors) -> int[]");
  m.def("stem_cut(int[] sizes, int x_bytes, int operands) -> int[]");
  m.def(
      "implicit_cut(int[] sizes, int[] stride, int[] dilation, int columns, int leaves, "
      "int operands, int held, int multiprocessors, int shared_bytes) -> int[]");
  m.def(
      "grouped_cut(int[] sizes, int[] stride, int[] dilation, int groups, int tiles, int leaves, "
      "int operands, int multiprocessors, int shared_bytes, bool of_weight) -> int[]");
  m.def(
      "conv_direct_backward_cut(int[] sizes, int x_bytes, bool with_input, int multiprocessors) -> "
      "int[]");
}

// For every device, so that a CPU tensor gets our error and not the dispatcher's.
STABLE_TORCH_LIBRARY_IMPL(fx_fuser_native, CompositeExplicitAutograd, m) {
  m.impl("contract", TORCH_BOX(&contract));
  m.impl("use_driver", TORCH_BOX(&use_driver));
  m.impl("gpu_figures", TORCH_BOX(&gpu_figures));
  m.impl("load", TORCH_BOX(&load));
  m.impl("pointwise", TORCH_BOX(&pointwise));
  m.impl("batch_stats", TORCH_BOX(&batch_stats));
  m.impl("head_loss", TORCH_BOX(&head_loss));
  m.impl("head_loss_kept", TORCH_BOX(&head_loss_kept));
  m.impl("head_loss_gradient", TORCH_BOX(&head_loss_gradient));
  m.impl("reset_linear_split", TORCH_BOX(&reset_linear_split));
  m.impl("conv_direct_cut", TORCH_BOX(&conv_direct_cut));
  m.impl("depthwise_cut", TORCH_BOX(&depthwise_cut));
  m.impl("stem_cut", TORCH_BOX(&stem_cut));
  m.impl("implicit_cut", TORCH_BOX(&implicit_cut));
  m.impl("grouped_cut", TORCH_BOX(&grouped_cut));
  m.impl("conv_direct_backward_cut", TORCH_BOX(&conv_direct_backward_cut));
}

STABLE_TORCH_LIBRARY_IMPL(fx_fuser, CUDA, m) {
  m.impl("run", TORCH_BOX(&run));
  m.impl("run.many", TORCH_BOX(&run_many));
  m.impl("fold", TORCH_BOX(&fold));
  m.impl("split_product", TORCH_BOX(&split_product));
  m.impl("exact_product", TORCH_BOX(&exact_product));
  m.impl("unaligned_product", TORCH_BOX(&unaligned_product));
}

}  // namespace fx_fuser
