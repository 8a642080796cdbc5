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

// Slopes for which `Hidden<false>` is about as exact as PyTorch.
DEVICE bool is_moderate(double slope) { return slope >= 0.2 && slope <= 5; }

// A score is the sum of att * leaky_relu(z), and leaky_relu(z) = rise * (z + bend * |z|) with
// rise = (1 + slope) / 2, bend = (1 - slope) / (1 + slope): two sums without a comparison. Unless
// EXACT, which is for infinite numbers, whose terms may be inf - inf, and for slopes so small or
// large that the terms cancel out.
template <bool EXACT> struct Hidden {
  const Operands& from;
  const Edges& edges;
  const Place& place;
  acc_t x_r[NV][VEC], att[NV][VEC];  // of opposite sign, and x_r never -0; att times rise

  DEVICE_MEMBER void start(const scalar_t* rows_r) {
    load_row(rows_r, edges.row, place, x_r);
    load_row(from.att, 0, place, att);
#pragma unroll
    for (int n = 0; n < NV; n++)
#pragma unroll
      for (int v = 0; v < VEC; v++)
        x_r[n][v] = 0 - x_r[n][v], att[n][v] *= EXACT ? -1 : -(1 + from.slope) / 2;
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

  // -z of an edge, before the leaky_relu and without its features. Its sign tells whether z is
  // positive, as it is never -0.
  DEVICE_MEMBER void opposites(const Rows& rows, int u, acc_t (&z)[NV][VEC]) const {
#pragma unroll
    for (int n = 0; n < NV; n++) {
      acc_t values[VEC];
      unpack(rows.x_l[u][n], values);
#pragma unroll
      for (int v = 0; v < VEC; v++) z[n][v] = x_r[n][v] - values[v];
    }
  }
#if EDGES
  DEVICE_MEMBER void subtract_features(const Rows& rows, acc_t (&z)[BATCH][NV][VEC]) const {
    for (int d = 0; d < from.dim; d++) {
      acc_t map[NV][VEC];
      load_row(from.lin, d, place, map);
#pragma unroll
      for (int u = 0; u < BATCH; u++) {
        const acc_t feature = widen(__ldg(rows.attr[u] + d));
#pragma unroll
        for (int n = 0; n < NV; n++)
          if (place.inside(n))  // an infinite feature times no channel is NaN
            add_scaled(z[u][n], -feature, map[n]);
      }
    }
  }
#endif

  // The lane's parts of the scores, and which hidden values are positive.
  DEVICE_MEMBER void scores(const Rows& rows, acc_t (&parts)[SLOTS][BATCH], Signs& positive) const {
    positive.clear();
    acc_t z[BATCH][NV][VEC];
#if EDGES
#pragma unroll
    for (int u = 0; u < BATCH; u++) opposites(rows, u, z[u]);
    subtract_features(rows, z);
#endif
#pragma unroll
    for (int u = BATCH - 1; u >= 0; u--) {
#if !EDGES
      opposites(rows, u, z[u]);
#endif
#pragma unroll
      for (int n = 0; n < NV; n++) {
        add_score(z[u][n], att[n], parts[n / HEAD_VECS][u]);
        positive.add(u, n, z[u][n]);
      }
    }
  }
  DEVICE_MEMBER void add_score(const acc_t (&z)[VEC], const acc_t (&factor)[VEC], acc_t& part) const {
    acc_t bent = 0;
#pragma unroll
    for (int v = 0; v < VEC; v++) {
      part = fma(factor[v], !EXACT || z[v] < 0 ? z[v] : from.slope * z[v], part);
      if (!EXACT) bent = fma(factor[v], fabs(z[v]), bent);
    }
    if (!EXACT) part = fma(bent, (from.slope - 1) / (from.slope + 1), part);
  }
};
