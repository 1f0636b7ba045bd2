// In place of kernels_cu/common/ptx_sm90.cuh: the same functions, of the emulated machine, as far
// as the direct convolution uses them.
#pragma once

#include <cstdint>

#include "common/matrix_descriptor.cuh"
#include "common/ptx.cuh"

namespace fx_fuser::ptx {

// Memory is consistent, and as TMA and wgmma see it.
inline void fence_mbarrier_init() {}
inline void fence_async_proxy() {}

template <int kRegisters>
void give_registers(Where where = Where::here()) {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0);
  emulator::change_registers(kRegisters, where);
}
template <int kRegisters>
void take_registers(Where where = Where::here()) {
  give_registers<kRegisters>(where);
}

// ---- wgmma --------------------------------------------------------------------------------------

inline void wgmma_fence(Where where = Where::here()) { emulator::fence_products(where); }
inline void wgmma_commit(Where where = Where::here()) { emulator::commit_products(where); }
template <int kPending>
void wgmma_wait(Where where = Where::here()) {
  emulator::wait_for_products(kPending, where);
}

}  // namespace fx_fuser::ptx
