// reduce — maxima or minima of the rows of each target's sources, and where they come from.
// Maths     out[i] = max or min of weight[k, h] * x[idx[k]]  over the edges k of row i
// Shapes    x [S, width]  out [N, width]  weight [E, heads] or null  mark [N, width] (place_t) or null
//           partial [T, width] (acc_t)  partial_mark [T, width] (int)  rowptr [N + 1]  idx [E]
//           tiles [T, 4]
// Mapping   LANES lanes a row or tile, NV accesses of VEC numbers a lane; wider rows by blockIdx.y
// Traffic   gathers E rows of x (4 bytes of idx each; weight where given, in its order); out
//           and mark once
// Numerics  NaN beats all and the first NaN stays; a row without edges gives 0; tiles merge in order
// Limits    VEC divides width, and width / heads where heads > 1; marks: see common/marks.cuh
#include "common/best.cuh"
#include "common/marks.cuh"
#include "common/merge.cuh"
#include "common/rows.cuh"
#include "common/vec.cuh"
#include "common/weight.cuh"

#ifndef BATCH
#define BATCH 1  // of kernels that take no edges
#define RESIDENT 1
#endif

// Whether v replaces best.
DEVICE bool beats(acc_t v, acc_t best) {
#if MINIMUM
  return !(v >= best) && best == best;
#else
  return !(v <= best) && best == best;
#endif
}

// The numbers of an edge that a lane compares.
#if PAIRS
typedef unsigned Numbers[VEC / 2];
#else
typedef acc_t Numbers[VEC];
#endif

// What is known of a row's edges so far. Places count from the item's first edge, so 16 bits hold
// them. A value that is NaN stays; which edges are NaN, `find_nans` tells afterwards.
struct Best {
#if PAIRS
  unsigned value[VEC / 2], first[VEC / 2], count[VEC / 2];
#else
  acc_t value[VEC];
  // Of the edges that attain the value, how many and, from bit 16, the sum of their places (where
  // FIRST, the first): nobody asks for the place of several.
  unsigned state[VEC];
#endif

  DEVICE_MEMBER void clear() {
#if PAIRS
    const unsigned worst = SCALAR == 2 ? 0x7c007c00u : 0x7f807f80u;
#pragma unroll
    for (int v = 0; v < VEC / 2; v++)
      value[v] = worst | (MINIMUM ? 0 : 0x80008000u), first[v] = count[v] = 0;
#else
#pragma unroll
    for (int v = 0; v < VEC; v++) value[v] = MINIMUM ? INF : -INF, state[v] = 0;
#endif
  }

  // Adds edges, of which the first has that place.
#if PAIRS
  template <int EDGES> DEVICE_MEMBER void add(const Numbers (&values)[EDGES], int place) {
#pragma unroll
    for (int v = 0; v < VEC / 2; v++) {
      unsigned best = value[v], equal = 0;
#pragma unroll
      for (int u = 0; u < EDGES; u++) {
#if WITH_MARK
        const unsigned better = COUNTS ? 0 : better_pair(values[u][v], best);
        first[v] = ((place + u) * 0x00010001u & better) | (first[v] & ~better);
#endif
        best = best_pair(values[u][v], best);
      }
#if WITH_MARK && COUNTS
#pragma unroll
      for (int u = 0; u < EDGES; u++) equal += equal_pair(values[u][v], best);
      // Modulo 2^32 the factor makes 1 of 0xffff: of the sum of masks, how many there are of each.
      count[v] = (count[v] & equal_pair(value[v], best)) + equal * 0xfffeffffu;
#endif
      value[v] = best;
    }
  }
  DEVICE_MEMBER acc_t value_of(int v) const { return widen(value[v / 2] >> v % 2 * 16 & 0xffff); }
  DEVICE_MEMBER int first_of(int v) const { return first[v / 2] >> v % 2 * 16 & 0xffff; }
  DEVICE_MEMBER int count_of(int v) const { return count[v / 2] >> v % 2 * 16 & 0xffff; }
#else
  template <int EDGES> DEVICE_MEMBER void add(const Numbers (&values)[EDGES], int place) {
    const unsigned one = (unsigned)place << 16 | 1;
#pragma unroll
    for (int v = 0; v < VEC; v++) {
      acc_t best = value[v];
#pragma unroll
      for (int u = 0; u < EDGES; u++) {
#if WITH_MARK && TIES == FIRST
        if (MINIMUM ? values[u][v] < best : values[u][v] > best) state[v] = one + (u << 16);
#endif
        best = best_of(values[u][v], best);
      }
#if WITH_MARK && TIES != FIRST
      if (best != value[v]) state[v] = 0;
#pragma unroll
      for (int u = 0; u < EDGES; u++)  // one comparison and one predicated sum each, if hidden
        if (values[u][v] == best) state[v] = hidden(state[v] + (one + (u << 16)));
#endif
      value[v] = best;
    }
  }
  DEVICE_MEMBER acc_t value_of(int v) const { return value[v]; }
  DEVICE_MEMBER int first_of(int v) const { return state[v] >> 16; }
  DEVICE_MEMBER int count_of(int v) const { return state[v] & 0xffff; }
#endif
};

#if PAIRS
DEVICE void values_of(const Packed& row, acc_t, Numbers& values) {
  memcpy(values, &row.bits, sizeof(values));
}
#else
DEVICE void values_of(const Packed& row, acc_t factor, Numbers& values) {
  unpack(row, values);
#if WEIGHTED
#pragma unroll
  for (int v = 0; v < VEC; v++) values[v] = widen(narrow(values[v] * factor));
#endif
}
#endif

template <bool FULL>
DEVICE void add_batch(Best (&best)[NV], int k, int end, int f0, const index_t* __restrict__ idx,
                      const scalar_t* __restrict__ x, const scalar_t* __restrict__ weight, int width,
                      int heads, int channels) {
  index_t source[BATCH];
  Packed row[BATCH][NV];
  acc_t factor[BATCH][NV] = {};
#pragma unroll
  for (int u = 0; u < BATCH; u++) source[u] = FULL || k + u < end ? __ldg(idx + k + u) : -1;
#pragma unroll
  for (int u = 0; u < BATCH; u++)
#pragma unroll
    for (int n = 0; n < NV; n++) {
      const int f = f0 + n * LANES * VEC;
      const bool inside = (FILLED || f < width) && (FULL || source[u] >= 0);
      const scalar_t* at = in_row(x, source[u], width, f);
      row[u][n] = inside ? load_packed(at) : zero_packed();
#if WEIGHTED
      if (inside) factor[u][n] = weight_of(weight, k + u, f, heads, channels);
#endif
    }
  constexpr int EDGES = FULL ? BATCH : 1;  // at once
#pragma unroll
  for (int u = 0; u < BATCH; u += EDGES) {
    if (!FULL && source[u] < 0) continue;
#pragma unroll
    for (int n = 0; n < NV; n++) {
      Numbers values[EDGES];
#pragma unroll
      for (int e = 0; e < EDGES; e++) values_of(row[u + e][n], factor[u + e][n], values[e]);
      best[n].add(values, k + u);
    }
  }
}

#if WITH_MARK
struct Found {
  int first, count;
};

// The edges whose message is NaN.
static __device__ __noinline__ Found find_nans(const index_t* idx, const scalar_t* x,
                                               const scalar_t* weight, int width, int heads,
                                               long long begin, long long end, int f) {
  Found found = {0, 0};
  for (long long k = end - 1; k >= begin; k--) {
    acc_t v = widen(x[(long long)idx[k] * width + f]);
#if WEIGHTED
    v *= weight_of(weight, k, f, heads, width / heads);
#endif
    if (v != v) found.first = (int)(k - begin), found.count++;
  }
  return found;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    reduce(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
           const long long* __restrict__ tiles,
           const scalar_t* __restrict__ x, const scalar_t* __restrict__ weight,
           scalar_t* __restrict__ out, place_t* __restrict__ mark, acc_t* __restrict__ partial,
           int* __restrict__ partial_mark, long long num_rows, long long num_tiles,
           long long split, int width, int heads) {
  Item it;
  if (!find_item(it, group_of_launch(), rowptr, tiles, num_rows, num_tiles, split)) return;
  const int f0 = (blockIdx.y * NV * LANES + threadIdx.x % LANES) * VEC, channels = width / heads;
  Best best[NV];
#pragma unroll
  for (int n = 0; n < NV; n++) best[n].clear();
  const int count = (int)(it.end - it.begin);
  const index_t* sources = idx + it.begin;
  const scalar_t* factors = WEIGHTED ? weight + it.begin * (WEIGHTED == 2 ? heads : 1) : weight;
  int k = 0;
#pragma unroll 1
  for (; k + BATCH <= count; k += BATCH)
    add_batch<true>(best, k, count, f0, sources, x, factors, width, heads, channels);
  if (k < count)
    add_batch<false>(best, k, count, f0, sources, x, factors, width, heads, channels);
#if WITH_MARK
  const int origin = it.part < 0 ? 0 : (int)(it.begin - rowptr[it.row]);
#endif
#pragma unroll
  for (int n = 0; n < NV; n++) {
    const int f = f0 + n * LANES * VEC;
    if (!FILLED && f >= width) continue;
    acc_t value[VEC];
#pragma unroll
    for (int v = 0; v < VEC; v++) value[v] = it.begin < it.end ? best[n].value_of(v) : 0;
    if (it.part < 0)
      store(out + it.row * width + f, value);
    else
      store_words(partial + it.part * width + f, value);
#if WITH_MARK
    int marks[VEC];
#pragma unroll
    for (int v = 0; v < VEC; v++) {
      Found found = {best[n].first_of(v), best[n].count_of(v)};
      if (value[v] != value[v]) found = find_nans(idx, x, weight, width, heads, it.begin, it.end, f + v);
      const int place = origin + found.first;
      // Tiles leave it to the merge what the value itself asks for.
      marks[v] = it.part < 0 ? mark_of(value[v], place, found.count) : mark_in_tile(place, found.count);
    }
    if (it.part < 0) {
      place_t narrowed[VEC];
#pragma unroll
      for (int v = 0; v < VEC; v++) narrowed[v] = (place_t)marks[v];
      store_words(mark + it.row * width + f, narrowed);
    } else {
      store_words(partial_mark + it.part * width + f, marks);
    }
#endif
  }
}

struct Tables {
  const acc_t* partial;
  const int* partial_mark;
  scalar_t* out;
  place_t* mark;
  int width;
};

// The first of the partials that attain the result wins, whichever order they are combined in.
struct Merged {
  acc_t value[VEC];
#if WITH_MARK
  int place[VEC], count[VEC];
#endif

  DEVICE_MEMBER Merged() {}
  DEVICE_MEMBER Merged(const Tables& t, long long part, int f) {
    const long long at = part * t.width + f;
#pragma unroll
    for (int v = 0; v < VEC; v++) {
      value[v] = t.partial[at + v];
#if WITH_MARK
      const int found = t.partial_mark[at + v];
      place[v] = found, count[v] = sharers(found);
#endif
    }
  }
  DEVICE_MEMBER void add(const Merged& other) {
#pragma unroll
    for (int v = 0; v < VEC; v++) {
      const acc_t mine = value[v], theirs = other.value[v];
      const bool take = beats(theirs, mine);
#if WITH_MARK
      const bool equal = same(mine, theirs) || (mine != mine && theirs != theirs);
      if (equal)
        count[v] += other.count[v], place[v] = min(place[v], other.place[v]);
      else if (take)
        count[v] = other.count[v], place[v] = other.place[v];
#endif
      if (take) value[v] = theirs;
    }
  }
  DEVICE_MEMBER void finish(const Tables& t, long long row, int f) {
    const long long at = row * t.width + f;
#if WITH_MARK
#pragma unroll
    for (int v = 0; v < VEC; v++) t.mark[at + v] = (place_t)mark_of(value[v], place[v], count[v]);
#endif
    store(t.out + at, value);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    reduce_merge(const long long* __restrict__ tiles, const acc_t* __restrict__ partial,
                 const int* __restrict__ partial_mark, scalar_t* __restrict__ out,
                 place_t* __restrict__ mark, long long num_tiles, int width) {
  const Tables tables = {partial, partial_mark, out, mark, width};
  merge_rows<Merged>(tables, tiles, num_tiles, width);
}
