// Devices, streams, loading and launching, for every op of the shim.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "common/divisor.h"
#include "host/driver.h"

extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace fx_fuser {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

int driver_device(int device) {
  int found = 0;
  check(driver().DeviceGet(&found, device), "cuDeviceGet");
  return found;
}

// The context that torch uses, for the life of the process.
Context primary_context(int device) {
  static std::mutex mutex;
  static std::map<int, Context> contexts;
  const std::lock_guard lock(mutex);
  Context& context = contexts[device];
  if (context == nullptr) {
    check(driver().DevicePrimaryCtxRetain(&context, driver_device(device)),
          "cuDevicePrimaryCtxRetain");
  }
  return context;
}

// torch's guard sets the device, but the CUDA runtime creates a context only when it needs one: an
// autograd thread may have none yet.
class OnDevice {
 public:
  explicit OnDevice(int device) : guard_(device), context_(primary_context(device)) {
    check(driver().CtxGetCurrent(&before_), "cuCtxGetCurrent");
    if (before_ != context_) check(driver().CtxSetCurrent(context_), "cuCtxSetCurrent");
  }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;
  ~OnDevice() {
    if (before_ != context_ && before_ != nullptr) driver().CtxSetCurrent(before_);
  }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  Context context_;
  Context before_ = nullptr;
};

int attribute_of(int device, int attribute) {
  int value = 0;
  check(driver().DeviceGetAttribute(&value, attribute, driver_device(device)),
        "cuDeviceGetAttribute");
  return value;
}

int multiprocessors_of(int device) { return attribute_of(device, kDeviceMultiprocessors); }

// A GPU's properties according to the driver, 0 if unknown; read by fx_fuser/native/limits.py.
std::vector<int64_t> gpu_figures(int64_t device) {
  std::vector<int64_t> found;
  for (const int attribute :
       {kDeviceMultiprocessors, kDeviceClock, kDeviceMemoryClock, kDeviceMemoryBits}) {
    found.push_back(attribute_of(static_cast<int>(device), attribute));
  }
  return found;
}

// Whether the GPU has thread block clusters and programmatic dependent launch.
bool has_clusters(int device) { return attribute_of(device, kDeviceMajor) >= 9; }

Stream current_stream(int device) {
  STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream != nullptr,
                  "fx_fuser: this build of torch has no CUDA; its tensors cannot reach a kernel");
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<Stream>(stream);
}

template <class Shape>
std::string to_string(const Shape& shape) {
  std::ostringstream text;
  text << '[';
  for (size_t d = 0; d < shape.size(); ++d) text << (d ? ", " : "") << shape[d];
  text << ']';
  return text.str();
}

// A tensor on `like`'s device. torch::stable::new_empty goes through the dispatcher by the op's
// name and takes 0.8 us instead of 0.2 (x86-64 build machine, torch 2.13, 2026-11-21).
Tensor new_strided(const Tensor& like, const int64_t* sizes, const int64_t* strides, size_t rank,
                   ScalarType type) {
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  const auto dtype = torch::stable::detail::to<int32_t>(torch::stable::detail::from(type));
  AtenTensorHandle made = nullptr;
  const AOTITorchError failed =
      aoti_torch_empty_strided(static_cast<int64_t>(rank), sizes, strides, dtype, device_type,
                               like.get_device_index(), &made);
  // torch prints the reason to stderr only. `fx_fuser.errors.is_out_of_memory` looks for this text.
  STD_TORCH_CHECK(failed == AOTI_TORCH_SUCCESS, "fx_fuser: torch could not allocate ",
                  to_string(std::vector<int64_t>(sizes, sizes + rank)), " of ", toString(type),
                  ": API call failed");
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

// A tensor with the layout of `like`, which is dense.
Tensor new_like(const Tensor& like, ScalarType type) {
  return new_strided(like, like.sizes().data(), like.strides().data(), like.dim(), type);
}

struct LaunchOptions {
  int shared_bytes = 0;
  int cluster = 1;
  // Programmatic dependent launch: may start before the previous kernel is complete; the kernel
  // itself waits for that one.
  bool dependent = false;
};

LaunchAttribute cluster_of(int blocks) {
  LaunchAttribute made{};
  made.id = kLaunchCluster;
  made.value.cluster = {static_cast<unsigned>(blocks), 1, 1};
  return made;
}

template <class Args>
void launch(Kernel kernel, int64_t blocks, int threads, Stream stream, const Args& args,
            const LaunchOptions& options = {}) {
  STD_TORCH_CHECK(blocks <= std::numeric_limits<int32_t>::max(), "fx_fuser: ", blocks,
                  " blocks are more than a grid holds");
  LaunchAttribute attributes[2]{};
  LaunchConfig config{{static_cast<unsigned>(blocks), 1, 1},
                      {static_cast<unsigned>(threads), 1, 1},
                      static_cast<unsigned>(options.shared_bytes),
                      stream,
                      attributes,
                      0};
  if (options.cluster > 1) {
    attributes[config.count++] = cluster_of(options.cluster);
  }
  if (options.dependent) {
    LaunchAttribute& dependent = attributes[config.count++];
    dependent.id = kLaunchOverlapped;
    dependent.value.overlapped = 1;
  }
  void* parameters[] = {const_cast<Args*>(&args)};
  check(driver().LaunchKernelEx(&config, kernel, parameters, nullptr), "cuLaunchKernelEx");
}

// Libraries stay loaded for the life of the process: captured graphs may refer to their kernels.
Library load_library(const std::string& cubin) {
  Library library = nullptr;
  const int result = driver().LibraryLoadFromFile(&library, cubin.c_str(), nullptr, nullptr, 0,
                                                  nullptr, nullptr, 0);
  STD_TORCH_CHECK(result == 0, "fx_fuser: cannot load ", cubin, ": ", text_of(result));
  return library;
}

// Looks up a kernel on the current device. shared_bytes: the most dynamic shared memory of a
// launch.
Kernel get_kernel(Library library, const std::string& name, int shared_bytes = 0) {
  LibraryKernel found = nullptr;
  int result = driver().LibraryGetKernel(&found, library, name.c_str());
  Kernel kernel = nullptr;
  // Uploads the code now: the first launch may be in a stream capture, which does not allow it.
  if (result == 0) result = driver().KernelGetFunction(&kernel, found);
  STD_TORCH_CHECK(result == 0, "fx_fuser: no kernel ", name, ": ", text_of(result));
  if (shared_bytes > 0) {
    check(driver().FuncSetAttribute(kernel, kKernelMaxDynamicShared, shared_bytes),
          "cuFuncSetAttribute");
  }
  return kernel;
}

// Loaded kernels by name and device, for the ops that graphs call: a graph names its kernels.
template <class Kernels>
class Registry {
 public:
  void add(const std::string& name, int device, const Kernels* kernels) {
    const std::lock_guard lock(mutex_);
    kernels_[{name, device}] = kernels;
  }

  // Null if no kernels of this name are loaded on the device.
  const Kernels* find(const std::string& name, int device) {
    const std::lock_guard lock(mutex_);
    const auto found = kernels_.find({name, device});
    return found == kernels_.end() ? nullptr : found->second;
  }

  const Kernels& at(const std::string& name, int device) {
    const Kernels* found = find(name, device);
    STD_TORCH_CHECK(found != nullptr, "fx_fuser: kernel ", name, " is not loaded on cuda:", device,
                    "; fx_fuser.native.load.prepare loads it");
    return *found;
  }

 private:
  std::mutex mutex_;
  std::map<std::pair<std::string, int>, const Kernels*> kernels_;
};

template <class Kernels>
Registry<Kernels>& registry() {
  static Registry<Kernels> instance;
  return instance;
}

// True once per kernel and device: a kernel that failed to load is not tried again.
bool is_first_miss(const std::string& kernel, int device) {
  static std::mutex mutex;
  static std::set<std::pair<std::string, int>> missed;
  const std::lock_guard lock(mutex);
  return missed.insert({kernel, device}).second;
}

void require_cuda(const Tensor& tensor, const char* name) {
  STD_TORCH_CHECK(tensor.is_cuda(), "fx_fuser: ", name, " is not a CUDA tensor");
}

}  // namespace
}  // namespace fx_fuser
