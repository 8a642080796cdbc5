// The rows and features of a batch of edges of transformer.
#pragma once
#include "edges.cuh"
#if EDGES
#include "edge_features.cuh"
#endif

struct Rows {
  Packed key[BATCH][NV], value[BATCH][NV];
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

  template <bool FULL>
  DEVICE_MEMBER void load(Rows& rows, position_t k, const index_t (&source)[BATCH],
                          const Place& place) const {
#if EDGES
#pragma unroll
    for (int u = 0; u < BATCH; u++) {
      position_t edge = 0;  // the weight of no edge is zero
      if (FULL || source[u] >= 0) edge = perm ? (position_t)__ldg(perm + k + u) : k + u;
      rows.attr[u] = attr + (long long)edge * dim;
    }
#endif
    load_rows<FULL>(key, source, place, rows.key);
    load_rows<FULL>(value, source, place, rows.value);
  }
};
