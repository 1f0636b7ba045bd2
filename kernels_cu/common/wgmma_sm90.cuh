// wgmma with both operands in shared memory, and with the first in registers: one function for
// each element type and width that the kernels use. (PTX ISA 9.7.15)
//
// Register layout (9.7.15.4.1, figures of .m64nNk16): warp w of the warpgroup holds rows
// 16w...16w+15 of the 64. With g = lane / 4, c = lane % 4 a thread's
//   a[2s + r] holds row g + 8r, columns 8s + 2c and 8s + 2c + 1      (16-bit operands)
//   d[4i + 2r + t] is row g + 8r, column 8i + 2c + t
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fx_fuser::ptx {

// d[64 x N] = a[64 x 32 bytes] * b[N x 32 bytes]ᵀ + (accumulate ? d : 0), where a and b are
// descriptors of K-major tiles of T (float: its upper 19 bits, TF32).
template <class T>
struct Wgmma;

// Lists of N / 2 registers: the instruction's text, and the operands of asm.
#define FX_FUSER_TEXT_8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define FX_FUSER_TEXT_12 FX_FUSER_TEXT_8 ", %8, %9, %10, %11"
#define FX_FUSER_TEXT_36 FX_FUSER_TEXT_32 ", %32, %33, %34, %35"
#define FX_FUSER_TEXT_32                                                           \
  FX_FUSER_TEXT_8                                                                  \
  ", %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23" \
  ", %24, %25, %26, %27, %28, %29, %30, %31"
#define FX_FUSER_TEXT_64                                                             \
  FX_FUSER_TEXT_32                                                                   \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47" \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define FX_FUSER_TEXT_96                                                             \
  FX_FUSER_TEXT_64                                                                   \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79" \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define FX_FUSER_TEXT_120                                                            \
  FX_FUSER_TEXT_96                                                                   \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109" \
  ", %110, %111, %112, %113, %114, %115, %116, %117, %118, %119"
#define FX_FUSER_TEXT_128                                                                        \
  FX_FUSER_TEXT_64                                                                               \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"             \
  ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"             \
  ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111" \
  ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, " \
  "%127"
#define FX_FUSER_D_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FX_FUSER_D_8(i)                                                                       \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define FX_FUSER_D_32(i) \
  FX_FUSER_D_8(i), FX_FUSER_D_8(i + 8), FX_FUSER_D_8(i + 16), FX_FUSER_D_8(i + 24)
#define FX_FUSER_D_12(i) FX_FUSER_D_8(i), FX_FUSER_D_4(i + 8)
#define FX_FUSER_D_36(i) FX_FUSER_D_32(i), FX_FUSER_D_4(i + 32)
#define FX_FUSER_D_64(i) FX_FUSER_D_32(i), FX_FUSER_D_32(i + 32)
#define FX_FUSER_D_96(i) FX_FUSER_D_64(i), FX_FUSER_D_32(i + 64)
#define FX_FUSER_D_120(i) \
  FX_FUSER_D_96(i), FX_FUSER_D_8(i + 96), FX_FUSER_D_8(i + 104), FX_FUSER_D_8(i + 112)
#define FX_FUSER_D_128(i) FX_FUSER_D_64(i), FX_FUSER_D_64(i + 64)

// `a`, `b` and `p` are the asm operand numbers that follow the registers. 16-bit types also have
// immediates that say whether the operands are transposed.
#define FX_FUSER_WGMMA(n, registers, a, b, p, k, type, transposed)                        \
  static __device__ __forceinline__ void run(float (&d)[registers], uint64_t a_tile,      \
                                             uint64_t b_tile, bool accumulate) {          \
    asm volatile(                                                                         \
        "{\n"                                                                             \
        ".reg .pred accumulate;\n"                                                        \
        "setp.ne.b32 accumulate, %" #p                                                    \
        ", 0;\n"                                                                          \
        "wgmma.mma_async.sync.aligned.m64n" #n "k" #k ".f32." type "." type               \
        " {" FX_FUSER_TEXT_##registers "}, %" #a ", %" #b ", accumulate, 1, 1" transposed \
                                       ";\n"                                              \
                                       "}\n"                                              \
        : FX_FUSER_D_##registers(0)                                                       \
        : "l"(a_tile), "l"(b_tile), "r"(static_cast<int>(accumulate)));                   \
  }
#define FX_FUSER_WGMMA_OF(T, k, type, transposed)                \
  template <>                                                    \
  struct Wgmma<T> {                                              \
    FX_FUSER_WGMMA(16, 8, 8, 9, 10, k, type, transposed)         \
    FX_FUSER_WGMMA(64, 32, 32, 33, 34, k, type, transposed)      \
    FX_FUSER_WGMMA(128, 64, 64, 65, 66, k, type, transposed)     \
    FX_FUSER_WGMMA(256, 128, 128, 129, 130, k, type, transposed) \
  };
FX_FUSER_WGMMA_OF(__nv_bfloat16, 16, "bf16", ", 0, 0")
FX_FUSER_WGMMA_OF(__half, 16, "f16", ", 0, 0")
FX_FUSER_WGMMA_OF(float, 8, "tf32", "")

// The same for 16-bit T with either operand optionally MN-major (kTransposed...): its rows, not
// its k, are then adjacent, and its descriptor is a transposed_descriptor.
template <class T, bool kTransposedA, bool kTransposedB>
struct WgmmaOfMajors;

#define FX_FUSER_WGMMA_OF_MAJORS(n, registers, a, b, p, of_a, of_b, type)                      \
  static __device__ __forceinline__ void run(float (&d)[registers], uint64_t a_tile,           \
                                             uint64_t b_tile, bool accumulate) {               \
    asm volatile(                                                                              \
        "{\n"                                                                                  \
        ".reg .pred accumulate;\n"                                                             \
        "setp.ne.b32 accumulate, %" #p                                                         \
        ", 0;\n"                                                                               \
        "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type                        \
        " {" FX_FUSER_TEXT_##registers "}, %" #a ", %" #b ", accumulate, 1, 1, %" #of_a        \
                                       ", %" #of_b                                             \
                                       ";\n"                                                   \
                                       "}\n"                                                   \
        : FX_FUSER_D_##registers(0)                                                            \
        : "l"(a_tile), "l"(b_tile), "r"(static_cast<int>(accumulate)), "n"(int{kTransposedA}), \
          "n"(int{kTransposedB}));                                                             \
  }
#define FX_FUSER_WGMMA_OF_MAJORS_OF(T, type)                          \
  template <bool kTransposedA, bool kTransposedB>                     \
  struct WgmmaOfMajors<T, kTransposedA, kTransposedB> {               \
    FX_FUSER_WGMMA_OF_MAJORS(128, 64, 64, 65, 66, 67, 68, type)       \
    FX_FUSER_WGMMA_OF_MAJORS(192, 96, 96, 97, 98, 99, 100, type)      \
    FX_FUSER_WGMMA_OF_MAJORS(240, 120, 120, 121, 122, 123, 124, type) \
    FX_FUSER_WGMMA_OF_MAJORS(256, 128, 128, 129, 130, 131, 132, type) \
  };
FX_FUSER_WGMMA_OF_MAJORS_OF(__nv_bfloat16, "bf16")
FX_FUSER_WGMMA_OF_MAJORS_OF(__half, "f16")

// d[64 x N] = a[64 x 16] * b[16 x N] + (accumulate ? d : 0) for 16-bit T, with a in registers.
// `run`: b is K-major, as above. `run_transposed`: rows of b, not columns, are contiguous; its
// descriptor has the distance of 8 columns as stride and of 8 rows as leading offset.
template <class T>
struct WgmmaOfRegisters;

#define FX_FUSER_WGMMA_OF_REGISTERS(name, n, registers, a0, a1, a2, a3, b, p, type, transposed) \
  static __device__ __forceinline__ void name(float (&d)[registers], const uint32_t (&a)[4],    \
                                              uint64_t b_tile, bool accumulate) {               \
    asm volatile(                                                                               \
        "{\n"                                                                                   \
        ".reg .pred accumulate;\n"                                                              \
        "setp.ne.b32 accumulate, %" #p                                                          \
        ", 0;\n"                                                                                \
        "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type                         \
        " {" FX_FUSER_TEXT_##registers "}, {%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b      \
                                       ", accumulate, 1, 1, " #transposed                       \
                                       ";\n"                                                    \
                                       "}\n"                                                    \
        : FX_FUSER_D_##registers(0)                                                             \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b_tile),                              \
          "r"(static_cast<int>(accumulate)));                                                   \
  }
#define FX_FUSER_WGMMA_OF_REGISTERS_OF(T, type)                                           \
  template <>                                                                             \
  struct WgmmaOfRegisters<T> {                                                            \
    FX_FUSER_WGMMA_OF_REGISTERS(run, 64, 32, 32, 33, 34, 35, 36, 37, type, 0)             \
    FX_FUSER_WGMMA_OF_REGISTERS(run, 128, 64, 64, 65, 66, 67, 68, 69, type, 0)            \
    FX_FUSER_WGMMA_OF_REGISTERS(run_transposed, 24, 12, 12, 13, 14, 15, 16, 17, type, 1)  \
    FX_FUSER_WGMMA_OF_REGISTERS(run_transposed, 64, 32, 32, 33, 34, 35, 36, 37, type, 1)  \
    FX_FUSER_WGMMA_OF_REGISTERS(run_transposed, 72, 36, 36, 37, 38, 39, 40, 41, type, 1)  \
    FX_FUSER_WGMMA_OF_REGISTERS(run_transposed, 128, 64, 64, 65, 66, 67, 68, 69, type, 1) \
  };
FX_FUSER_WGMMA_OF_REGISTERS_OF(__nv_bfloat16, "bf16")
FX_FUSER_WGMMA_OF_REGISTERS_OF(__half, "f16")

}  // namespace fx_fuser::ptx
