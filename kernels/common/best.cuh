// The better of two numbers, NaN being better than all; two at once where the type allows it.
#pragma once
#include "pairs.cuh"

DEVICE acc_t best_of(acc_t v, acc_t best) {
#if SCALAR != 1 && !defined(PORTABLE) && __CUDA_ARCH__ >= 800
  float out;
#if MINIMUM
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(v), "f"(best));
#else
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(out) : "f"(v), "f"(best));
#endif
  return out;
#else
  return (MINIMUM ? v < best : v > best) || v != v ? v : best;
#endif
}

#if PAIRS
// A mask of 16 ones where v is better than best: false where either is NaN.
#if MINIMUM
#define BETTER "lt"
#define BEST "min"
#else
#define BETTER "gt"
#define BEST "max"
#endif

#ifndef PORTABLE
DEVICE unsigned better_pair(unsigned v, unsigned best) {
  unsigned mask;
  asm("set." BETTER ".u32." PAIR " %0, %1, %2;" : "=r"(mask) : "r"(v), "r"(best));
  return mask;
}
DEVICE unsigned best_pair(unsigned v, unsigned best) {
  unsigned out;
  asm(BEST ".NaN." PAIR " %0, %1, %2;" : "=r"(out) : "r"(v), "r"(best));
  return out;
}
#else
DEVICE unsigned better_pair(unsigned v, unsigned best) {
  return each_half(v, best, [](scalar_t a, scalar_t b) {
    return (unsigned)(MINIMUM ? widen(a) < widen(b) : widen(a) > widen(b)) * 0xffffu;
  });
}
DEVICE unsigned best_pair(unsigned v, unsigned best) {
  return each_half(v, best, [](scalar_t a, scalar_t b) {
    return (unsigned)narrow(best_of(widen(a), widen(b)));
  });
}
#endif
#endif
