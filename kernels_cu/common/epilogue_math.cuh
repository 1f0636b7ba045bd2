// The functions an epilogue may call. Each has the meaning of the PyTorch operator of the same
// name, NaN included, in Acc = float or double. All use the accurate library routines, never
// fast-math, except `exp_of_minus`.
//
// Arithmetic goes through add, sub, mul and div, which nvcc does not contract. With + and *, it
// would turn `z * 10 - inf` into one fma, which is -inf for a z whose product overflows; torch,
// with one kernel per operation, has NaN. Where a torch kernel contains an fma, so does the
// function here.
#pragma once

#include "common/convert.cuh"
#include "common/ptx.cuh"

namespace fx_fuser::math {

__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }

__device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ double sub(double a, double b) { return __dsub_rn(a, b); }

__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double mul(double a, double b) { return __dmul_rn(a, b); }

__device__ __forceinline__ float div(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ double div(double a, double b) { return __ddiv_rn(a, b); }

__device__ __forceinline__ float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
__device__ __forceinline__ double fma(double a, double b, double c) { return __fma_rn(a, b, c); }

template <class Acc>
__device__ __forceinline__ Acc neg(Acc x) {
  return -x;
}

// a + alpha * b, contracted to an fma in torch's kernel.
template <class Acc>
__device__ __forceinline__ Acc add(Acc a, Acc b, Acc alpha) {
  return fma(alpha, b, a);
}

template <class Acc>
__device__ __forceinline__ Acc sub(Acc a, Acc b, Acc alpha) {
  return fma(-alpha, b, a);
}

// Multiplies by the reciprocal, as torch does to divide by a host scalar.
template <class Acc>
__device__ __forceinline__ Acc div_by_number(Acc a, Acc n) {
  return mul(a, Acc(1) / n);
}

// a + value * b * c, as in aten/src/ATen/native/cuda/DeviceAddCmulCdiv.cuh.
template <class Acc>
__device__ __forceinline__ Acc addcmul(Acc a, Acc b, Acc c, Acc value) {
  return value == Acc(1) ? fma(b, c, a) : fma(value, mul(b, c), a);
}

// a + value * b / c; torch uses an fma unless value is one.
template <class Acc>
__device__ __forceinline__ Acc addcdiv(Acc a, Acc b, Acc c, Acc value) {
  return value == Acc(1) ? add(a, div(b, c)) : fma(value, div(b, c), a);
}

// Interpolates from the nearer end; both are fmas in torch's kernel.
template <class Acc>
__device__ __forceinline__ Acc lerp(Acc start, Acc end, Acc weight) {
  const Acc distance = sub(end, start);
  return ::fabs(weight) < Acc(0.5) ? fma(weight, distance, start)
                                   : fma(-distance, sub(Acc(1), weight), end);
}

template <class Acc>
__device__ __forceinline__ Acc reciprocal(Acc x) {
  return div(Acc(1), x);
}

// Zero for NaN and for both zeros.
template <class Acc>
__device__ __forceinline__ Acc sign(Acc x) {
  return Acc((x > Acc(0)) - (x < Acc(0)));
}

template <class Acc>
__device__ __forceinline__ Acc exp(Acc x) {
  return ::exp(x);
}

template <class Acc>
__device__ __forceinline__ Acc exp2(Acc x) {
  return ::exp2(x);
}

template <class Acc>
__device__ __forceinline__ Acc expm1(Acc x) {
  return ::expm1(x);
}

template <class Acc>
__device__ __forceinline__ Acc log1p(Acc x) {
  return ::log1p(x);
}

template <class Acc>
__device__ __forceinline__ Acc log2(Acc x) {
  return ::log2(x);
}

template <class Acc>
__device__ __forceinline__ Acc sin(Acc x) {
  return ::sin(x);
}

template <class Acc>
__device__ __forceinline__ Acc cos(Acc x) {
  return ::cos(x);
}

template <class Acc>
__device__ __forceinline__ Acc erfc(Acc x) {
  return ::erfc(x);
}

template <class Acc>
__device__ __forceinline__ Acc log(Acc x) {
  return ::log(x);
}

template <class Acc>
__device__ __forceinline__ Acc sqrt(Acc x) {
  return ::sqrt(x);
}

template <class Acc>
__device__ __forceinline__ Acc rsqrt(Acc x) {
  return ::rsqrt(x);
}

template <class Acc>
__device__ __forceinline__ Acc abs(Acc x) {
  return ::fabs(x);
}

template <class Acc>
__device__ __forceinline__ Acc tanh(Acc x) {
  return ::tanh(x);
}

template <class Acc>
__device__ __forceinline__ Acc erf(Acc x) {
  return ::erf(x);
}

// exp(-x) of a sigmoid. If the kernel's result has 16 bits (kernel_spec.py), the relative error is
// 2^-22 + |x| 2^-24, as of Triton's exp, with two instructions instead of eight; subnormal results
// are flushed to zero.
__device__ __forceinline__ float exp_of_minus(float x) {
#ifdef FX_FUSER_16_BIT_RESULT
  constexpr float kLog2E = 1.4426950408889634f;
  return ptx::exp2(mul(x, -kLog2E));
#else
  return ::exp(-x);
#endif
}

// 4 / (1 + exp(-x)), the division to one ulp (PTX ISA, rcp.approx): an IEEE division costs ten
// times as much, and made epilogues with a sigmoid compute-bound. A quarter of the denominator is
// exact and keeps every nonzero result above 2^-126, below which .ftz flushes to zero. rcp.approx
// without .ftz takes six more instructions.
__device__ __forceinline__ float four_sigmoids(float x) {
  return ptx::reciprocal(fma(exp_of_minus(x), 0.25f, 0.25f));
}

// Subnormal where torch's is: sigmoid(-88).
__device__ __forceinline__ float sigmoid(float x) { return mul(four_sigmoids(x), 0.25f); }
__device__ __forceinline__ double sigmoid(double x) { return 1.0 / add(1.0, ::exp(-x)); }

// torch's x / (1 + exp(-x)): NaN for -inf, and accurate where sigmoid(x) is subnormal.
__device__ __forceinline__ float silu(float x) { return mul(mul(x, 0.25f), four_sigmoids(x)); }
__device__ __forceinline__ double silu(double x) { return x / add(1.0, ::exp(-x)); }

// The comparison is false for NaN, which therefore passes through.
template <class Acc>
__device__ __forceinline__ Acc relu(Acc x) {
  return x <= Acc(0) ? Acc(0) : x;
}

// As torch's on CUDA: NaN if either is NaN, and -0 is less than +0, which `a < b ? a : b` misses.
__device__ __forceinline__ float minimum(float a, float b) { return ptx::min_nan(a, b); }
__device__ __forceinline__ double minimum(double a, double b) {
  return a != a ? a : b != b ? b : ::fmin(a, b);
}

__device__ __forceinline__ float maximum(float a, float b) { return ptx::max_nan(a, b); }
__device__ __forceinline__ double maximum(double a, double b) {
  return a != a ? a : b != b ? b : ::fmax(a, b);
}

// lower > upper gives upper, as torch.clamp does.
template <class Acc>
__device__ __forceinline__ Acc clamp(Acc x, Acc lower, Acc upper) {
  return minimum(maximum(x, lower), upper);
}

template <class Acc>
__device__ __forceinline__ Acc where(Acc condition, Acc a, Acc b) {
  return condition != Acc(0) ? a : b;
}

// PyTorch computes these exponents without pow; the branches vanish where c is a literal.
template <class Acc>
__device__ __forceinline__ Acc pow(Acc x, Acc c) {
  if (c == Acc(2)) return mul(x, x);
  if (c == Acc(3)) return mul(mul(x, x), x);
  if (c == Acc(0.5)) return ::sqrt(x);
  if (c == Acc(-0.5)) return ::rsqrt(x);
  if (c == Acc(-1)) return div(Acc(1), x);
  if (c == Acc(-2)) return div(Acc(1), mul(x, x));
  return ::pow(x, c);
}

// x * Phi(x)
template <class Acc>
__device__ __forceinline__ Acc gelu(Acc x) {
  constexpr Acc kSqrtHalf = Acc(0.70710678118654752440);
  return mul(mul(x, Acc(0.5)), add(Acc(1), ::erf(mul(x, kSqrtHalf))));
}

// F.gelu(x, approximate="tanh")
template <class Acc>
__device__ __forceinline__ Acc gelu_tanh(Acc x) {
  constexpr Acc kSqrtTwoOverPi = Acc(0.79788456080286535588);
  const Acc cube = mul(mul(x, x), x);
  const Acc inner = mul(kSqrtTwoOverPi, add(x, mul(Acc(0.044715), cube)));
  return mul(mul(Acc(0.5), x), add(Acc(1), ::tanh(inner)));
}

template <class Acc>
__device__ __forceinline__ Acc softplus(Acc x, Acc beta, Acc threshold) {
  const Acc scaled = mul(x, beta);
  return scaled > threshold ? x : div(::log1p(::exp(scaled)), beta);
}

// relu6(x + 3), which is 6 hardsigmoid(x). `maximum` and `minimum` keep NaN.
template <class Acc>
__device__ __forceinline__ Acc six_hardsigmoids(Acc x) {
  return clamp(add(x, Acc(3)), Acc(0), Acc(6));
}

template <class Acc>
__device__ __forceinline__ Acc hardsigmoid(Acc x) {
  return mul(six_hardsigmoids(x), Acc(1.0 / 6.0));
}

// In torch's order of operations: infinite above a sixth of the largest number, NaN for -inf.
template <class Acc>
__device__ __forceinline__ Acc hardswish(Acc x) {
  return mul(mul(x, six_hardsigmoids(x)), Acc(1.0 / 6.0));
}

template <class Acc>
__device__ __forceinline__ Acc leaky_relu(Acc x, Acc negative_slope) {
  return x > Acc(0) ? x : mul(x, negative_slope);
}

// With scale and input_scale this is also selu and celu.
template <class Acc>
__device__ __forceinline__ Acc elu(Acc x, Acc alpha, Acc scale, Acc input_scale) {
  return x > Acc(0) ? mul(x, scale) : mul(::expm1(mul(x, input_scale)), mul(alpha, scale));
}

// exp may overflow to infinity; its tanh is then one.
template <class Acc>
__device__ __forceinline__ Acc mish(Acc x) {
  return mul(x, ::tanh(::log1p(::exp(x))));
}

template <class Acc>
__device__ __forceinline__ Acc logsigmoid(Acc x) {
  return sub(x < Acc(0) ? x : Acc(0), ::log1p(::exp(-::fabs(x))));
}

// The comparisons of these three are false for NaN, which therefore passes through.
template <class Acc>
__device__ __forceinline__ Acc threshold(Acc x, Acc bound, Acc value) {
  return x <= bound ? value : x;
}

template <class Acc>
__device__ __forceinline__ Acc hardshrink(Acc x, Acc lambda) {
  return x >= -lambda && x <= lambda ? Acc(0) : x;
}

template <class Acc>
__device__ __forceinline__ Acc softshrink(Acc x, Acc lambda) {
  if (x > lambda) return sub(x, lambda);
  if (x < -lambda) return add(x, lambda);
  return x != x ? x : Acc(0);
}

// A cast inside an epilogue: rounds the value to T's precision and range; the type stays Acc.
template <class T, class Acc>
__device__ __forceinline__ Acc round_to(Acc x) {
  return convert<Acc>(convert<T>(x));
}

}  // namespace fx_fuser::math
