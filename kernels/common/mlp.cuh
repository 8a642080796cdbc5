// The scores of gatv2: an MLP of both ends and the features of an edge.
#pragma once
#include "edges.cuh"
#include "signs.cuh"

// What scores are made of.
struct Operands {
  const scalar_t *x_l, *att;
  const index_t* perm;
  const scalar_t *attr, *loop_attr, *lin;
  int dim;
  acc_t slope;
};

struct Rows {
  Packed x_l[BATCH][NV];
#if EDGES
  const scalar_t* attr[BATCH];
#endif
  position_t k;
};

struct Hidden {
  const Operands& from;
  const Edges& edges;
  const Place& place;
  acc_t x_r[NV][VEC], att[NV][VEC];

  DEVICE_MEMBER void start(const scalar_t* rows_r) {
    load_row(rows_r, edges.row, place, x_r);
    load_row(from.att, 0, place, att);
  }

  template <bool FULL>
  DEVICE_MEMBER void load(Rows& rows, position_t k, const index_t (&source)[BATCH]) const {
    rows.k = k;
#if EDGES
#pragma unroll
    for (int u = 0; u < BATCH; u++) {
      rows.attr[u] = from.lin;  // that of no edge is not used
      if (LOOPS && k + u == edges.end && source[u] >= 0)
        rows.attr[u] = from.loop_attr + (long long)edges.row * from.dim;
      else if (FULL || source[u] >= 0)
        rows.attr[u] =
            from.attr + (long long)(from.perm ? (position_t)__ldg(from.perm + k + u) : k + u) * from.dim;
    }
#endif
    load_rows<FULL>(from.x_l, source, place, rows.x_l);
  }

  // z of each edge, before the leaky_relu
  DEVICE_MEMBER void add_ends(const Rows& rows, acc_t (&z)[BATCH][NV][VEC]) const {
#pragma unroll
    for (int u = 0; u < BATCH; u++)
#pragma unroll
      for (int n = 0; n < NV; n++) {
        unpack(rows.x_l[u][n], z[u][n]);
#pragma unroll
        for (int v = 0; v < VEC; v++) z[u][n][v] += x_r[n][v];
      }
#if EDGES
    for (int d = 0; d < from.dim; d++) {
      acc_t map[NV][VEC];
      load_row(from.lin, d, place, map);
#pragma unroll
      for (int u = 0; u < BATCH; u++) {
        const acc_t feature = widen(__ldg(rows.attr[u] + d));
#pragma unroll
        for (int n = 0; n < NV; n++)
          if (place.inside(n))  // an infinite feature times no channel is NaN
            add_scaled(z[u][n], feature, map[n]);
      }
    }
#endif
  }

  DEVICE_MEMBER void scores(const Rows& rows, acc_t (&parts)[SLOTS][BATCH]) const {
    acc_t z[BATCH][NV][VEC];
    add_ends(rows, z);
#pragma unroll
    for (int u = 0; u < BATCH; u++)
#pragma unroll
      for (int n = 0; n < NV; n++)
#pragma unroll
        for (int v = 0; v < VEC; v++) {
          const acc_t bent = z[u][n][v] > 0 ? z[u][n][v] : from.slope * z[u][n][v];
          parts[n / HEAD_VECS][u] = fma(att[n][v], bent, parts[n / HEAD_VECS][u]);
        }
  }

  // The same, and which numbers are positive.
  DEVICE_MEMBER void scores(const Rows& rows, acc_t (&parts)[SLOTS][BATCH],
                            Signs& positive) const {
    acc_t z[BATCH][NV][VEC];
    add_ends(rows, z);
#pragma unroll
    for (int u = 0; u < BATCH; u++)
#pragma unroll
      for (int n = 0; n < NV; n++) {
        positive.bits[u][n] = 0;
#pragma unroll
        for (int v = 0; v < VEC; v++) {
          const acc_t bent = z[u][n][v] > 0 ? z[u][n][v] : from.slope * z[u][n][v];
          parts[n / HEAD_VECS][u] = fma(att[n][v], bent, parts[n / HEAD_VECS][u]);
          if (z[u][n][v] > 0) positive.bits[u][n] |= 1u << v;
        }
      }
  }
};
