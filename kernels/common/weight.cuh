// The weight of an edge: WEIGHTED is 1 where edges have one each, 2 where they have one for each head.
#pragma once
#include "scalar.cuh"

DEVICE acc_t weight_of(const scalar_t* weight, long long k, int f, int heads, int channels) {
#if WEIGHTED == 2
  return widen(__ldg(weight + k * heads + f / channels));
#else
  return widen(__ldg(weight + k));
#endif
}
