// The CUDA driver of the emulated device: the functions that the shim calls
// (kernels_cu/host/driver.h). The cubins that it loads are libraries of kernels compiled for the
// CPU.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <string>

#include "emulated_map.h"
#include "host/driver.h"
#include "machine.h"

namespace emulator {

// The properties of a GPU that host code queries.
struct Device {
  int major = 9;
  int multiprocessors = 2;
  int shared_bytes = 232448;  // the most per block
};

struct LoadedKernel {
  std::string name;
  void (*run)(const void* args);
  int most_dynamic_shared;
};

inline Device device;
inline Settings settings;
inline std::string error;
inline int launches = 0;

inline int failed(const std::string& what) {
  error = what;
  return 1;
}

inline int attribute(int* value, int attribute, int /*device*/) {
  switch (attribute) {
    case fx_fuser::kDeviceMultiprocessors:
      *value = device.multiprocessors;
      return 0;
    case fx_fuser::kDeviceMajor:
      *value = device.major;
      return 0;
    case fx_fuser::kDeviceClock:  // 0: unknown
    case fx_fuser::kDeviceMemoryClock:
    case fx_fuser::kDeviceMemoryBits:
      *value = 0;
      return 0;
    case fx_fuser::kDeviceMaxShared:
      *value = device.shared_bytes;
      return 0;
    default:
      return failed("the emulated device has no attribute " + std::to_string(attribute));
  }
}

inline int load(fx_fuser::Library* library, const char* file, int*, void**, unsigned, int*, void**,
                unsigned) {
  void* opened = dlopen(file, RTLD_NOW | RTLD_LOCAL);
  if (opened == nullptr) return failed(dlerror());
  *library = static_cast<fx_fuser::Library>(opened);
  return 0;
}

inline int find(fx_fuser::LibraryKernel* kernel, fx_fuser::Library library, const char* name) {
  void* run = dlsym(library, (std::string("emulated_") + name).c_str());
  if (run == nullptr) return failed(std::string("no kernel ") + name);
  auto* made = new LoadedKernel{name, reinterpret_cast<void (*)(const void*)>(run), 48 << 10};
  *kernel = reinterpret_cast<fx_fuser::LibraryKernel>(made);
  return 0;
}

inline int function_of(fx_fuser::Kernel* kernel, fx_fuser::LibraryKernel of) {
  *kernel = reinterpret_cast<fx_fuser::Kernel>(of);
  return 0;
}

inline int set_attribute(fx_fuser::Kernel kernel, int attribute, int value) {
  if (attribute != fx_fuser::kKernelMaxDynamicShared) return failed("no such attribute");
  if (value > device.shared_bytes) {
    return failed("a block of this GPU has " + std::to_string(device.shared_bytes) +
                  " bytes of shared memory, not " + std::to_string(value));
  }
  reinterpret_cast<LoadedKernel*>(kernel)->most_dynamic_shared = value;
  return 0;
}

inline int launch(const fx_fuser::LaunchConfig* config, fx_fuser::Kernel of, void** parameters,
                  void**) {
  const auto& kernel = *reinterpret_cast<const LoadedKernel*>(of);
  unsigned cluster = 1;
  for (unsigned i = 0; i < config->count; ++i) {
    if (device.major < 9) return failed("a launch attribute that sm_90 brought");
    const fx_fuser::LaunchAttribute& given = config->attributes[i];
    if (given.id == fx_fuser::kLaunchCluster) cluster = given.value.cluster.x;
  }
  const bool fits = config->grid[0] > 0 && config->grid[0] % cluster == 0 && config->block[0] > 0 &&
                    config->block[0] <= 1024 &&
                    config->shared_bytes <= static_cast<unsigned>(kernel.most_dynamic_shared);
  if (!fits) return failed(kernel.name + ": no such launch");
  const Launch made{kernel.run,
                    parameters[0],
                    {config->grid[0], 1, 1},
                    {config->block[0], 1, 1},
                    config->shared_bytes,
                    static_cast<size_t>(device.shared_bytes),
                    cluster};
  ++launches;
  const std::string what = run(made, settings);
  return what.empty() ? 0 : failed(kernel.name + ": " + what);
}

inline int resident_blocks(int* blocks, fx_fuser::Kernel, int, size_t shared_bytes) {
  *blocks = 2 * shared_bytes <= static_cast<size_t>(device.shared_bytes) ? 2 : 1;
  return 0;
}

inline int host_memory(void** memory, size_t bytes, unsigned) {
  *memory = std::malloc(bytes);
  return *memory == nullptr;
}

inline int error_text(int, const char** text) {
  *text = error.c_str();
  return 0;
}

// Like a real GPU: with clusters of two, half as many as multiprocessors.
inline int resident_clusters(int* clusters, fx_fuser::Kernel,
                             const fx_fuser::LaunchConfig* config) {
  unsigned cluster = 1;
  for (unsigned i = 0; i < config->count; ++i) {
    if (config->attributes[i].id == fx_fuser::kLaunchCluster) {
      cluster = config->attributes[i].value.cluster.x;
    }
  }
  *clusters = std::max(1, device.multiprocessors / static_cast<int>(cluster));
  return 0;
}

// Checks the driver's rules, for maps of 16-bit elements.
inline int encode(fx_fuser::TensorMap* to, int type, uint32_t rank, void* data,
                  const uint64_t* sizes, const uint64_t* strides, const uint32_t* box,
                  const uint32_t* steps, int interleave, int swizzle, int /*promotion*/, int fill) {
  static_assert(sizeof(EmulatedMap) <= sizeof(fx_fuser::TensorMap));
  if (type != fx_fuser::kMapFloat16 && type != fx_fuser::kMapBFloat16) {
    return failed("a tensor map of this type is not emulated");
  }
  if (interleave != fx_fuser::kMapNotInterleaved || swizzle != fx_fuser::kMapSwizzle128 ||
      fill != fx_fuser::kMapZerosOutside) {
    return failed("a tensor map of this form is not emulated");
  }
  EmulatedMap made{EmulatedMap::kMagic, rank, static_cast<unsigned char*>(data), {}, {}, {}};
  bool fits = rank >= 1 && rank <= 4 && reinterpret_cast<uintptr_t>(data) % 16 == 0 &&
              box[0] * EmulatedMap::kElementBytes <= 128 &&
              box[0] * EmulatedMap::kElementBytes % 16 == 0;
  for (uint32_t d = 0; fits && d < rank; ++d) {
    fits = sizes[d] > 0 && sizes[d] <= uint64_t{1} << 32 && box[d] > 0 && box[d] <= 256 &&
           steps[d] == 1;
    if (d + 1 < rank) fits = fits && strides[d] % 16 == 0 && strides[d] < uint64_t{1} << 40;
    made.sizes[d] = sizes[d];
    made.box[d] = box[d];
    if (d > 0) made.strides[d - 1] = strides[d - 1];
  }
  if (!fits) return failed("no such tensor map");
  std::memcpy(to, &made, sizeof(made));
  return 0;
}

inline fx_fuser::Driver driver() {
  fx_fuser::Driver made{};
  made.GetErrorString = error_text;
  made.DeviceGet = [](int* found, int ordinal) { return *found = ordinal, 0; };
  made.DeviceGetAttribute = attribute;
  made.DevicePrimaryCtxRetain = [](fx_fuser::Context* context, int) {
    return *context = reinterpret_cast<fx_fuser::Context>(&device), 0;
  };
  made.CtxGetCurrent = [](fx_fuser::Context* context) { return *context = nullptr, 0; };
  made.CtxSetCurrent = [](fx_fuser::Context) { return 0; };
  made.LibraryLoadFromFile = load;
  made.LibraryGetKernel = find;
  made.KernelGetFunction = function_of;
  made.FuncSetAttribute = set_attribute;
  made.OccupancyMaxActiveBlocksPerMultiprocessor = resident_blocks;
  made.LaunchKernelEx = launch;
  made.MemHostAlloc = host_memory;
  made.TensorMapEncodeTiled = encode;
  made.OccupancyMaxActiveClusters = resident_clusters;
  return made;
}

}  // namespace emulator
