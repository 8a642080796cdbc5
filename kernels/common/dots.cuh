// The rows and features of a batch of edges of transformer.
#pragma once
#include "ahead.cuh"
#if EDGES
#include "edge_features.cuh"
#endif

struct Rows {
  RowsOf key, value;
#if EDGES
  const scalar_t* attr[BATCH];
#endif
};

// The tables of sources, and features of edges.
struct Operands {
  const scalar_t *key, *value;
  const index_t* perm;
  const scalar_t* attr;
  int dim;

  // Those of an edge; of none any, for its weight is zero.
  DEVICE_MEMBER const scalar_t* features(position_t at, bool exists) const {
    const position_t edge = !exists ? 0 : perm ? (position_t)__ldg(perm + at) : at;
    return attr + (long long)edge * dim;
  }
  template <bool FULL>
  DEVICE_MEMBER void load(Rows& rows, position_t k, unsigned used, int half) const {
    rows.key = {half, 0}, rows.value = {half, 1};
#if EDGES
#pragma unroll
    for (int u = 0; u < BATCH; u++) rows.attr[u] = features(k + u, FULL || used >> u & 1);
#endif
  }
};
