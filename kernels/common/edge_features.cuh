// Features of edges in the lanes of a head: EDGE_VECS a lane, the i-th of which is feature
// i * HEAD_LANES + sub.
#pragma once
#include "edges.cuh"

DEVICE int edge_feature(int i, const Place& place) { return i * HEAD_LANES + place.sub; }

// parts[slot][u] += the lane's part of left[head] . attr[u]
DEVICE void add_edge_dots(const scalar_t* left, const scalar_t* const (&attr)[BATCH], int dim,
                          const Place& place, acc_t (&parts)[SLOTS][BATCH]) {
  for (int d = place.sub; d < dim; d += HEAD_LANES) {
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
      if (!place.has(s)) continue;
      const acc_t factor = widen(__ldg(left + (long long)place.head_of(s) * dim + d));
#pragma unroll
      for (int u = 0; u < BATCH; u++)
        parts[s][u] = fma(factor, widen(__ldg(attr[u] + d)), parts[s][u]);
    }
  }
}

// sum += weights[u] * attr[u] over the edges of a batch
DEVICE void add_weighted_edges(acc_t (&sum)[SLOTS][EDGE_VECS],
                               const acc_t (&weights)[SLOTS][BATCH],
                               const scalar_t* const (&attr)[BATCH], int dim,
                               const Place& place) {
#pragma unroll
  for (int s = 0; s < SLOTS; s++)
#pragma unroll
    for (int u = 0; u < BATCH; u++) {
      const acc_t weight = of_edge(weights[s], u);
      // Where there is no edge the weight is zero, and the features are another's.
      if (weight == 0) continue;
#pragma unroll
      for (int i = 0; i < EDGE_VECS; i++) {
        const int d = edge_feature(i, place);
        if (d < dim) sum[s][i] = fma(weight, widen(__ldg(attr[u] + d)), sum[s][i]);
      }
    }
}

DEVICE void rescale_edges(acc_t (&sum)[SLOTS][EDGE_VECS], const acc_t (&factor)[SLOTS]) {
#pragma unroll
  for (int s = 0; s < SLOTS; s++)
#pragma unroll
    for (int i = 0; i < EDGE_VECS; i++) sum[s][i] *= factor[s];
}

DEVICE void clear_edges(acc_t (&sum)[SLOTS][EDGE_VECS]) {
#pragma unroll
  for (int s = 0; s < SLOTS; s++)
#pragma unroll
    for (int i = 0; i < EDGE_VECS; i++) sum[s][i] = 0;
}

DEVICE void put(acc_t* at, acc_t value) { *at = value; }
#if SCALAR >= 2
DEVICE void put(scalar_t* at, acc_t value) { *at = narrow(value); }
#endif

// Writes a row of a table [., H * D].
template <class T>
DEVICE void store_edges(T* table, long long row, int dim, const Place& place,
                        const acc_t (&from)[SLOTS][EDGE_VECS]) {
#pragma unroll
  for (int s = 0; s < SLOTS; s++)
#pragma unroll
    for (int i = 0; i < EDGE_VECS; i++) {
      const int d = edge_feature(i, place);
      if (d < dim && place.has(s))
        put(table + (row * place.heads + place.head_of(s)) * dim + d, from[s][i]);
    }
}
