// The functions an epilogue may call. Each has the meaning of the PyTorch operator of its name,
// NaN included, in Acc = float or double, with the accurate (never the fast-math) library routines.
#pragma once

#include "convert.cuh"

namespace fx_fuser::math {

template <class Acc>
__device__ __forceinline__ Acc exp(Acc x) {
  return ::exp(x);
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

// 1/x to one ulp, subnormal results included (PTX ISA, rcp). An IEEE division costs three times as
// much, and made epilogues with a sigmoid compute-bound.
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ double reciprocal(double x) { return 1.0 / x; }

template <class Acc>
__device__ __forceinline__ Acc sigmoid(Acc x) {
  return reciprocal(Acc(1) + ::exp(-x));
}

template <class Acc>
__device__ __forceinline__ Acc silu(Acc x) {
  return x * sigmoid(x);
}

// The comparison is false for NaN, which therefore passes through.
template <class Acc>
__device__ __forceinline__ Acc relu(Acc x) {
  return x <= Acc(0) ? Acc(0) : x;
}

// fmin and fmax return the operand that is a number; torch's minimum and maximum return the NaN.
template <class Acc>
__device__ __forceinline__ Acc minimum(Acc a, Acc b) {
  return (a < b || a != a) ? a : b;
}

template <class Acc>
__device__ __forceinline__ Acc maximum(Acc a, Acc b) {
  return (a > b || a != a) ? a : b;
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
  if (c == Acc(2)) return x * x;
  if (c == Acc(3)) return x * x * x;
  if (c == Acc(0.5)) return ::sqrt(x);
  if (c == Acc(-0.5)) return ::rsqrt(x);
  if (c == Acc(-1)) return Acc(1) / x;
  if (c == Acc(-2)) return Acc(1) / (x * x);
  return ::pow(x, c);
}

// x * Phi(x)
template <class Acc>
__device__ __forceinline__ Acc gelu(Acc x) {
  constexpr Acc kSqrtHalf = Acc(0.70710678118654752440);
  return x * Acc(0.5) * (Acc(1) + ::erf(x * kSqrtHalf));
}

// F.gelu(x, approximate="tanh")
template <class Acc>
__device__ __forceinline__ Acc gelu_tanh(Acc x) {
  constexpr Acc kSqrtTwoOverPi = Acc(0.79788456080286535588);
  const Acc inner = kSqrtTwoOverPi * (x + Acc(0.044715) * x * x * x);
  return Acc(0.5) * x * (Acc(1) + ::tanh(inner));
}

template <class Acc>
__device__ __forceinline__ Acc softplus(Acc x, Acc beta, Acc threshold) {
  return x * beta > threshold ? x : ::log1p(::exp(x * beta)) / beta;
}

// A cast inside an epilogue: the value takes T's precision or range, the type stays Acc.
template <class T, class Acc>
__device__ __forceinline__ Acc round_to(Acc x) {
  return convert<Acc>(convert<T>(x));
}

}  // namespace fx_fuser::math
