// The fp32 product on tensor cores: tensor maps, workspace, launch.
#pragma once

#include <cuda.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "linear_split_args.h"
#include "shim_pointwise.h"
#include "transpose.cuh"

namespace fx_fuser {
namespace {

// Data that the split holds badly is repaired in the kernel, right but slowly. It then tells the
// host, which for a while takes the library's product instead: nobody waits for anybody.
class Strain {
 public:
  Strain() {
    void* flag = nullptr;
    check(cudaHostAlloc(&flag, sizeof(uint32_t), cudaHostAllocPortable | cudaHostAllocMapped),
          "cudaHostAlloc");
    flag_ = static_cast<uint32_t*>(flag);
    *flag_ = 0;
  }

  uint32_t* flag() const { return flag_; }

  // Of this call: should the library make the product?
  bool rests() {
    if (const volatile uint32_t* seen = flag_; *seen != 0) {
      *flag_ = 0;
      calls_left_ = kRest;
    }
    // Not exact between threads, and need not be.
    if (calls_left_ <= 0) return false;
    --calls_left_;
    return true;
  }

  void wake() {
    *flag_ = 0;
    calls_left_ = 0;
  }

 private:
  static constexpr int kRest = 1000;  // calls: the slow ones are then a few per cent of the time
  uint32_t* flag_;
  std::atomic<int> calls_left_{0};
};

struct LinearSplitKernels {
  cudaKernel_t split_rows;
  cudaKernel_t product;
  cudaKernel_t product_turned;
  cudaKernel_t transpose;
  int multiprocessors;
  int scalars;
  ScalarType out;
  std::vector<ScalarType> operands;
  std::unique_ptr<Strain> strain;
};

// cuTensorMapEncodeTiled of the driver, which nothing here is linked with.
auto tensor_map_encoder() {
  static const auto encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000,
                                           cudaEnableDefault, &result),
          "cudaGetDriverEntryPointByVersion");
    STD_TORCH_CHECK(result == cudaDriverEntryPointSuccess && found != nullptr,
                    "fx_fuser: the driver has no cuTensorMapEncodeTiled; it must be of CUDA 12");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found);
  }();
  return encode;
}

// Sizes and box innermost first; strides in bytes, of all dimensions but the innermost.
template <int kRank>
CUtensorMap tensor_map(CUtensorMapDataType type, const void* data,
                       const std::array<cuuint64_t, kRank>& sizes,
                       const std::array<cuuint64_t, kRank - 1>& strides,
                       const std::array<cuuint32_t, kRank>& box) {
  std::array<cuuint32_t, kRank> steps;
  steps.fill(1);
  CUtensorMap map;
  const CUresult status = tensor_map_encoder()(
      &map, type, kRank, const_cast<void*>(data), sizes.data(), strides.data(), box.data(),
      steps.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  STD_TORCH_CHECK(status == CUDA_SUCCESS, "fx_fuser: cuTensorMapEncodeTiled failed with ",
                  static_cast<int>(status), " for sizes ", to_string(sizes), " and strides ",
                  to_string(strides));
  return map;
}

// `signature` is what stands between the parentheses of FX_FUSER_LINEAR_SPLIT, as a list.
int64_t load_linear_split(const std::string& name, const std::string& cubin,
                          const std::vector<std::string>& signature, int64_t device) {
  STD_TORCH_CHECK(signature.size() >= 5,
                  "fx_fuser: FX_FUSER_LINEAR_SPLIT needs an epilogue, a number of scalars, Acc, "
                  "Out and the type of z");
  const OnDevice on_device(static_cast<int>(device));
  cudaLibrary_t library = load_library(cubin);
  auto kernels = std::make_unique<LinearSplitKernels>();
  kernels->split_rows = get_kernel(library, "fx_fuser_linear_split_rows");
  kernels->product = get_kernel(library, "fx_fuser_linear_split");
  kernels->transpose = get_kernel(library, "fx_fuser_transpose");
  kernels->product_turned = get_kernel(library, "fx_fuser_linear_split_turned");
  for (const cudaKernel_t product : {kernels->product, kernels->product_turned}) {
    check(cudaFuncSetAttribute(reinterpret_cast<const void*>(product),
                               cudaFuncAttributeMaxDynamicSharedMemorySize, kLinearSharedBytes),
          "cudaFuncSetAttribute");
  }
  check(cudaDeviceGetAttribute(&kernels->multiprocessors, cudaDevAttrMultiProcessorCount,
                               static_cast<int>(device)),
        "cudaDeviceGetAttribute");
  kernels->strain = std::make_unique<Strain>();
  kernels->scalars = std::stoi(signature[1]);
  kernels->out = scalar_type_of(signature[3]);
  for (size_t i = 5; i < signature.size(); ++i) {
    kernels->operands.push_back(scalar_type_of(signature[i]));
  }
  registry<LinearSplitKernels>().add(name, static_cast<int>(device), kernels.get());
  return reinterpret_cast<int64_t>(kernels.release());
}

// The stride between rows of a tensor seen as [rows, columns], whose leading dimensions broadcast
// to those of `like`; nothing where the rows are not evenly spaced.
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

bool broadcasts_to(const Tensor& tensor, const Tensor& out) {
  const int64_t missing = out.dim() - tensor.dim();
  if (missing < 0) return false;
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) != 1 && tensor.size(d) != out.size(d + missing)) return false;
  }
  return true;
}

// What 16-byte loads and the copy engine ask of rows.
bool has_aligned_rows(const Tensor& tensor, int64_t rows, int64_t stride) {
  const bool dense = tensor.stride(-1) == 1 || tensor.size(-1) == 1;
  return dense && reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0 &&
         (rows == 1 || stride * static_cast<int64_t>(tensor.element_size()) % 16 == 0);
}

// Rows of the transpose are those in memory, and no other view of it is a plain one.
bool is_turned(const Tensor& matrix) {
  return matrix.dim() == 2 && matrix.stride(1) != 1 && matrix.stride(0) == 1;
}

// As has_aligned_rows, of the transpose of a turned matrix.
bool has_aligned_columns(const Tensor& matrix) {
  return reinterpret_cast<uintptr_t>(matrix.data_ptr()) % 16 == 0 &&
         (matrix.size(1) == 1 || (matrix.stride(1) != 0 && matrix.stride(1) % 4 == 0));
}

// As few blocks as finish in the same number of rounds: the others would only draw power.
int64_t persistent_blocks(int64_t tiles, int64_t multiprocessors) {
  return ceil_div(tiles, ceil_div(tiles, multiprocessors));
}

// Are these the operands and scalars that the kernels' epilogue takes, for a result like `out`?
template <class Kernels>
void check_epilogue(const Kernels& kernels, const Tensor& out, const std::vector<Tensor>& operands,
                    const std::vector<double>& scalars) {
  STD_TORCH_CHECK(operands.size() == kernels.operands.size(), "fx_fuser: the kernel takes ",
                  kernels.operands.size(), " operands, not ", operands.size());
  STD_TORCH_CHECK(static_cast<int>(scalars.size()) == kernels.scalars,
                  "fx_fuser: the kernel takes ", kernels.scalars, " scalars, not ", scalars.size());
  for (size_t i = 0; i < operands.size(); ++i) {
    STD_TORCH_CHECK(operands[i].is_cuda() &&
                        operands[i].get_device_index() == out.get_device_index() &&
                        operands[i].scalar_type() == kernels.operands[i],
                    "fx_fuser: operand ", i, " must be of ", toString(kernels.operands[i]),
                    " on cuda:", out.get_device_index());
    STD_TORCH_CHECK(broadcasts_to(operands[i], out), "fx_fuser: operand ", i, " of shape ",
                    to_string(operands[i].sizes()), " does not broadcast to the shape ",
                    to_string(out.sizes()));
  }
}

// `in` is the type of x, weight, bias and z.
template <class Kernels>
void check_linear(const Kernels& kernels, ScalarType in, const Tensor& x, const Tensor& weight,
                  const std::optional<Tensor>& bias, const Tensor& out,
                  const std::optional<Tensor>& z, const std::vector<Tensor>& operands,
                  const std::vector<double>& scalars) {
  const int device = out.get_device_index();
  const auto check_one = [&](const Tensor& tensor, const char* name, ScalarType type) {
    STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == device, "fx_fuser: ", name,
                    " is not on out's device, cuda:", device);
    STD_TORCH_CHECK(tensor.scalar_type() == type, "fx_fuser: the kernel takes ", name, " as ",
                    toString(type), ", but it is ", toString(tensor.scalar_type()));
  };
  require_cuda(out, "out");
  check_one(out, "out", kernels.out);
  check_one(x, "x", in);
  check_one(weight, "weight", in);
  STD_TORCH_CHECK(x.dim() >= 1 && weight.dim() == 2 && x.size(-1) == weight.size(1),
                  "fx_fuser: x of shape ", to_string(x.sizes()), " has no product with weight ",
                  to_string(weight.sizes()));
  const auto check_result = [&](const Tensor& result, const char* name) {
    bool fits = result.dim() == x.dim() && result.size(-1) == weight.size(0);
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
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), "fx_fuser: bias of shape ",
                    to_string(bias->sizes()), " does not fit weight ", to_string(weight.sizes()));
  }
  check_epilogue(kernels, out, operands, scalars);
}

// out = epilogue(z, operands, scalars) with z = x weightᵀ + bias, which is stored too if asked for.
// False, and nothing is launched, where the copy engine or the kernel's indices do not take these
// shapes, strides or addresses.
bool run_linear_split(const LinearSplitKernels& kernels, const Tensor& x, const Tensor& weight,
                      const std::optional<Tensor>& bias, const Tensor& out,
                      const std::optional<Tensor>& z, const std::vector<Tensor>& operands,
                      const std::vector<double>& scalars) {
  check_linear(kernels, ScalarType::Float, x, weight, bias, out, z, operands, scalars);
  const int64_t n = weight.size(0);
  const int64_t k = weight.size(1);
  if (k == 0) return false;
  if (out.numel() == 0) return true;
  const int64_t m = x.numel() / k;

  constexpr int64_t kHighest = std::numeric_limits<int32_t>::max() - (1 << 16);
  const int64_t tiles = ceil_div(m, kLinearTileM) * ceil_div(n, kLinearTileN);
  if (m > kHighest / kSplitMaxCluster || n > kHighest || k > kHighest || tiles > kHighest) {
    return false;
  }
  const auto x_stride = row_stride(x, out);
  const auto out_stride = row_stride(out, out);
  const auto z_stride = z ? row_stride(*z, out) : 0;
  if (!x_stride || !out_stride || !z_stride) return false;
  const bool turned = is_turned(weight);
  const int64_t weight_rows = turned ? k : n;  // as they lie in memory
  const int64_t weight_stride = weight.stride(turned ? 1 : 0);
  if (!has_aligned_rows(x, m, *x_stride) ||
      !(turned ? has_aligned_columns(weight)
               : has_aligned_rows(weight, n, weight_stride) && (n == 1 || weight_stride != 0))) {
    return false;
  }
  const auto dense_rows = [&](const Tensor& tensor) { return n == 1 || tensor.stride(-1) == 1; };
  if (!dense_rows(out) || (z && !dense_rows(*z)) || (bias && !dense_rows(*bias))) return false;

  LinearSplitArgs args{};
  for (size_t i = 0; i < operands.size(); ++i) {
    const auto stride = row_stride(operands[i], out);
    if (!stride) return false;
    const bool vector = operands[i].dim() > 0 && operands[i].size(-1) != 1;
    args.operand[i] = {operands[i].data_ptr(), *stride, vector ? operands[i].stride(-1) : 0};
  }

  const int device = out.get_device_index();
  const OnDevice on_device(device);
  const cudaStream_t stream = current_stream(device);

  const int64_t padded_k = ceil_div(k, kLinearTileK) * kLinearTileK;
  const int64_t blocks = persistent_blocks(tiles, kernels.multiprocessors);
  const int64_t split_bytes = 2 * m * padded_k * 2;
  const int64_t parked_bytes = k > kLinearChunkK ? blocks * kLinearTileM * kLinearTileN * 4 : 0;
  const int64_t unsure_bytes = tiles * kLinearUnsureWords * 4;
  const int64_t again_bytes = tiles * 8;
  const Tensor workspace = new_dense(
      x, {split_bytes + parked_bytes + unsure_bytes + again_bytes + m * 4}, ScalarType::Byte);
  auto* split = static_cast<uint8_t*>(workspace.data_ptr());
  uint8_t* parked = split + split_bytes;
  uint8_t* unsure = parked + parked_bytes;
  uint8_t* again = unsure + unsure_bytes;
  auto* unscale = reinterpret_cast<float*>(again + again_bytes);

  const SplitRowsArgs rows{static_cast<const float*>(x.data_ptr()),
                           *x_stride,
                           split,
                           unscale,
                           static_cast<int32_t>(m),
                           static_cast<int32_t>(k),
                           static_cast<int32_t>(padded_k),
                           turned};
  const int cluster = split_cluster(k);
  LaunchOptions in_cluster;
  in_cluster.cluster = cluster;
  launch(kernels.split_rows, m * cluster, split_threads(k), stream, rows, in_cluster);

  const auto unsigned64 = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  // The stride of a single row is never used, but must be one that the copy engine takes.
  const int64_t weight_columns = turned ? n : k;
  const int64_t map_stride = weight_rows == 1 ? ceil_div(weight_columns, 4) * 4 : weight_stride;
  args.weight_stride_n = turned ? 1 : map_stride;
  args.weight_stride_k = turned ? map_stride : 1;
  args.weight_map = tensor_map<2>(
      CU_TENSOR_MAP_DATA_TYPE_FLOAT32, weight.data_ptr(),
      {unsigned64(weight_columns), unsigned64(weight_rows)}, {unsigned64(map_stride * 4)},
      {kLinearBox, static_cast<cuuint32_t>(turned ? kLinearTileK : kLinearTileN)});
  args.x_map = tensor_map<3>(
      CU_TENSOR_MAP_DATA_TYPE_FLOAT16, split, {unsigned64(padded_k), unsigned64(m), 2},
      {unsigned64(padded_k * 2), unsigned64(m * padded_k * 2)}, {kLinearTileK, kLinearTileM, 2});
  args.x_unscale = unscale;
  args.parked = reinterpret_cast<float4*>(parked);
  args.unsure = reinterpret_cast<uint32_t*>(unsure);
  args.again = reinterpret_cast<uint64_t*>(again);
  args.was_strained = kernels.strain->flag();
  args.least_sum = kLeastSum * std::sqrt(static_cast<float>(k));
  args.x = rows.x;
  args.weight = static_cast<const float*>(weight.data_ptr());
  args.bias = bias ? static_cast<const float*>(bias->data_ptr()) : nullptr;
  args.out = out.data_ptr();
  args.z = z ? static_cast<float*>(z->data_ptr()) : nullptr;
  args.x_stride = *x_stride;
  args.out_stride = *out_stride;
  args.z_stride = *z_stride;
  std::copy(scalars.begin(), scalars.end(), args.scalar);
  args.m = rows.rows;
  args.n = static_cast<int32_t>(n);
  args.k = rows.k;
  args.tiles = static_cast<int32_t>(tiles);
  LaunchOptions overlapped;
  overlapped.shared_bytes = kLinearSharedBytes;
  overlapped.dependent = true;
  launch(turned ? kernels.product_turned : kernels.product, blocks, kLinearThreads, stream, args,
         overlapped);
  return true;
}

void wake_linear_split(int64_t handle) {
  reinterpret_cast<const LinearSplitKernels*>(handle)->strain->wake();
}

bool linear_split(int64_t handle, const Tensor& x, const Tensor& weight,
                  const std::optional<Tensor>& bias, const Tensor& out,
                  const std::optional<Tensor>& z, const std::vector<Tensor>& operands,
                  const std::vector<double>& scalars) {
  return run_linear_split(*reinterpret_cast<const LinearSplitKernels*>(handle), x, weight, bias,
                          out, z, operands, scalars);
}

}  // namespace
}  // namespace fx_fuser
