// Two numbers of 16 bits compared at once, as they are stored.
//
// PAIRED asks for it, in the backward pass as in the forward pass: a comparison of floats takes
// numbers below 1.2e-38 for zero.
#pragma once
#include "scalar.cuh"

#if SCALAR >= 2 && PAIRED && \
    (defined(PORTABLE) || __CUDA_ARCH__ >= (SCALAR == 2 ? 800 : 900))
#define PAIRS 1
#else
#define PAIRS 0
#endif

#if PAIRS
#if SCALAR == 2
#define PAIR "f16x2"
#else
#define PAIR "bf16x2"
#endif

#ifdef PORTABLE
template <class Take>
DEVICE unsigned each_half(unsigned v, unsigned best, Take take) {
  return take(v & 0xffff, best & 0xffff) | (unsigned)take(v >> 16, best >> 16) << 16;
}
#endif

// A mask of 16 ones where both are equal: false where either is NaN.
DEVICE unsigned equal_pair(unsigned v, unsigned other) {
#ifndef PORTABLE
  unsigned mask;
  asm("set.eq.u32." PAIR " %0, %1, %2;" : "=r"(mask) : "r"(v), "r"(other));
  return mask;
#else
  return each_half(v, other, [](scalar_t a, scalar_t b) {
    return (unsigned)(widen(a) == widen(b)) * 0xffffu;
  });
#endif
}
#endif
