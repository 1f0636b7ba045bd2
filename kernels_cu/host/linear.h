// linear, matmul and bmm on CUDA: one fused kernel, or the library's product and then the epilogue.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "host/gemm_call.h"
#include "host/linear_dense.h"
#include "host/linear_split.h"
#include "host/linear_unaligned.h"
#include "host/made.h"
#include "host/pointwise.h"

namespace fx_fuser {
namespace {

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(x),
                                    torch::stable::detail::from(weight),
                                    torch::stable::detail::from(bias)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// A view with the last two dimensions swapped, without a call through the dispatcher (see
// new_strided).
Tensor transposed(const Tensor& matrix) {
  STD_TORCH_CHECK(matrix.dim() >= 2,
                  "fx_fuser: weight must be a matrix or a batch of matrices, not of shape ",
                  to_string(matrix.sizes()));
  const auto sizes = matrix.sizes();
  const auto strides = matrix.strides();
  std::vector<int64_t> size(sizes.begin(), sizes.end());
  std::vector<int64_t> stride(strides.begin(), strides.end());
  std::swap(size[size.size() - 1], size[size.size() - 2]);
  std::swap(stride[stride.size() - 1], stride[stride.size() - 2]);
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(matrix.get(), matrix.dim(), size.data(),
                                                        stride.data(), 0, &made));
  return Tensor(made);
}

// x weightᵀ + bias, by the library.
Tensor library_product(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  return weight.dim() == 2 ? linear(x, weight, bias) : torch::stable::matmul(x, transposed(weight));
}

// y and, if `save`, c; std::nullopt if the kernel does not support these tensors or is not faster.
std::optional<Made> linear_in_one_kernel(const GemmKernel& kernel, const Tensor& x,
                                         const Tensor& weight, const std::optional<Tensor>& bias,
                                         const std::vector<int64_t>& shape,
                                         const EpilogueArgs& args, ScalarType out_type, bool save) {
  if (weight.size(-1) == 0 || !kernel.is_profitable(x, weight)) return {};
  const Tensor y = new_dense(x, shape, out_type);
  std::optional<Tensor> c;
  if (save) c = new_dense(x, shape, x.scalar_type());
  if (!kernel.run(x, weight, bias, y, c, args)) return {};
  return Made(y, c);
}

// How many rows of a matrix that is a transposed view are split at once: that memory is needed when
// a training step is at its peak. As many as fill all multiprocessors with tiles several times, or
// as fit in little memory.
int64_t rows_at_once(int64_t n, int64_t k, int64_t multiprocessors) {
  constexpr int64_t kRounds = 8;
  constexpr int64_t kBytes = 8 << 20;  // of splits
  const int64_t of_rounds = kRounds * multiprocessors / ceil_div(n, kLinearTileN) * kLinearTileM;
  const int64_t of_bytes = kBytes / (4 * k) / kLinearTileM * kLinearTileM;
  return std::max({of_rounds, of_bytes, int64_t{kLinearTileM}});
}

// The tensor as fp32, as x.float() in the user's model; fp32 tensors are returned unchanged.
Tensor widened(const Tensor& tensor) {
  if (tensor.scalar_type() == ScalarType::Float) return tensor;
  return torch::stable::to(tensor, ScalarType::Float);
}

// fx_fuser::split_product on CUDA: a bᵀ in fp32, for tensors with any strides. b is a matrix or has
// a's leading sizes. Both are fp32, or one has the kernel's 16-bit type.
Tensor split_product(const Tensor& a, const Tensor& b, const std::string& kernel) {
  require_cuda(a, "a");
  const auto& kernels = registry<LinearSplitKernels>().at(kernel, a.get_device_index());
  const auto by_library = [&] { return library_product(widened(a), widened(b), std::nullopt); };
  if (a.numel() == 0 || b.numel() == 0 || !kernels.is_profitable(a, b)) return by_library();
  const auto a_sizes = a.sizes();
  std::vector<int64_t> shape(a_sizes.begin(), a_sizes.end());
  shape.back() = b.size(-2);
  const Tensor product = new_dense(a, shape, ScalarType::Float);
  const auto multiply = [&](const Tensor& rows, const Tensor& out, const SplitWish& wish) {
    return run_linear_split(kernels, rows, b, std::nullopt, out, std::nullopt, {}, wish);
  };
  const auto forced = forced_weight_first(kernels, b);
  const auto call = SplitCall::of(a, {&b, &a}, kernels.rates, {0, forced});
  const bool in_parts =
      a.dim() == 2 && b.dim() == 2 && !call->choice.weight_first && call->x.transposed();
  if (!in_parts) return multiply(a, product, {}) ? product : by_library();
  const int64_t at_once = rows_at_once(b.size(0), b.size(1), kernels.rates.multiprocessors);
  for (int64_t first = 0; first < a.size(0); first += at_once) {
    const int64_t count = std::min(at_once, a.size(0) - first);
    const auto part = [&](Tensor matrix) { return torch::stable::narrow(matrix, 0, first, count); };
    if (!multiply(part(a), part(product), {0, false})) return by_library();
  }
  return product;
}

// fx_fuser::exact_product on CUDA: a bᵀ in fp32, for a [*, K] and b [N, K] of one 16-bit type,
// whose products are exact in fp32.
Tensor exact_product(const Tensor& a, const Tensor& b, const std::string& kernel) {
  require_cuda(a, "a");
  const auto& kernels = registry<LinearDenseKernels>().at(kernel, a.get_device_index());
  const auto a_sizes = a.sizes();
  std::vector<int64_t> shape(a_sizes.begin(), a_sizes.end());
  shape.back() = b.size(0);
  // Longer sums would have a larger error than the library's (linear/NOTES.md, "Long K").
  if (b.size(1) <= kLinearChunkK) {
    const Tensor product = new_dense(a, shape, ScalarType::Float);
    const std::optional<Tensor> none;
    if (run_linear_dense(kernels, a, b, none, product, none, {})) return product;
  }
  return library_product(widened(a), widened(b), std::nullopt);
}

// fx_fuser::unaligned_product on CUDA: a bᵀ + bias in one 16-bit type, for tensors with any strides
// and alignment. sizes: the kernel's template sizes, to load it if it is not loaded yet.
Tensor unaligned_product(const Tensor& a, const Tensor& b, const std::optional<Tensor>& bias,
                         const std::string& kernel, const std::vector<int64_t>& sizes) {
  require_cuda(a, "a");
  STD_TORCH_CHECK(!bias || b.dim() == 2, "fx_fuser: a batched product cannot have a bias");
  const auto find = [&] { return registry<GemmKernel>().find(kernel, a.get_device_index()); };
  const GemmKernel* found = find();
  if (found == nullptr && is_first_miss(kernel, a.get_device_index())) {
    std::array<StableIValue, 2> stack{torch::stable::detail::from(a),
                                      torch::stable::detail::from(sizes)};
    TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("fx_fuser::load_unaligned", "", stack.data(), TORCH_ABI_VERSION));
    found = find();
  }
  if (found == nullptr) return library_product(a, b, bias);
  const auto a_sizes = a.sizes();
  std::vector<int64_t> shape(a_sizes.begin(), a_sizes.end());
  shape.back() = b.size(-2);
  const Tensor product = new_dense(a, shape, a.scalar_type());
  return found->run(a, b, bias, product, std::nullopt, {}) ? product : library_product(a, b, bias);
}

// linear, matmul and bmm, for a weight [N, K], or [*, N, K] with x's leading sizes.
Made fused_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                  const EpilogueArgs& args, const std::vector<std::string>& kernels,
                  ScalarType out_type, bool save) {
  require_cuda(x, "x");
  const auto x_sizes = x.sizes();
  std::vector<int64_t> c_shape(x_sizes.begin(), x_sizes.end());
  c_shape.back() = weight.size(-2);
  std::vector<int64_t> shape = c_shape;
  for (const Tensor& tensor : args.tensors) {
    // A result with one column, such as a gate, may be broadcast along that dimension.
    if (shape.back() == 1 && tensor.dim() > 0) shape.back() = tensor.size(-1);
  }
  const bool same_shape = shape == c_shape;

  if (kernels.size() > 1 && same_shape) {
    const auto& kernel = registry<GemmKernel>().at(kernels[1], x.get_device_index());
    auto done = linear_in_one_kernel(kernel, x, weight, bias, shape, args, out_type, save);
    if (done) return *std::move(done);
  }

  const Tensor c = library_product(x, weight, bias);
  if (kernels.empty()) {
    check_is_result(c, out_type, args);
    return Made(c);
  }
  const auto& epilogue = registry<PointwiseKernels>().at(kernels[0], x.get_device_index());
  std::vector<Tensor> inputs{c};
  inputs.insert(inputs.end(), args.tensors.begin(), args.tensors.end());
  const bool in_place = !save && c.scalar_type() == out_type && same_shape;
  const Tensor y = in_place ? c : new_dense(c, shape, out_type);
  run_pointwise(epilogue, y, inputs, args.scalars);
  return {y, save ? std::optional(c) : std::nullopt};
}

// fx_fuser/ops/library.py documents the arguments of all three.
Made make_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                 const std::string& /*product*/, const std::string& /*backward*/, bool /*again*/,
                 const std::string& /*epilogue*/, const std::vector<Tensor>& t,
                 const std::vector<double>& s, const std::vector<std::string>& kernels,
                 ScalarType out_type, bool save) {
  return fused_linear(x, weight, bias, epilogue_args_of(t, s), kernels, out_type, save);
}

// matmul's weight is [K, N]. aten::linear transposes the view back, so the library's call and its
// operands are those of `x @ weight` and of addmm.
Made make_matmul(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                 const std::string& /*product*/, const std::string& /*backward*/, bool /*again*/,
                 const std::string& /*epilogue*/, const std::vector<Tensor>& t,
                 const std::vector<double>& s, const std::vector<std::string>& kernels,
                 ScalarType out_type, bool save) {
  return fused_linear(x, transposed(weight), bias, epilogue_args_of(t, s), kernels, out_type, save);
}

// x [*, M, K] times weight [*, K, N] with equal leading sizes.
Made make_bmm(const Tensor& x, const Tensor& weight, const std::string& /*product*/,
              const std::string& /*backward*/, bool /*again*/, const std::string& /*epilogue*/,
              const std::vector<Tensor>& t, const std::vector<double>& s,
              const std::vector<std::string>& kernels, ScalarType out_type, bool save) {
  return fused_linear(x, transposed(weight), std::nullopt, epilogue_args_of(t, s), kernels,
                      out_type, save);
}

}  // namespace
}  // namespace fx_fuser
