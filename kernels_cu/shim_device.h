// Device, stream, loading and launching: what every op of the shim needs.
#pragma once

#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "divisor.h"

extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace fx_fuser {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check(cudaError_t status, const char* call) {
  STD_TORCH_CHECK(status == cudaSuccess, "fx_fuser: ", call, ": ", cudaGetErrorString(status));
}

// Our static runtime keeps its own notion of the current device beside torch's; both are set.
class OnDevice {
 public:
  explicit OnDevice(int device) : guard_(device) { check(cudaSetDevice(device), "cudaSetDevice"); }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
};

cudaStream_t current_stream(int device) {
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr,
                  "fx_fuser: this build of torch has no CUDA; its tensors cannot reach a kernel");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

// A tensor on `like`'s device. torch::stable::new_empty goes through the dispatcher by the op's
// name, which takes 0.8 us for 0.2 (x86-64 build machine, torch 2.13, 2026-11-21).
Tensor new_strided(const Tensor& like, const int64_t* sizes, const int64_t* strides, size_t rank,
                   ScalarType type) {
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  const auto dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(static_cast<int64_t>(rank), sizes, strides, dtype,
                                                  device_type, like.get_device_index(), &made));
  return Tensor(made);
}

Tensor new_dense(const Tensor& like, const std::vector<int64_t>& sizes, ScalarType type) {
  std::vector<int64_t> strides(sizes.size());
  int64_t stride = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = stride;
    stride *= std::max<int64_t>(sizes[d], 1);
  }
  return new_strided(like, sizes.data(), strides.data(), sizes.size(), type);
}

// In the layout of `like`, which is dense.
Tensor new_like(const Tensor& like, ScalarType type) {
  return new_strided(like, like.sizes().data(), like.strides().data(), like.dim(), type);
}

struct LaunchOptions {
  int shared_bytes = 0;
  int cluster = 1;
  // May start before the kernel ahead of it is complete; waits for it by itself.
  bool dependent = false;
};

template <class Args>
void launch(cudaKernel_t kernel, int64_t blocks, int threads, cudaStream_t stream, const Args& args,
            const LaunchOptions& options = {}) {
  STD_TORCH_CHECK(blocks <= std::numeric_limits<int32_t>::max(), "fx_fuser: ", blocks,
                  " blocks are more than a grid holds");
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = options.shared_bytes;
  config.stream = stream;
  cudaLaunchAttribute attributes[2];
  config.attrs = attributes;
  if (options.cluster > 1) {
    cudaLaunchAttribute& cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = options.cluster;
    cluster.val.clusterDim.y = 1;
    cluster.val.clusterDim.z = 1;
  }
  if (options.dependent) {
    cudaLaunchAttribute& dependent = attributes[config.numAttrs++];
    dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    dependent.val.programmaticStreamSerializationAllowed = 1;
  }
  void* parameters[] = {const_cast<Args*>(&args)};
  check(cudaLaunchKernelExC(&config, reinterpret_cast<const void*>(kernel), parameters),
        "cudaLaunchKernelExC");
}

// Libraries stay loaded for the life of the process: captured graphs may refer to their kernels.
cudaLibrary_t load_library(const std::string& cubin) {
  cudaLibrary_t library = nullptr;
  const cudaError_t status =
      cudaLibraryLoadFromFile(&library, cubin.c_str(), nullptr, nullptr, 0, nullptr, nullptr, 0);
  STD_TORCH_CHECK(status == cudaSuccess, "fx_fuser: cannot load ", cubin, ": ",
                  cudaGetErrorString(status));
  return library;
}

cudaKernel_t get_kernel(cudaLibrary_t library, const std::string& name) {
  cudaKernel_t kernel = nullptr;
  const cudaError_t status = cudaLibraryGetKernel(&kernel, library, name.c_str());
  STD_TORCH_CHECK(status == cudaSuccess, "fx_fuser: no kernel ", name, ": ",
                  cudaGetErrorString(status));
  // Code is uploaded lazily, which a stream capture would not allow: ask for it now.
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, reinterpret_cast<const void*>(kernel)),
        "cudaFuncGetAttributes");
  return kernel;
}

// Loaded kernels by name and device, for the ops that graphs call: a graph names its kernels.
template <class Kernels>
class Registry {
 public:
  void add(const std::string& name, int device, const Kernels* kernels) {
    const std::unique_lock lock(mutex_);
    kernels_[{name, device}] = kernels;
  }

  const Kernels& at(const std::string& name, int device) {
    const std::shared_lock lock(mutex_);
    const auto found = kernels_.find({name, device});
    STD_TORCH_CHECK(found != kernels_.end(), "fx_fuser: kernel ", name,
                    " is not loaded on cuda:", device, "; fx_fuser.native.prepare loads it");
    return *found->second;
  }

 private:
  std::shared_mutex mutex_;
  std::map<std::pair<std::string, int>, const Kernels*> kernels_;
};

template <class Kernels>
Registry<Kernels>& registry() {
  static Registry<Kernels> instance;
  return instance;
}

void require_cuda(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.is_cuda(), "fx_fuser: ", name, " is not a CUDA tensor");
}

template <class Shape>
std::string to_string(const Shape& shape) {
  std::ostringstream text;
  text << '[';
  for (size_t d = 0; d < shape.size(); ++d) text << (d ? ", " : "") << shape[d];
  text << ']';
  return text.str();
}

}  // namespace
}  // namespace fx_fuser
