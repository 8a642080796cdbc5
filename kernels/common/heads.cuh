// How the heads of a row lie in a group of lanes, and sums over the lanes of a head.
//
// HEAD_LANES lanes, a power of two, share a head; a lane has HEAD_VECS accesses of VEC numbers of
// each of its heads, NV in all. FILLED tells that no access is beyond its head, no head beyond the
// row; WHOLE that a group has all heads, too, and strides are known. All lanes of a warp walk
// together, so that shuffles need no mask.
//
// Of a batch of edges every edge's sum is in SPREAD lanes, and a lane has those of OWN edges: what
// follows of scores is done once, not by all lanes of a head.
#pragma once
#include "combine.cuh"
#include "rows.cuh"
#include "vec.cuh"

#ifndef WHOLE
#define WHOLE 0
#endif
#define SIDE (LANES / HEAD_LANES)  // heads side by side
#define SLOTS (NV / HEAD_VECS)     // heads of one lane
#define SPREAD (HEAD_LANES > BATCH ? HEAD_LANES / BATCH : 1)
#define OWN (BATCH > HEAD_LANES ? BATCH / HEAD_LANES : 1)

struct Place {
  int heads, channels, width;
  int head, sub;  // the lane's first head, and its number among the lanes of a head

  DEVICE_MEMBER Place(int heads_, int channels_) {
    const int lane = threadIdx.x % LANES;
    heads = WHOLE ? SLOTS * SIDE : heads_;
    channels = FILLED ? HEAD_LANES * HEAD_VECS * VEC : channels_;
    width = heads * channels;
    head = (WHOLE ? 0 : blockIdx.y * SLOTS * SIDE) + lane / HEAD_LANES, sub = lane % HEAD_LANES;
  }
  DEVICE_MEMBER int head_of(int slot) const { return head + slot * SIDE; }
  DEVICE_MEMBER bool has(int slot) const { return FILLED || head_of(slot) < heads; }
  DEVICE_MEMBER int channel(int n) const { return (n % HEAD_VECS * HEAD_LANES + sub) * VEC; }
  DEVICE_MEMBER int feature(int n) const {
    return head_of(n / HEAD_VECS) * channels + channel(n);
  }
  DEVICE_MEMBER bool inside(int n) const {
    return FILLED || (has(n / HEAD_VECS) && channel(n) < channels);
  }
  // Which edge of a batch is the lane's own, and whether the lane is the one to write for it.
  DEVICE_MEMBER int own_edge(int i) const { return sub / SPREAD * OWN + i; }
  DEVICE_MEMBER bool writes(int slot) const { return sub % SPREAD == 0 && has(slot); }
};

// Whether something holds for any, or all, of the groups of a warp; the same in a group's lanes.
DEVICE bool any_group(bool holds) { return LANES == 32 ? holds : __any_sync(ALL_LANES, holds); }
DEVICE bool all_groups(bool holds) { return LANES == 32 ? holds : __all_sync(ALL_LANES, holds); }

// The value of edge u, which one of the head's lanes has.
template <class T> DEVICE T of_edge(const T (&own)[BATCH], int u) {
  if (HEAD_LANES == 1) return own[u];
  return __shfl_sync(ALL_LANES, own[u % OWN], u / OWN * SPREAD, HEAD_LANES);
}

// The sum, or the largest, over the lanes that have different edges of a head.
DEVICE acc_t sum_over_edges(acc_t value) {
#pragma unroll
  for (int offset = HEAD_LANES / 2; offset >= SPREAD; offset /= 2)
    value += __shfl_xor_sync(ALL_LANES, value, offset);
  return value;
}
DEVICE acc_t max_over_edges(acc_t value) {
#pragma unroll
  for (int offset = HEAD_LANES / 2; offset >= SPREAD; offset /= 2)
    value = max(value, __shfl_xor_sync(ALL_LANES, value, offset));
  return value;
}

DEVICE void load_row(const scalar_t* table, long long row, const Place& place,
                     acc_t (&to)[NV][VEC]) {
#pragma unroll
  for (int n = 0; n < NV; n++)
    unpack(row >= 0 && place.inside(n) ? load_packed(table + row * place.width + place.feature(n))
                                       : zero_packed(),
           to[n]);
}

DEVICE void store_row(scalar_t* table, long long row, const Place& place,
                      const acc_t (&from)[NV][VEC]) {
#pragma unroll
  for (int n = 0; n < NV; n++)
    if (place.inside(n)) store(table + row * place.width + place.feature(n), from[n]);
}

DEVICE void store_partial(acc_t* partial, long long part, const Place& place,
                          const acc_t (&from)[NV][VEC]) {
#pragma unroll
  for (int n = 0; n < NV; n++)
    if (place.inside(n)) store_words(partial + part * place.width + place.feature(n), from[n]);
}

// The rows of a batch of edges, all asked for before any is used.
template <bool FULL>
DEVICE void load_rows(const scalar_t* table, const index_t (&source)[BATCH], const Place& place,
                      Packed (&to)[BATCH][NV]) {
#pragma unroll
  for (int u = 0; u < BATCH; u++)
#pragma unroll
    for (int n = 0; n < NV; n++) {
      const bool inside = place.inside(n) && (FULL || source[u] >= 0);
      const scalar_t* at = in_row(table, source[u], place.width, place.feature(n));
      to[u][n] = inside ? load_packed(at) : zero_packed();
    }
}

// sum += factor * values
DEVICE void add_scaled(acc_t (&sum)[VEC], acc_t factor, const acc_t (&values)[VEC]) {
#pragma unroll
  for (int v = 0; v < VEC; v++) sum[v] = fma(factor, values[v], sum[v]);
}

// parts[slot][u] += the lane's part of left . rows[u]
DEVICE void add_dots(const acc_t (&left)[NV][VEC], const Packed (&rows)[BATCH][NV],
                     acc_t (&parts)[SLOTS][BATCH]) {
#pragma unroll
  for (int u = 0; u < BATCH; u++)
#pragma unroll
    for (int n = 0; n < NV; n++) {
      acc_t values[VEC];
      unpack(rows[u][n], values);
#pragma unroll
      for (int v = 0; v < VEC; v++)
        parts[n / HEAD_VECS][u] = fma(left[n][v], values[v], parts[n / HEAD_VECS][u]);
    }
}

// sum += weights[u] * rows[u] over the edges of a batch, each head by its own weights
DEVICE void add_weighted(acc_t (&sum)[NV][VEC], const acc_t (&weights)[SLOTS][BATCH],
                         Packed (&rows)[BATCH][NV]) {
#pragma unroll
  for (int u = 0; u < BATCH; u++)
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
      const acc_t weight = of_edge(weights[s], u);
#pragma unroll
      for (int n = s * HEAD_VECS; n < (s + 1) * HEAD_VECS; n++) {
        acc_t values[VEC];
        unpack_anew(rows[u][n]);
        unpack(rows[u][n], values);
        add_scaled(sum[n], weight, values);
      }
    }
}

// Multiplies each head's numbers by its own factor.
DEVICE void rescale(acc_t (&sum)[NV][VEC], const acc_t (&factor)[SLOTS]) {
#pragma unroll
  for (int n = 0; n < NV; n++)
#pragma unroll
    for (int v = 0; v < VEC; v++) sum[n][v] *= factor[n / HEAD_VECS];
}

DEVICE void clear(acc_t (&sum)[NV][VEC]) {
#pragma unroll
  for (int n = 0; n < NV; n++)
#pragma unroll
    for (int v = 0; v < VEC; v++) sum[n][v] = 0;
}
