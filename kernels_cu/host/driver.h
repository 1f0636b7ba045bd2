// The part of the CUDA driver API that the shim calls. Functions, types and constants are declared
// here, so the shim is built without CUDA headers, is linked with no CUDA library, and one binary
// works with every driver from CUDA 12.0 on. tests/native/test_driver.py compares these
// declarations with a toolkit's cuda.h.
//
// Source: CUDA Driver API, https://docs.nvidia.com/cuda/cuda-driver-api/
#pragma once

#include <torch/csrc/stable/library.h>

#include <cstddef>
#include <cstdint>

#include "common/tensor_map.h"

namespace fx_fuser {
namespace {

// CUcontext, CUlibrary, CUkernel, CUfunction and CUstream.
using Context = struct ContextOfDriver*;
using Library = struct LibraryOfDriver*;
using LibraryKernel = struct LibraryKernelOfDriver*;
using Kernel = struct KernelOfDriver*;  // of one context
using Stream = struct StreamOfDriver*;

constexpr int kDeviceMultiprocessors = 16;  // CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
constexpr int kDeviceClock = 13;            // CU_DEVICE_ATTRIBUTE_CLOCK_RATE
constexpr int kDeviceMemoryClock = 36;      // CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE
constexpr int kDeviceMemoryBits = 37;       // CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH
constexpr int kDeviceMajor = 75;            // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
constexpr int kDeviceMaxShared = 97;        // CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
constexpr int kKernelMaxDynamicShared = 8;  // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr unsigned kHostMemoryPortable = 1;  // CU_MEMHOSTALLOC_PORTABLE
constexpr unsigned kHostMemoryMapped = 2;    // CU_MEMHOSTALLOC_DEVICEMAP
constexpr unsigned kLaunchCluster = 4;       // CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
constexpr unsigned kLaunchOverlapped = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
constexpr int kMapFloat16 = 6;             // CU_TENSOR_MAP_DATA_TYPE_FLOAT16
constexpr int kMapFloat32 = 7;             // …_FLOAT32
constexpr int kMapBFloat16 = 9;            // …_BFLOAT16
constexpr int kMapTFloat32 = 11;           // …_TFLOAT32
constexpr int kMapNotInterleaved = 0;      // CU_TENSOR_MAP_INTERLEAVE_NONE
constexpr int kMapSwizzle128 = 3;          // CU_TENSOR_MAP_SWIZZLE_128B
constexpr int kMapPromotion256 = 3;        // CU_TENSOR_MAP_L2_PROMOTION_L2_256B
constexpr int kMapZerosOutside = 0;        // CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE

// CUlaunchAttribute.
struct LaunchAttribute {
  unsigned id;
  char pad[4];
  union {
    char size[64];
    struct {
      unsigned x, y, z;
    } cluster;
    int overlapped;
  } value;
};

// CUlaunchConfig.
struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_bytes;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned count;
};

// The driver's functions, named without their "cu" prefix; each returns a CUresult.
struct Driver {
  int (*GetErrorString)(int, const char**);
  int (*DeviceGet)(int* device, int ordinal);
  int (*DeviceGetAttribute)(int* value, int attribute, int device);
  int (*DevicePrimaryCtxRetain)(Context*, int device);
  int (*CtxGetCurrent)(Context*);
  int (*CtxSetCurrent)(Context);
  int (*LibraryLoadFromFile)(Library*, const char* file, int* options, void** values,
                             unsigned count, int* library_options, void** library_values,
                             unsigned library_count);
  int (*LibraryGetKernel)(LibraryKernel*, Library, const char* name);
  int (*KernelGetFunction)(Kernel*, LibraryKernel);
  int (*FuncSetAttribute)(Kernel, int attribute, int value);
  int (*OccupancyMaxActiveBlocksPerMultiprocessor)(int* blocks, Kernel, int threads,
                                                   size_t shared_bytes);
  int (*OccupancyMaxActiveClusters)(int* clusters, Kernel, const LaunchConfig*);
  int (*LaunchKernelEx)(const LaunchConfig*, Kernel, void** parameters, void** extra);
  int (*MemHostAlloc)(void**, size_t bytes, unsigned flags);
  int (*TensorMapEncodeTiled)(TensorMap*, int type, uint32_t rank, void* data,
                              const uint64_t* sizes, const uint64_t* strides, const uint32_t* box,
                              const uint32_t* steps, int interleave, int swizzle, int promotion,
                              int fill);
};

Driver& loaded_driver() {
  static Driver instance{};
  return instance;
}

const Driver& driver() {
  const Driver& found = loaded_driver();
  STD_TORCH_CHECK(found.LaunchKernelEx != nullptr,
                  "fx_fuser: no CUDA driver was found when fx_fuser was loaded");
  return found;
}

// address: the driver's cuGetProcAddress_v2, which finds the other functions.
void use_driver(int64_t address) {
  using Find = int (*)(const char* name, void** found, int version, uint64_t flags, int* status);
  const auto find = reinterpret_cast<Find>(address);
  Driver made{};
  const auto set = [&](auto& function, const char* name) {
    void* found = nullptr;
    int status = 0;
    const int result = find(name, &found, 12000, 0, &status);
    STD_TORCH_CHECK(result == 0 && found != nullptr, "fx_fuser: the CUDA driver has no ", name,
                    "; it must be of CUDA 12.0 or later");
    function = reinterpret_cast<std::decay_t<decltype(function)>>(found);
  };
#define FX_FUSER_SET(name) set(made.name, "cu" #name)
  FX_FUSER_SET(GetErrorString);
  FX_FUSER_SET(DeviceGet);
  FX_FUSER_SET(DeviceGetAttribute);
  FX_FUSER_SET(DevicePrimaryCtxRetain);
  FX_FUSER_SET(CtxGetCurrent);
  FX_FUSER_SET(CtxSetCurrent);
  FX_FUSER_SET(LibraryLoadFromFile);
  FX_FUSER_SET(LibraryGetKernel);
  FX_FUSER_SET(KernelGetFunction);
  FX_FUSER_SET(FuncSetAttribute);
  FX_FUSER_SET(OccupancyMaxActiveBlocksPerMultiprocessor);
  FX_FUSER_SET(OccupancyMaxActiveClusters);
  FX_FUSER_SET(LaunchKernelEx);
  FX_FUSER_SET(MemHostAlloc);
  FX_FUSER_SET(TensorMapEncodeTiled);
#undef FX_FUSER_SET
  loaded_driver() = made;
}

const char* text_of(int result) {
  const char* text = nullptr;
  driver().GetErrorString(result, &text);
  return text != nullptr ? text : "an error that the driver has no text for";
}

void check(int result, const char* call) {
  STD_TORCH_CHECK(result == 0, "fx_fuser: ", call, ": ", text_of(result));
}

}  // namespace
}  // namespace fx_fuser
