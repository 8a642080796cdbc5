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

// What is known of a row's edges so far. Places count from the item's first edge, so 16 bits hold
// them. A value that is NaN stays; which edges are NaN, `find_nans` tells afterwards.
struct Best {
#if PAIRS
  unsigned value[VEC / 2], first[VEC / 2], count[VEC / 2];
#else
  acc_t value[VEC];
  unsigned state[VEC];  // of the edges that attain the value, the first, and from bit 16 how many
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

#if PAIRS
  DEVICE_MEMBER void add(const Packed& packed, unsigned at) {
    unsigned values[VEC / 2];
    memcpy(values, &packed.bits, sizeof(values));
    at |= at << 16;
#pragma unroll
    for (int v = 0; v < VEC / 2; v++) {
#if WITH_MARK
      const unsigned better = better_pair(values[v], value[v]);
      if (!COUNTS) first[v] = (at & better) | (first[v] & ~better);
#if TIES != FIRST
      count[v] = (count[v] & ~better) + (as_good_pair(values[v], value[v]) & 0x00010001u);
#endif
#endif
      value[v] = best_pair(values[v], value[v]);
    }
  }
  DEVICE_MEMBER acc_t value_of(int v) const { return widen(value[v / 2] >> v % 2 * 16 & 0xffff); }
  DEVICE_MEMBER int first_of(int v) const { return first[v / 2] >> v % 2 * 16 & 0xffff; }
  DEVICE_MEMBER int count_of(int v) const { return count[v / 2] >> v % 2 * 16 & 0xffff; }
#else
  DEVICE_MEMBER void add(const acc_t (&values)[VEC], int at) {
#pragma unroll
    for (int v = 0; v < VEC; v++) {
#if WITH_MARK
      if (TIES != FIRST && values[v] == value[v]) state[v] += 1u << 16;
      if (MINIMUM ? values[v] < value[v] : values[v] > value[v]) state[v] = at | 1u << 16;
#endif
      value[v] = best_of(values[v], value[v]);
    }
  }
  DEVICE_MEMBER acc_t value_of(int v) const { return value[v]; }
  DEVICE_MEMBER int first_of(int v) const { return state[v] & 0xffff; }
  DEVICE_MEMBER int count_of(int v) const { return state[v] >> 16; }
#endif
};

template <bool FULL>
DEVICE void add_batch(Best (&best)[NV], long long k, long long begin, long long end, int f0,
                      const index_t* __restrict__ idx, const scalar_t* __restrict__ x,
                      const scalar_t* __restrict__ weight, int width, int heads, int channels) {
  index_t source[BATCH];
  Packed row[BATCH][NV];
#if WEIGHTED
  acc_t factor[BATCH][NV];
#endif
#pragma unroll
  for (int u = 0; u < BATCH; u++) source[u] = FULL || k + u < end ? __ldg(idx + k + u) : -1;
#pragma unroll
  for (int u = 0; u < BATCH; u++)
#pragma unroll
    for (int n = 0; n < NV; n++) {
      const int f = f0 + n * LANES * VEC;
      const bool inside = f < width && (FULL || source[u] >= 0);
      const scalar_t* at = in_row(x, source[u], width, f);
      row[u][n] = inside ? load_packed(at) : zero_packed();
#if WEIGHTED
      if (inside)
        factor[u][n] = weight_of(weight, k + u, f, heads, channels);
#endif
    }
#pragma unroll
  for (int u = 0; u < BATCH; u++) {
    if (!FULL && source[u] < 0) continue;
#pragma unroll
    for (int n = 0; n < NV; n++) {
#if PAIRS
      best[n].add(row[u][n], (unsigned)(k + u - begin));
#else
      acc_t values[VEC];
      unpack(row[u][n], values);
#if WEIGHTED
#pragma unroll
      for (int v = 0; v < VEC; v++) values[v] = widen(narrow(values[v] * factor[u][n]));
#endif
      best[n].add(values, (int)(k + u - begin));
#endif
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
  long long k = it.begin;
  for (; k + BATCH <= it.end; k += BATCH)
    add_batch<true>(best, k, it.begin, it.end, f0, idx, x, weight, width, heads, channels);
  if (k < it.end)
    add_batch<false>(best, k, it.begin, it.end, f0, idx, x, weight, width, heads, channels);
#if WITH_MARK
  const int origin = it.part < 0 ? 0 : (int)(it.begin - rowptr[it.row]);
#endif
#pragma unroll
  for (int n = 0; n < NV; n++) {
    const int f = f0 + n * LANES * VEC;
    if (f >= width) continue;
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
