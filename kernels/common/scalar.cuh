// Storage types and the types that sums are taken in.
//
// SCALAR chooses the storage: 0 float, 1 double, 2 half, 3 bfloat16. Half and bfloat16 are kept as
// bits, so no header of the CUDA toolkit is needed; arithmetic is in acc_t.
// PORTABLE replaces inline PTX by plain C++ (the host build of the tests sets it).
#pragma once

#if SCALAR == 1
typedef double scalar_t;
typedef double acc_t;
#elif SCALAR == 0
typedef float scalar_t;
typedef float acc_t;
#else
typedef unsigned short scalar_t;
typedef float acc_t;
#endif

#if INDEX == 64
typedef long long index_t;
#else
typedef int index_t;
#endif

// Places in a row, and counts of edges, in as many bits as the longest row needs.
#if PLACE_BITS == 8
typedef signed char place_t;
#elif PLACE_BITS == 16
typedef short place_t;
#else
typedef int place_t;
#endif

#define DEVICE static __device__ __forceinline__
#define DEVICE_MEMBER __device__ __forceinline__
#define INF __int_as_float(0x7f800000)

#if SCALAR == 2
DEVICE float half_to_float(unsigned short bits) {
#ifndef PORTABLE
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
#else
  const unsigned sign = (bits & 0x8000u) << 16, rest = bits & 0x7fffu;
  if (rest >= 0x7c00u) return __uint_as_float(sign | 0x7f800000u | ((rest & 0x3ffu) << 13));
  if (rest >= 0x400u) return __uint_as_float(sign | ((rest << 13) + (112u << 23)));
  const float tiny = rest * __uint_as_float(103u << 23);  // 2^-24
  return __uint_as_float(sign | __float_as_uint(tiny));
#endif
}

DEVICE unsigned short half_of(float value) {
#ifndef PORTABLE
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
#else
  const unsigned all = __float_as_uint(value), sign = (all >> 16) & 0x8000u;
  const unsigned magnitude = all & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fffu;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
  if (magnitude < 0x38800000u) {  // below the smallest normal half: a multiple of 2^-24
    const float steps = __uint_as_float(magnitude) * 16777216.0f;
    const unsigned whole = (unsigned)steps;
    const float left = steps - whole;
    return sign | (whole + (left > 0.5f || (left == 0.5f && (whole & 1))));
  }
  const unsigned rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1);
  return sign | ((rounded - (112u << 23)) >> 13);
#endif
}
#endif

#if SCALAR == 3
DEVICE unsigned short bfloat16_of(float value) {
#if !defined(PORTABLE) && __CUDA_ARCH__ >= 800
  unsigned out;  // of one number alone, the instruction is a slow one
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(0.0f), "f"(value));
  return out;
#else
  const unsigned bits = __float_as_uint(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
  return (bits + 0x7fffu + ((bits >> 16) & 1)) >> 16;
#endif
}
#endif

DEVICE acc_t widen(scalar_t value) {
#if SCALAR == 2
  return half_to_float(value);
#elif SCALAR == 3
  return __uint_as_float((unsigned)value << 16);
#else
  return value;
#endif
}

DEVICE scalar_t narrow(acc_t value) {
#if SCALAR == 2
  return half_of(value);
#elif SCALAR == 3
  return bfloat16_of(value);
#else
  return value;
#endif
}

// A product that is rounded before anything is added to it, in every kernel alike.
DEVICE float rounded_product(float a, float b) { return __fmul_rn(a, b); }
DEVICE double rounded_product(double a, double b) {
#ifndef PORTABLE
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}
