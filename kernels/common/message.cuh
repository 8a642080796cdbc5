// One edge's message at one feature, for what is needed rarely.
#pragma once
#include "scalar.cuh"

struct Edges {
  const index_t *idx, *perm;  // of the rows by target
  const scalar_t *x, *weight;
  int width, heads, channels;
};

DEVICE acc_t message(const Edges& e, long long k, int f) {
  acc_t v = widen(__ldg(e.x + (long long)__ldg(e.idx + k) * e.width + f));
#if WEIGHTED
  const long long edge = e.perm ? __ldg(e.perm + k) : k;
  v = widen(narrow(v * widen(__ldg(e.weight + edge * e.heads + f / e.channels))));
#endif
  return v;
}
