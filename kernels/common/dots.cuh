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

  // Those of an edge; of none any, for its weight is zero.
  DEVICE_MEMBER const scalar_t* features(position_t at, bool exists) const {
    const position_t edge = !exists ? 0 : perm ? (position_t)__ldg(perm + at) : at;
    return attr + (long long)edge * dim;
  }
  template <bool FULL>
  DEVICE_MEMBER void load(Rows& rows, position_t k, const index_t (&source)[BATCH],
                          const Place& place) const {
#if EDGES
#pragma unroll
    for (int u = 0; u < BATCH; u++) rows.attr[u] = features(k + u, FULL || source[u] >= 0);
#endif
    load_rows<FULL>(key, source, place, rows.key);
    load_rows<FULL>(value, source, place, rows.value);
  }
};
