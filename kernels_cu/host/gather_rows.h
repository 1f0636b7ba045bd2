// Gathers along rows, by an index that batches share, and their gradient: which tensors, launches,
// and both as graphs call them. fx_fuser/ops/attention_bias/gathered.py says what the arguments
// mean.
#pragma once

#include <array>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>

#include "attention/gather_rows_args.h"
#include "host/kernel.h"
#include "host/made.h"

namespace fx_fuser {
namespace {

struct GatherKernels {
  Kernel gather;
  Kernel transposed;
  Kernel order;
  Kernel backward;
  ScalarType type;
};

int64_t load_gather_rows(const Sources& from) {
  const Signature types(from);
  types.check_operands(0);
  const Library library = load_library(from.cubins.at(0));
  auto kernels = std::make_unique<GatherKernels>();
  kernels->type = types.x;
  kernels->gather = get_kernel(library, "fx_fuser_gather_rows");
  kernels->transposed = get_kernel(library, "fx_fuser_gather_rows_transposed");
  kernels->order = get_kernel(library, "fx_fuser_gather_rows_order");
  kernels->backward = get_kernel(library, "fx_fuser_gather_rows_backward");
  return keep<GatherKernels>(from, std::move(kernels));
}
const AddLoader kGatherRowsLoader("gather_rows", load_gather_rows);

void check_gather(const Tensor& rows, const char* name, ScalarType type, const Tensor& index) {
  require_cuda(rows, name);
  require_cuda(index, "index");
  const bool fits = rows.dim() == 3 && index.dim() == 2 && rows.size(1) == index.size(0);
  STD_TORCH_CHECK(fits && rows.scalar_type() == type && index.scalar_type() == ScalarType::Long,
                  "fx_fuser: a gather of ", to_string(rows.sizes()), " by ",
                  to_string(index.sizes()));
}

// What all kernels read, of batches of rows; nothing where they do not take these sizes.
std::optional<GatherArgs> gather_args(const Tensor& index, int64_t batches, int64_t places) {
  const int64_t rows = index.size(0);
  const int64_t columns = index.size(1);
  constexpr int64_t kMost = 1 << 20;  // so that blocks are counted in 32 bits
  if (places > kGatherPlaces || columns > kGatherColumns || rows > kMost || batches > kMost) {
    return std::nullopt;
  }
  GatherArgs args{};
  args.index = {static_cast<const int64_t*>(index.data_ptr()), index.stride(0), index.stride(1)};
  args.batches = static_cast<int32_t>(batches);
  args.rows = static_cast<int32_t>(rows);
  args.places = static_cast<int32_t>(places);
  args.columns = static_cast<int32_t>(columns);
  args.batch_chunks = static_cast<int32_t>(ceil_div(batches, int64_t{kGatherChunk}));
  return args;
}

// Launches a kernel that divides the batches of so many tiles; false if there are too many.
bool launch_gather(const Kernel& kernel, int64_t tiles, const GatherArgs& args, int device) {
  if (tiles > std::numeric_limits<int32_t>::max() / args.batch_chunks) return false;
  launch(kernel, tiles * args.batch_chunks, kGatherThreads, current_stream(device), args);
  return true;
}

// [batch, row, column], or transposed.
std::optional<Made> make_gather_rows(const Tensor& x, const Tensor& index,
                                     const std::string& kernel, bool is_transposed) {
  const auto* kernels = kernels_named<GatherKernels>(kernel, x, "fx_fuser::load_gather_rows");
  if (kernels == nullptr) return std::nullopt;
  check_gather(x, "x", kernels->type, index);
  const int64_t rows = index.size(0);
  const int64_t columns = index.size(1);
  const Tensor out = is_transposed ? new_dense(x, {x.size(0), columns, rows}, x.scalar_type())
                                   : new_dense(x, {x.size(0), rows, columns}, x.scalar_type());
  if (out.numel() == 0) return Made(out);
  std::optional<GatherArgs> args = gather_args(index, x.size(0), x.size(2));
  if (!args || (x.size(2) > 1 && x.stride(2) != 1)) return std::nullopt;
  args->x = {x.data_ptr(), x.stride(0), x.stride(1)};
  args->out = out.data_ptr();
  args->tiles = static_cast<int32_t>(ceil_div(columns, int64_t{kGatherTile}));
  const int device = x.get_device_index();
  const OnDevice on_device(device);
  const int64_t tiles = ceil_div(rows, int64_t{kGatherTile}) * args->tiles;
  const Kernel& chosen = is_transposed ? kernels->transposed : kernels->gather;
  if (!launch_gather(chosen, tiles, *args, device)) return std::nullopt;
  return Made(out);
}

// Of each row of the index the columns in the order of the places that they read, and where those
// of each place begin: numbers of 16 bits without a sign.
std::optional<Made> make_gather_rows_order(const Tensor& index, const std::string& kernel,
                                           int64_t places) {
  const auto* kernels = kernels_named<GatherKernels>(kernel, index, "fx_fuser::load_gather_rows");
  if (kernels == nullptr) return std::nullopt;
  require_cuda(index, "index");
  STD_TORCH_CHECK(index.dim() == 2 && index.scalar_type() == ScalarType::Long && places >= 0,
                  "fx_fuser: an order of ", to_string(index.sizes()), " and ", places, " places");
  const int64_t rows = index.size(0);
  const Tensor order = new_dense(index, {rows, index.size(1)}, ScalarType::Short);
  const Tensor starts = new_dense(index, {rows, places + 1}, ScalarType::Short);
  if (rows == 0) return Made(order, starts);
  std::optional<GatherArgs> args = gather_args(index, 1, places);
  if (!args) return std::nullopt;
  args->order = static_cast<uint16_t*>(order.data_ptr());
  args->starts = static_cast<uint16_t*>(starts.data_ptr());
  const int device = index.get_device_index();
  const OnDevice on_device(device);
  constexpr int kWarp = 32;
  launch(kernels->order, rows, kWarp, current_stream(device), *args);
  return Made(order, starts);
}

// Dense, of these sizes, of 16 bits.
void check_order(const Tensor& tensor, const char* name, int64_t rows, int64_t columns) {
  require_cuda(tensor, name);
  STD_TORCH_CHECK(tensor.scalar_type() == ScalarType::Short && tensor.dim() == 2 &&
                      tensor.is_contiguous() && tensor.size(0) == rows && tensor.size(1) == columns,
                  "fx_fuser: ", name, " of a gather is ", to_string(tensor.sizes()));
}

// x's gradient, [batch, row, place], of out's, [batch, row, column]. order, starts: as above.
std::optional<Made> make_gather_rows_backward(const Tensor& d_out, const Tensor& index,
                                              const Tensor& order, const Tensor& starts,
                                              const std::string& kernel, int64_t places) {
  const auto* kernels = kernels_named<GatherKernels>(kernel, d_out, "fx_fuser::load_gather_rows");
  if (kernels == nullptr) return std::nullopt;
  check_gather(d_out, "d_out", kernels->type, index);
  const int64_t rows = index.size(0);
  const int64_t columns = index.size(1);
  STD_TORCH_CHECK(places >= 0 && d_out.size(2) == columns, "fx_fuser: a gradient of ",
                  to_string(d_out.sizes()), " by ", to_string(index.sizes()));
  check_order(order, "the order", rows, columns);
  check_order(starts, "what begins each place", rows, places + 1);
  const Tensor d_x = new_dense(d_out, {d_out.size(0), rows, places}, d_out.scalar_type());
  if (d_x.numel() == 0) return Made(d_x);
  std::optional<GatherArgs> args = gather_args(index, d_out.size(0), places);
  if (!args || (columns > 1 && d_out.stride(2) != 1)) return std::nullopt;
  args->x = {d_x.data_ptr(), d_x.stride(0), d_x.stride(1)};
  args->d_out = {d_out.data_ptr(), d_out.stride(0), d_out.stride(1)};
  args->order = static_cast<uint16_t*>(order.data_ptr());
  args->starts = static_cast<uint16_t*>(starts.data_ptr());
  args->tiles = static_cast<int32_t>(ceil_div(places, int64_t{kGatherThreads}));
  const int device = d_out.get_device_index();
  const OnDevice on_device(device);
  if (!launch_gather(kernels->backward, rows * args->tiles, *args, device)) return std::nullopt;
  return Made(d_x);
}

}  // namespace
}  // namespace fx_fuser
