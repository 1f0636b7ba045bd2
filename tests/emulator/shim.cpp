// The shim's own host code, which checks tensors, fills arguments and launches, built for the
// emulated device: its tensors are on the CPU, and its driver is driver.h.
//
// torch's headers come first, so that the macros below affect only fx_fuser's code.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <new>

#include "memory.h"

namespace torch::stable::accelerator {

struct NoGuard {
  explicit NoGuard(int /*device*/) {}
};

}  // namespace torch::stable::accelerator

namespace emulator {
namespace {

Guard guard = Guard::kBehind;

// Allocates a tensor in guarded memory, which lives until `release`.
AOTITorchError guarded_strided(int64_t rank, const int64_t* sizes, const int64_t* strides,
                               int32_t dtype, int32_t device_type, int32_t device,
                               size_t misalignment, AtenTensorHandle* made) {
  int64_t last = 0;
  for (int64_t d = 0; d < rank; ++d) {
    if (sizes[d] == 0) {
      return aoti_torch_empty_strided(rank, sizes, strides, dtype, device_type, device, made);
    }
    last += (sizes[d] - 1) * strides[d];
  }
  const auto bytes = static_cast<size_t>(last + 1) * aoti_torch_dtype_element_size(dtype);
  void* data = nullptr;
  try {
    data = allocate(bytes, misalignment, guard);
  } catch (const std::bad_alloc&) {
    return AOTI_TORCH_FAILURE;  // as torch's allocators do
  }
  return aoti_torch_create_tensor_from_blob(data, rank, sizes, strides, 0, dtype, device_type,
                                            device, made);
}

AOTITorchError guarded_empty(int64_t rank, const int64_t* sizes, const int64_t* strides,
                             int32_t dtype, int32_t device_type, int32_t device,
                             AtenTensorHandle* made) {
  return guarded_strided(rank, sizes, strides, dtype, device_type, device, 0, made);
}

}  // namespace
}  // namespace emulator

#define DeviceGuard NoGuard
#define is_cuda is_cpu
#define aoti_torch_get_current_cuda_stream emulated_stream
#define aoti_torch_empty_strided emulator::guarded_empty
#define fx_fuser_native fx_fuser_emulated
#define CUDA PrivateUse1  // for ops that graphs call, which are unused here
#include "host/shim.cpp"
#define fx_fuser_bench fx_fuser_emulated
#include "kernels.h"
#undef fx_fuser_bench
#undef fx_fuser_native
#undef CUDA

#include "driver.h"

AOTITorchError emulated_stream(int32_t /*device*/, void** stream) {
  *stream = nullptr;
  return AOTI_TORCH_SUCCESS;
}

namespace fx_fuser {
namespace {

// A tensor with `like`'s sizes and strides, all NaN, whose address modulo 16 is `misalignment`.
Tensor guarded(const Tensor& like, int64_t misalignment) {
  int32_t dtype = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle made = nullptr;
  TORCH_ERROR_CODE_CHECK(emulator::guarded_strided(
      like.dim(), like.sizes().data(), like.strides().data(), dtype, device_type,
      like.get_device_index(), static_cast<size_t>(misalignment), &made));
  return Tensor(made);
}

std::string release() { return emulator::release_all(); }

// Kernels that are loaded from now on run on such a GPU.
void use_device(int64_t major, int64_t multiprocessors, int64_t shared_bytes) {
  loaded_driver() = emulator::driver();
  emulator::device = {static_cast<int>(major), static_cast<int>(multiprocessors),
                      static_cast<int>(shared_bytes)};
}

// The schedule of launches from now on. Numbers as in machine.h.
void use_settings(int64_t order, int64_t copies, int64_t seed, bool guard_ahead) {
  emulator::settings = {static_cast<emulator::Order>(order), static_cast<emulator::Copies>(copies),
                        static_cast<uint64_t>(seed)};
  emulator::guard = guard_ahead ? emulator::Guard::kAhead : emulator::Guard::kBehind;
}

// Launches one kernel, whose argument is a struct of these tensors' addresses.
void run_kernel(const std::string& library, const std::string& name, int64_t blocks,
                int64_t threads, int64_t shared_bytes, int64_t cluster,
                const std::vector<Tensor>& tensors) {
  const Kernel kernel = get_kernel(load_library(library), name, static_cast<int>(shared_bytes));
  std::array<const void*, 8> args{};
  STD_TORCH_CHECK(tensors.size() <= args.size(), "fx_fuser: at most ", args.size(), " tensors");
  for (size_t i = 0; i < tensors.size(); ++i) args[i] = tensors[i].data_ptr();
  LaunchOptions options;
  options.shared_bytes = static_cast<int>(shared_bytes);
  options.cluster = static_cast<int>(cluster);
  launch(kernel, blocks, static_cast<int>(threads), nullptr, args, options);
}

int64_t launches() { return emulator::launches; }

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(fx_fuser_emulated, m) {
  m.def("guarded(Tensor like, int misalignment) -> Tensor");
  m.def("release() -> str");
  m.def("use_device(int major, int multiprocessors, int shared_bytes) -> ()");
  m.def("use_settings(int order, int copies, int seed, bool guard_ahead) -> ()");
  m.def(
      "run_kernel(str library, str name, int blocks, int threads, int shared_bytes, int cluster, "
      "Tensor[] tensors) -> ()");
  m.def("launches() -> int");
  m.def(
      "fold(Tensor[] weights, Tensor[] vectors, int[] given, float[] eps, int[] places, "
      "str kernel, ScalarType out, Tensor after) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(fx_fuser_emulated, CompositeExplicitAutograd, m) {
  m.impl("guarded", TORCH_BOX(&guarded));
  m.impl("release", TORCH_BOX(&release));
  m.impl("use_device", TORCH_BOX(&use_device));
  m.impl("use_settings", TORCH_BOX(&use_settings));
  m.impl("run_kernel", TORCH_BOX(&run_kernel));
  m.impl("launches", TORCH_BOX(&launches));
  m.impl("fold", TORCH_BOX(&fold));
}

}  // namespace fx_fuser
