// The one C++ file between torch and the kernels: loads cubins, reads tensors, launches.
//
// Built on the LibTorch stable ABI at version 2.11 and linked with a static CUDA runtime, so that a
// single binary loads into CPU-only torch (which has no CUDA symbols: hence the weak declaration)
// and into every CUDA torch from 2.11 on.
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <optional>
#include <shared_mutex>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "batch_stats_args.h"
#include "linear_split_args.h"
#include "pointwise_args.h"

extern "C" __attribute__((weak)) AOTITorchError
aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

namespace fx_fuser {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

void check(cudaError_t status, const char* call) {
  STD_TORCH_CHECK(status == cudaSuccess, "fx_fuser: ", call, ": ", cudaGetErrorString(status));
}

// ---- device, stream, launch ---------------------------------------------------------------------

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

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

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

// ---- pointwise ----------------------------------------------------------------------------------

struct PointwiseKernels {
  cudaKernel_t small;
  cudaKernel_t u32;
  cudaKernel_t u64;
  int multiprocessors;
  int scalars;
  ScalarType out;
  std::vector<ScalarType> in;
};

ScalarType scalar_type_of(const std::string& cuda_name) {
  static constexpr std::pair<const char*, ScalarType> kNames[] = {
      {"float", ScalarType::Float}, {"double", ScalarType::Double},
      {"__half", ScalarType::Half}, {"__nv_bfloat16", ScalarType::BFloat16},
      {"bool", ScalarType::Bool},   {"uint8_t", ScalarType::Byte},
      {"int8_t", ScalarType::Char}, {"int16_t", ScalarType::Short},
      {"int32_t", ScalarType::Int}, {"int64_t", ScalarType::Long},
  };
  for (const auto& [name, type] : kNames) {
    if (cuda_name == name) return type;
  }
  STD_TORCH_CHECK(false, "fx_fuser: unknown element type ", cuda_name);
}

// Loaded kernels by name and device, for the ops that graphs call: a graph names its kernel.
class Registry {
 public:
  void add(const std::string& name, int device, const PointwiseKernels* kernels) {
    const std::unique_lock lock(mutex_);
    kernels_[{name, device}] = kernels;
  }

  const PointwiseKernels& at(const std::string& name, int device) {
    const std::shared_lock lock(mutex_);
    const auto found = kernels_.find({name, device});
    STD_TORCH_CHECK(found != kernels_.end(), "fx_fuser: kernel ", name,
                    " is not loaded on cuda:", device, "; fx_fuser.native.prepare loads it");
    return *found->second;
  }

 private:
  std::shared_mutex mutex_;
  std::map<std::pair<std::string, int>, const PointwiseKernels*> kernels_;
};

Registry& registry() {
  static Registry instance;
  return instance;
}

// `signature` is what stands between the parentheses of FX_FUSER_POINTWISE, as a list.
int64_t load_pointwise(const std::string& name, const std::string& cubin,
                       const std::vector<std::string>& signature, int64_t device) {
  STD_TORCH_CHECK(signature.size() >= 5,
                  "fx_fuser: FX_FUSER_POINTWISE needs an epilogue, a number "
                  "of scalars, Acc, Out and at least one In");
  const OnDevice on_device(static_cast<int>(device));
  cudaLibrary_t library = load_library(cubin);
  auto kernels = std::make_unique<PointwiseKernels>();
  check(cudaDeviceGetAttribute(&kernels->multiprocessors, cudaDevAttrMultiProcessorCount,
                               static_cast<int>(device)),
        "cudaDeviceGetAttribute");
  kernels->small = get_kernel(library, "fx_fuser_pointwise_small");
  kernels->u32 = get_kernel(library, "fx_fuser_pointwise_u32");
  kernels->u64 = get_kernel(library, "fx_fuser_pointwise_u64");
  kernels->scalars = std::stoi(signature[1]);
  kernels->out = scalar_type_of(signature[3]);
  for (size_t i = 4; i < signature.size(); ++i) kernels->in.push_back(scalar_type_of(signature[i]));
  registry().add(name, static_cast<int>(device), kernels.get());
  return reinterpret_cast<int64_t>(kernels.release());
}

// out and every input as one set of loops: dimensions in out's memory order, innermost first, each
// with one stride an operand (out's last). Bounded, since a launch should not allocate.
struct Loops {
  static constexpr int kMaxRank = 64;  // torch's own limit
  int rank = 0;
  int operands = 0;
  std::array<int64_t, kMaxRank> size;
  std::array<std::array<int64_t, kMaxRank>, kMaxInputs + 1> stride;
};

Loops loops_over(const Tensor& out, const std::vector<Tensor>& inputs) {
  const auto sizes = out.sizes();
  const auto out_strides = out.strides();
  const int rank = static_cast<int>(sizes.size());
  const int count = static_cast<int>(inputs.size());

  std::array<int, Loops::kMaxRank> order;
  int kept = 0;
  for (int d = 0; d < rank; ++d) {
    if (sizes[d] != 1) order[kept++] = d;
  }
  std::sort(order.begin(), order.begin() + kept,
            [&](int a, int b) { return out_strides[a] < out_strides[b]; });

  const bool empty = out.numel() == 0;
  Loops loops;
  loops.operands = count + 1;
  int64_t dense = 1;
  for (int k = 0; k < kept; ++k) {
    STD_TORCH_CHECK(empty || out_strides[order[k]] == dense,
                    "fx_fuser: out must be dense, but has sizes ", to_string(sizes),
                    " and strides ", to_string(out_strides));
    loops.stride[count][k] = dense;
    dense *= sizes[order[k]];
    loops.size[loops.rank++] = sizes[order[k]];
  }
  for (int i = 0; i < count; ++i) {
    const auto in_sizes = inputs[i].sizes();
    const auto in_strides = inputs[i].strides();
    const int missing = rank - static_cast<int>(in_sizes.size());  // leading dims, broadcast
    bool fits = missing >= 0;
    for (int d = missing; fits && d < rank; ++d) {
      fits = in_sizes[d - missing] == sizes[d] || in_sizes[d - missing] == 1;
    }
    STD_TORCH_CHECK(fits, "fx_fuser: input ", i, " of shape ", to_string(in_sizes),
                    " does not broadcast to out's shape ", to_string(sizes));
    for (int k = 0; k < kept; ++k) {
      const int d = order[k] - missing;
      loops.stride[i][k] = d < 0 || in_sizes[d] == 1 ? 0 : in_strides[d];
    }
  }
  return loops;
}

// Two neighbouring loops are one where every operand steps through them as through one.
void coalesce(Loops& loops) {
  int last = 0;
  for (int d = 1; d < loops.rank; ++d) {
    bool joins = true;
    for (int i = 0; joins && i < loops.operands; ++i) {
      joins = loops.stride[i][d] == loops.stride[i][last] * loops.size[last];
    }
    if (joins) {
      loops.size[last] *= loops.size[d];
      continue;
    }
    ++last;
    loops.size[last] = loops.size[d];
    for (int i = 0; i < loops.operands; ++i) loops.stride[i][last] = loops.stride[i][d];
  }
  loops.rank = last + 1;
}

int64_t highest_offset(const Loops& loops, int operand) {
  int64_t offset = 0;
  for (int d = 0; d < loops.rank; ++d) offset += (loops.size[d] - 1) * loops.stride[operand][d];
  return offset;
}

bool same_layout(const Loops& loops, int operand) {
  const auto& out = loops.stride[loops.operands - 1];
  return std::equal(out.begin(), out.begin() + loops.rank, loops.stride[operand].begin());
}

// An operand that overlaps out must be out, element for element: a thread then reads what only it
// writes.
void check_overlap(const Loops& loops, int operand, const Tensor& out, const Tensor& input) {
  const auto begin = reinterpret_cast<uintptr_t>(input.data_ptr());
  const auto end = begin + (highest_offset(loops, operand) + 1) * input.element_size();
  const auto out_begin = reinterpret_cast<uintptr_t>(out.data_ptr());
  const auto out_end = out_begin + out.numel() * out.element_size();
  if (end <= out_begin || out_end <= begin) return;
  STD_TORCH_CHECK(begin == out_begin && same_layout(loops, operand) &&
                      input.element_size() == out.element_size(),
                  "fx_fuser: input ", operand,
                  " shares memory with out but not its layout; pass a copy");
}

Mode mode_of(const Loops& loops, int operand, const Tensor& input, int width) {
  const auto& stride = loops.stride[operand];
  if (stride[0] == 0) return Mode::kSplat;
  const int64_t element = input.element_size();
  const int64_t alignment = std::min<int64_t>(16, width * element);
  bool aligned = reinterpret_cast<uintptr_t>(input.data_ptr()) % alignment == 0;
  // Vectors begin at multiples of `width` in out. Where the operand runs along with out that is a
  // multiple in the operand too; elsewhere if rows are whole vectors and begin aligned.
  if (!same_layout(loops, operand)) {
    aligned &= stride[0] == 1 && loops.size[0] % width == 0;
    for (int d = 1; d < loops.rank; ++d) aligned &= stride[d] * element % alignment == 0;
  }
  return aligned ? Mode::kVector : Mode::kStrided;
}

template <class Index>
void launch_pointwise(const PointwiseKernels& kernels, const Loops& loops, const Tensor& out,
                      const std::vector<Tensor>& inputs, const std::vector<double>& scalars,
                      cudaStream_t stream) {
  const int out_size = static_cast<int>(out.element_size());
  const int width = vector_width(out_size, static_cast<int>(inputs[0].element_size()));

  PointwiseArgs<Index> args{};
  args.out = out.data_ptr();
  args.numel = static_cast<Index>(out.numel());
  args.rank = loops.rank;
  args.out_is_aligned = reinterpret_cast<uintptr_t>(args.out) % (width * out_size) == 0;
  std::copy(scalars.begin(), scalars.end(), args.scalar);
  for (int d = 0; d < loops.rank; ++d) {
    args.dim[d] = make_divisor(static_cast<Index>(loops.size[d]));
  }
  int raw_bytes = 0;
  for (int i = 0; i < static_cast<int>(inputs.size()); ++i) {
    args.in[i] = inputs[i].data_ptr();
    args.mode[i] = mode_of(loops, i, inputs[i], width);
    for (int d = 0; d < loops.rank; ++d) {
      args.stride[i][d] = static_cast<Index>(loops.stride[i][d]);
    }
    raw_bytes += width * static_cast<int>(inputs[i].element_size());
  }
  const int vectors = vectors_in_flight(width, raw_bytes);
  const int64_t blocks = ceil_div(out.numel(), int64_t{width} * vectors * kPointwiseThreads);
  if constexpr (sizeof(Index) == 4) {
    if (blocks < kernels.multiprocessors) {
      launch(kernels.small, ceil_div(out.numel(), int64_t{width} * kSmallThreads), kSmallThreads,
             stream, args);
    } else {
      launch(kernels.u32, blocks, kPointwiseThreads, stream, args);
    }
  } else {
    launch(kernels.u64, blocks, kPointwiseThreads, stream, args);
  }
}

// False, and nothing is launched, where more than kMaxDims dimensions remain after coalescing.
bool try_pointwise(const PointwiseKernels& kernels, const Tensor& out,
                   const std::vector<Tensor>& inputs, const std::vector<double>& scalars) {
  require_cuda(out, "out");
  const int device = out.get_device_index();
  STD_TORCH_CHECK(out.scalar_type() == kernels.out, "fx_fuser: the kernel writes ",
                  toString(kernels.out), ", but out is ", toString(out.scalar_type()));
  STD_TORCH_CHECK(inputs.size() == kernels.in.size(), "fx_fuser: the kernel takes ",
                  kernels.in.size(), " inputs, not ", inputs.size());
  STD_TORCH_CHECK(static_cast<int>(scalars.size()) == kernels.scalars,
                  "fx_fuser: the kernel takes ", kernels.scalars, " scalars, not ", scalars.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    STD_TORCH_CHECK(inputs[i].is_cuda() && inputs[i].get_device_index() == device,
                    "fx_fuser: input ", i, " is not on out's device, cuda:", device);
    STD_TORCH_CHECK(inputs[i].scalar_type() == kernels.in[i], "fx_fuser: the kernel reads input ",
                    i, " as ", toString(kernels.in[i]), ", but it is ",
                    toString(inputs[i].scalar_type()));
  }

  Loops loops = loops_over(out, inputs);
  if (out.numel() == 0) return true;
  if (loops.rank == 0) {  // one element
    for (int i = 0; i < loops.operands; ++i) loops.stride[i][0] = 1;
    loops.size[loops.rank++] = 1;
  }
  coalesce(loops);
  if (loops.rank > kMaxDims) return false;

  // What a grid of whole vectors overshoots must stay below 2^31 too.
  constexpr int64_t kHighest = std::numeric_limits<int32_t>::max() - (1 << 16);
  bool narrow = out.numel() <= kHighest;
  for (int i = 0; i < static_cast<int>(inputs.size()); ++i) {
    check_overlap(loops, i, out, inputs[i]);
    narrow &= highest_offset(loops, i) <= kHighest;
  }

  const OnDevice on_device(device);
  const cudaStream_t stream = current_stream(device);
  if (narrow) {
    launch_pointwise<uint32_t>(kernels, loops, out, inputs, scalars, stream);
  } else {
    launch_pointwise<uint64_t>(kernels, loops, out, inputs, scalars, stream);
  }
  return true;
}

void run_pointwise(const PointwiseKernels& kernels, const Tensor& out,
                   const std::vector<Tensor>& inputs, const std::vector<double>& scalars) {
  if (try_pointwise(kernels, out, inputs, scalars)) return;
  // Copies in out's layout leave one dimension.
  std::vector<Tensor> copies;
  for (const Tensor& input : inputs) {
    std::array<StableIValue, 6> stack{
        torch::stable::detail::from(out),
        torch::stable::detail::from(std::optional(input.scalar_type())),
        torch::stable::detail::from(std::nullopt),
        torch::stable::detail::from(std::nullopt),
        torch::stable::detail::from(std::nullopt),
        torch::stable::detail::from(std::nullopt)};
    TORCH_ERROR_CODE_CHECK(
        torch_call_dispatcher("aten::empty_like", "", stack.data(), TORCH_ABI_VERSION));
    Tensor copy = torch::stable::detail::to<Tensor>(stack[0]);
    torch::stable::copy_(copy, input);
    copies.push_back(std::move(copy));
  }
  try_pointwise(kernels, out, copies, scalars);
}

void pointwise(int64_t handle, const Tensor& out, const std::vector<Tensor>& inputs,
               const std::vector<double>& scalars) {
  run_pointwise(*reinterpret_cast<const PointwiseKernels*>(handle), out, inputs, scalars);
}

// ---- linear: the library's product, then the epilogue -------------------------------------------

double cpu_scalar(const Tensor& tensor) {
  const void* data = tensor.data_ptr();
  switch (tensor.scalar_type()) {
    case ScalarType::Double:
      return *static_cast<const double*>(data);
    case ScalarType::Float:
      return *static_cast<const float*>(data);
    case ScalarType::Long:
      return static_cast<double>(*static_cast<const int64_t*>(data));
    case ScalarType::Int:
      return *static_cast<const int32_t*>(data);
    case ScalarType::Bool:
      return *static_cast<const bool*>(data);
    default:
      break;
  }
  std::array<StableIValue, 5> stack{
      torch::stable::detail::from(tensor), torch::stable::detail::from(ScalarType::Double),
      torch::stable::detail::from(false), torch::stable::detail::from(false),
      torch::stable::detail::from(std::nullopt)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::to", "dtype", stack.data(), TORCH_ABI_VERSION));
  return cpu_scalar(torch::stable::detail::to<Tensor>(stack[0]));
}

Tensor linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  std::array<StableIValue, 3> stack{torch::stable::detail::from(x),
                                    torch::stable::detail::from(weight),
                                    torch::stable::detail::from(bias)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

// fx_fuser::linear_kernel on CUDA; fx_fuser/ops.py has the schema and what its arguments mean.
std::tuple<Tensor, Tensor> linear_kernel(const Tensor& x, const Tensor& weight,
                                         const std::optional<Tensor>& bias,
                                         const std::vector<std::optional<Tensor>>& t,
                                         const std::vector<double>& s, const std::string& kinds,
                                         const std::string& /*pattern*/, const std::string& kernel,
                                         ScalarType out_type, bool save) {
  require_cuda(x, "x");
  const PointwiseKernels& kernels = registry().at(kernel, x.get_device_index());
  const Tensor c = linear(x, weight, bias);

  std::vector<Tensor> inputs{c};
  std::vector<double> scalars;
  const auto c_sizes = c.sizes();
  std::vector<int64_t> shape(c_sizes.begin(), c_sizes.end());
  for (size_t i = 0; i < kinds.size(); ++i) {
    if (kinds[i] == 's') {
      scalars.push_back(s[i]);
    } else if (kinds[i] == 't' && t[i]->dim() == 0 && t[i]->is_cpu()) {
      scalars.push_back(cpu_scalar(*t[i]));
    } else if (kinds[i] == 't') {
      inputs.push_back(*t[i]);
      // A gate, one column wide, may be spread along that dimension.
      if (!shape.empty() && shape.back() == 1 && t[i]->dim() > 0) {
        shape.back() = t[i]->size(t[i]->dim() - 1);
      }
    }
  }
  const bool same_shape = std::equal(shape.begin(), shape.end(), c_sizes.begin());
  const bool in_place = !save && c.scalar_type() == out_type && same_shape;
  const Tensor y = in_place ? c : torch::stable::new_empty(c, shape, out_type);
  run_pointwise(kernels, y, inputs, scalars);
  return {y, save ? c : torch::stable::new_empty(c, {0})};
}

// ---- batch statistics ---------------------------------------------------------------------------

struct StatsKernels {
  cudaKernel_t planes;
  cudaKernel_t rows;
  cudaKernel_t rows_narrow;
  cudaKernel_t combine;
};

struct StatsLibrary {
  StatsKernels float32;
  StatsKernels float64;
  StatsKernels float16;
  StatsKernels bfloat16;

  const StatsKernels& of(ScalarType type) const {
    switch (type) {
      case ScalarType::Float:
        return float32;
      case ScalarType::Double:
        return float64;
      case ScalarType::Half:
        return float16;
      case ScalarType::BFloat16:
        return bfloat16;
      default:
        STD_TORCH_CHECK(false, "fx_fuser: batch_stats has no kernel for ", toString(type));
    }
  }
};

int64_t load_batch_stats(const std::string& cubin, int64_t device) {
  const OnDevice on_device(static_cast<int>(device));
  cudaLibrary_t library = load_library(cubin);
  const auto kernels = [&](const std::string& suffix) -> StatsKernels {
    const auto kernel = [&](const char* name) {
      return get_kernel(library, std::string("fx_fuser_batch_stats_") + name + "_" + suffix);
    };
    return {kernel("planes"), kernel("rows"), kernel("rows_narrow"), kernel("combine")};
  };
  return reinterpret_cast<int64_t>(new StatsLibrary{kernels("float32"), kernels("float64"),
                                                    kernels("float16"), kernels("bfloat16")});
}

// As many rounds as still leave kStatsMinBlocks blocks. Depends on the shape alone, so that results
// do not depend on the GPU's size.
int64_t units_per_block(int64_t units, int64_t round, int64_t blocks_beside) {
  int64_t rounds = kStatsRounds;
  while (rounds > 1 && ceil_div(units, rounds * round) * blocks_beside < kStatsMinBlocks) {
    rounds /= 2;
  }
  return rounds * round;
}

bool is_dense(const Tensor& x, bool channels_first) {
  const int rank = static_cast<int>(x.dim());
  int64_t dense = 1;
  const auto step = [&](int d) {
    if (x.size(d) != 1 && x.stride(d) != dense) return false;
    dense *= x.size(d);
    return true;
  };
  if (!channels_first && !step(1)) return false;
  for (int d = rank - 1; d >= 2; --d) {
    if (!step(d)) return false;
  }
  return (!channels_first || step(1)) && step(0);
}

struct StatsShape {
  int64_t samples;
  int64_t channels;
  int64_t plane;
};

// The partial moments of one launch: enough room for [channels, splits] of (count, mean, M2).
Tensor new_partial(const Tensor& x, ScalarType acc, int64_t channels, int64_t splits) {
  return torch::stable::new_empty(x, {channels, splits, 3}, acc);
}

std::pair<Tensor, int64_t> launch_planes(const StatsKernels& kernels, const Tensor& x,
                                         const StatsShape& shape, ScalarType acc,
                                         cudaStream_t stream) {
  const int64_t element = x.element_size();
  const int64_t width = 16 / element;
  const auto address = reinterpret_cast<uintptr_t>(x.data_ptr());
  PlanesArgs args{};
  args.x = reinterpret_cast<const void*>(address / 16 * 16);
  args.skew = static_cast<int64_t>(address % 16) / element;
  args.channels = shape.channels;
  args.plane = shape.plane;
  const bool runs_are_aligned = args.skew == 0 && shape.plane % width == 0;
  const int64_t vectors = runs_are_aligned ? shape.plane / width  //
                                           : (shape.plane + 2 * width - 2) / width;
  args.vectors = make_divisor(static_cast<uint64_t>(vectors));
  args.units = shape.samples * vectors;
  args.units_per_block =
      units_per_block(args.units, kStatsThreads * kStatsInFlight, shape.channels);
  args.splits = ceil_div(args.units, args.units_per_block);
  Tensor partial = new_partial(x, acc, shape.channels, args.splits);
  args.partial = partial.data_ptr();
  launch(kernels.planes, args.splits * shape.channels, kStatsThreads, stream, args);
  return {partial, args.splits};
}

std::pair<Tensor, int64_t> launch_rows(const StatsKernels& kernels, const Tensor& x,
                                       const StatsShape& shape, ScalarType acc,
                                       cudaStream_t stream) {
  int64_t width = 16 / static_cast<int64_t>(x.element_size());
  const bool aligned = reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0;
  const bool wide = aligned && shape.channels % width == 0;
  if (!wide) width = 1;
  const int64_t vectors = shape.channels / width;
  const int64_t tile = std::min<int64_t>(vectors, kStatsThreads);
  const int64_t tiles = ceil_div(vectors, tile);
  RowsArgs args{};
  args.x = x.data_ptr();
  args.rows = shape.samples * shape.plane;
  args.channels = shape.channels;
  args.rows_per_block = units_per_block(args.rows, kStatsThreads / tile * kStatsInFlight, tiles);
  args.splits = ceil_div(args.rows, args.rows_per_block);
  Tensor partial = new_partial(x, acc, shape.channels, args.splits);
  args.partial = partial.data_ptr();
  launch(wide ? kernels.rows : kernels.rows_narrow, args.splits * tiles, kStatsThreads, stream,
         args);
  return {partial, args.splits};
}

// (mean, biased variance) of each channel of x[N, C, ...], dense with channels second or last.
std::tuple<Tensor, Tensor> batch_stats(int64_t handle, const Tensor& x) {
  require_cuda(x, "x");
  STD_TORCH_CHECK(x.dim() >= 2, "fx_fuser: batch_stats wants x[N, C, ...], not ",
                  to_string(x.sizes()));
  const StatsKernels& kernels = reinterpret_cast<const StatsLibrary*>(handle)->of(x.scalar_type());
  const ScalarType acc =
      x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  StatsShape shape{x.size(0), x.size(1), 1};
  for (int64_t d = 2; d < x.dim(); ++d) shape.plane *= x.size(d);
  const bool channels_second = is_dense(x, /*channels_first=*/true);
  const bool channels_last = is_dense(x, /*channels_first=*/false);
  STD_TORCH_CHECK(channels_second || channels_last, "fx_fuser: batch_stats wants a dense x, not ",
                  to_string(x.sizes()), " with strides ", to_string(x.strides()));

  Tensor mean = torch::stable::new_empty(x, {shape.channels}, acc);
  Tensor variance = torch::stable::new_empty(x, {shape.channels}, acc);
  if (shape.channels == 0) return {mean, variance};

  const int device = x.get_device_index();
  const OnDevice on_device(device);
  const cudaStream_t stream = current_stream(device);
  std::pair<Tensor, int64_t> partial{mean, 0};  // of an empty x: no moments, and NaN from them
  if (x.numel() > 0) {
    // One element a plane is both layouts; so is one channel.
    const bool as_rows = channels_last && (!channels_second || shape.plane == 1);
    partial = as_rows ? launch_rows(kernels, x, shape, acc, stream)
                      : launch_planes(kernels, x, shape, acc, stream);
  }
  const CombineArgs args{partial.first.data_ptr(), mean.data_ptr(), variance.data_ptr(),
                         partial.second};
  launch(kernels.combine, shape.channels, kStatsThreads, stream, args);
  return {mean, variance};
}

// ---- linear, split products ---------------------------------------------------------------------

struct LinearSplitKernels {
  cudaKernel_t split_rows;
  cudaKernel_t product;
  int multiprocessors;
  int scalars;
  ScalarType out;
  std::vector<ScalarType> operands;
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
int64_t load_linear_split(const std::string& cubin, const std::vector<std::string>& signature,
                          int64_t device) {
  STD_TORCH_CHECK(signature.size() >= 5,
                  "fx_fuser: FX_FUSER_LINEAR_SPLIT needs an epilogue, a number of scalars, Acc, "
                  "Out and the type of z");
  const OnDevice on_device(static_cast<int>(device));
  cudaLibrary_t library = load_library(cubin);
  auto kernels = std::make_unique<LinearSplitKernels>();
  kernels->split_rows = get_kernel(library, "fx_fuser_linear_split_rows");
  kernels->product = get_kernel(library, "fx_fuser_linear_split");
  check(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernels->product),
                             cudaFuncAttributeMaxDynamicSharedMemorySize, kLinearSharedBytes),
        "cudaFuncSetAttribute");
  check(cudaDeviceGetAttribute(&kernels->multiprocessors, cudaDevAttrMultiProcessorCount,
                               static_cast<int>(device)),
        "cudaDeviceGetAttribute");
  kernels->scalars = std::stoi(signature[1]);
  kernels->out = scalar_type_of(signature[3]);
  for (size_t i = 5; i < signature.size(); ++i) {
    kernels->operands.push_back(scalar_type_of(signature[i]));
  }
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

// What 16-byte loads and the copy engine ask of rows of fp32.
bool has_aligned_rows(const Tensor& tensor, int64_t rows, int64_t stride) {
  const bool dense = tensor.stride(-1) == 1 || tensor.size(-1) == 1;
  return dense && reinterpret_cast<uintptr_t>(tensor.data_ptr()) % 16 == 0 &&
         (rows == 1 || stride % 4 == 0);
}

// As few blocks as finish in the same number of rounds: the others would only draw power.
int64_t persistent_blocks(int64_t tiles, int64_t multiprocessors) {
  return ceil_div(tiles, ceil_div(tiles, multiprocessors));
}

void check_linear(const LinearSplitKernels& kernels, const Tensor& x, const Tensor& weight,
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
  check_one(x, "x", ScalarType::Float);
  check_one(weight, "weight", ScalarType::Float);
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
    check_one(*z, "z", ScalarType::Float);
    check_result(*z, "z");
  }
  if (bias) {
    check_one(*bias, "bias", ScalarType::Float);
    STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), "fx_fuser: bias of shape ",
                    to_string(bias->sizes()), " does not fit weight ", to_string(weight.sizes()));
  }
  STD_TORCH_CHECK(operands.size() == kernels.operands.size(), "fx_fuser: the kernel takes ",
                  kernels.operands.size(), " operands, not ", operands.size());
  STD_TORCH_CHECK(static_cast<int>(scalars.size()) == kernels.scalars,
                  "fx_fuser: the kernel takes ", kernels.scalars, " scalars, not ", scalars.size());
  for (size_t i = 0; i < operands.size(); ++i) {
    check_one(operands[i], "an operand", kernels.operands[i]);
    STD_TORCH_CHECK(broadcasts_to(operands[i], out), "fx_fuser: operand ", i, " of shape ",
                    to_string(operands[i].sizes()), " does not broadcast to out's shape ",
                    to_string(out.sizes()));
  }
}

// out = epilogue(z, operands, scalars) with z = x weightᵀ + bias, which is stored too if asked for.
// False, and nothing is launched, where the copy engine or the kernel's indices do not take these
// shapes, strides or addresses.
bool linear_split(int64_t handle, const Tensor& x, const Tensor& weight,
                  const std::optional<Tensor>& bias, const Tensor& out,
                  const std::optional<Tensor>& z, const std::vector<Tensor>& operands,
                  const std::vector<double>& scalars) {
  const auto& kernels = *reinterpret_cast<const LinearSplitKernels*>(handle);
  check_linear(kernels, x, weight, bias, out, z, operands, scalars);
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
  if (!has_aligned_rows(x, m, *x_stride) || !has_aligned_rows(weight, n, weight.stride(0)) ||
      (n > 1 && weight.stride(0) == 0)) {
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
  const int64_t broken_bytes = tiles * kLinearConsumerThreads * 8;
  const Tensor workspace = torch::stable::new_empty(
      x, {split_bytes + parked_bytes + broken_bytes + m * 4}, ScalarType::Byte);
  auto* split = static_cast<uint8_t*>(workspace.data_ptr());
  uint8_t* parked = split + split_bytes;
  uint8_t* broken = parked + parked_bytes;
  auto* unscale = reinterpret_cast<float*>(broken + broken_bytes);

  const SplitRowsArgs rows{static_cast<const float*>(x.data_ptr()),
                           *x_stride,
                           split,
                           unscale,
                           static_cast<int32_t>(m),
                           static_cast<int32_t>(k),
                           static_cast<int32_t>(padded_k)};
  const int cluster = split_cluster(k);
  LaunchOptions in_cluster;
  in_cluster.cluster = cluster;
  launch(kernels.split_rows, m * cluster, kSplitThreads, stream, rows, in_cluster);

  const auto unsigned64 = [](int64_t value) { return static_cast<cuuint64_t>(value); };
  args.weight_stride = n == 1 ? ceil_div(k, 4) * 4 : weight.stride(0);
  args.weight_map = tensor_map<2>(
      CU_TENSOR_MAP_DATA_TYPE_FLOAT32, weight.data_ptr(), {unsigned64(k), unsigned64(n)},
      {unsigned64(args.weight_stride * 4)}, {kLinearBoxK, kLinearTileN});
  args.x_map = tensor_map<3>(
      CU_TENSOR_MAP_DATA_TYPE_FLOAT16, split, {unsigned64(padded_k), unsigned64(m), 2},
      {unsigned64(padded_k * 2), unsigned64(m * padded_k * 2)}, {kLinearTileK, kLinearTileM, 2});
  args.x_unscale = unscale;
  args.parked = reinterpret_cast<float4*>(parked);
  args.broken = reinterpret_cast<uint64_t*>(broken);
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
  launch(kernels.product, blocks, kLinearThreads, stream, args, overlapped);
  return true;
}

}  // namespace

STABLE_TORCH_LIBRARY(fx_fuser_native, m) {
  m.def("load_pointwise(str name, str cubin, str[] signature, int device) -> int");
  m.def("pointwise(int kernels, Tensor(a!) out, Tensor[] inputs, float[] scalars) -> ()");
  m.def("load_batch_stats(str cubin, int device) -> int");
  m.def("batch_stats(int kernels, Tensor x) -> (Tensor, Tensor)");
  m.def("load_linear_split(str cubin, str[] signature, int device) -> int");
  m.def(
      "linear_split(int kernels, Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out, "
      "Tensor(b!)? z, Tensor[] operands, float[] scalars) -> bool");
}

// For every device, so that a CPU tensor meets our error and not the dispatcher's.
STABLE_TORCH_LIBRARY_IMPL(fx_fuser_native, CompositeExplicitAutograd, m) {
  m.impl("load_pointwise", TORCH_BOX(&load_pointwise));
  m.impl("pointwise", TORCH_BOX(&pointwise));
  m.impl("load_batch_stats", TORCH_BOX(&load_batch_stats));
  m.impl("batch_stats", TORCH_BOX(&batch_stats));
  m.impl("load_linear_split", TORCH_BOX(&load_linear_split));
  m.impl("linear_split", TORCH_BOX(&linear_split));
}

STABLE_TORCH_LIBRARY_IMPL(fx_fuser, CUDA, m) { m.impl("linear_kernel", TORCH_BOX(&linear_kernel)); }

}  // namespace fx_fuser
