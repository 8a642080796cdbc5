// reduce — maxima or minima of the rows of each target's sources, and where they come from.
// Maths     out[i] = max or min of weight[perm[k], h] * x[idx[k]]  over the edges k of row i
// Shapes    x [S, width]  out [N, width]  weight [E, heads] or null  arg [N, width] (place_t) or null
//           partial [T, width] (acc_t)  partial_arg [T, width] (int)  rowptr [N + 1]  idx, perm [E]
//           tiles [T, 4]
// Mapping   LANES lanes a row or tile, NV accesses of VEC numbers a lane; wider rows by blockIdx.y
// Traffic   gathers E rows of x (4 bytes of idx each; weight and perm where given); out and arg once
// Numerics  NaN beats all and the first NaN stays; a row without edges gives 0; tiles merge in order
// Limits    VEC divides width, and width / heads where heads > 1
//
// `arg` is the place in the row of the first edge that attains the result, or its complement where
// a gradient needs more than that: several edges attain it, or it is zero or NaN. `tied` [N] (bytes,
// zero before) tells whether the row has any complement.
#include "common/best.cuh"
#include "common/merge.cuh"
#include "common/message.cuh"
#include "common/rows.cuh"
#include "common/vec.cuh"

#ifndef BATCH
#define BATCH 1  // of kernels that take no edges
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
// them. A value that is NaN stays; where the first NaN is, `first_nan` finds out afterwards.
struct Best {
#if PAIRS
  unsigned value[VEC / 2], first[VEC / 2], last[VEC / 2];
#else
  acc_t value[VEC];
  int first[VEC], last[VEC];  // edges that attain the value
#endif

  DEVICE_MEMBER void clear() {
#if PAIRS
    const unsigned worst = SCALAR == 2 ? 0x7c007c00u : 0x7f807f80u;
#pragma unroll
    for (int v = 0; v < VEC / 2; v++)
      value[v] = worst | (MINIMUM ? 0 : 0x80008000u), first[v] = last[v] = 0;
#else
#pragma unroll
    for (int v = 0; v < VEC; v++) value[v] = MINIMUM ? INF : -INF, first[v] = last[v] = 0;
#endif
  }

#if PAIRS
  DEVICE_MEMBER void add(const Packed& packed, unsigned at) {
    unsigned values[VEC / 2];
    memcpy(values, &packed.bits, sizeof(values));
    at |= at << 16;
#pragma unroll
    for (int v = 0; v < VEC / 2; v++) {
#if WITH_ARG
      const unsigned better = better_pair(values[v], value[v]);
      const unsigned as_good = as_good_pair(values[v], value[v]);
      first[v] = (at & better) | (first[v] & ~better);
      last[v] = (at & as_good) | (last[v] & ~as_good);
#endif
      value[v] = best_pair(values[v], value[v]);
    }
  }
  DEVICE_MEMBER acc_t value_of(int v) const { return widen(value[v / 2] >> v % 2 * 16 & 0xffff); }
  DEVICE_MEMBER int first_of(int v) const { return first[v / 2] >> v % 2 * 16 & 0xffff; }
  DEVICE_MEMBER int last_of(int v) const { return last[v / 2] >> v % 2 * 16 & 0xffff; }
#else
  DEVICE_MEMBER void add(const acc_t (&values)[VEC], int at) {
#pragma unroll
    for (int v = 0; v < VEC; v++) {
#if WITH_ARG
      if (MINIMUM ? values[v] < value[v] : values[v] > value[v]) first[v] = at;
      if (MINIMUM ? values[v] <= value[v] : values[v] >= value[v]) last[v] = at;
#endif
      value[v] = best_of(values[v], value[v]);
    }
  }
  DEVICE_MEMBER acc_t value_of(int v) const { return value[v]; }
  DEVICE_MEMBER int first_of(int v) const { return first[v]; }
  DEVICE_MEMBER int last_of(int v) const { return last[v]; }
#endif
};

template <bool FULL>
DEVICE void add_batch(Best (&best)[NV], long long k, long long begin, long long end, int f0,
                      const index_t* __restrict__ idx, const index_t* __restrict__ perm,
                      const scalar_t* __restrict__ x, const scalar_t* __restrict__ weight,
                      int width, int heads, int channels) {
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
      row[u][n] = inside ? load_packed(x + (long long)source[u] * width + f) : zero_packed();
#if WEIGHTED
      if (inside) {
        const long long edge = perm ? __ldg(perm + k + u) : k + u;
        factor[u][n] = widen(__ldg(weight + edge * heads + (heads > 1 ? f / channels : 0)));
      }
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

#if WITH_ARG
// The place of the first edge whose message is NaN.
static __device__ __noinline__ int first_nan(const Edges& e, long long begin, long long end, int f) {
  for (long long k = begin; k < end; k++) {
    const acc_t v = message(e, k, f);
    if (v != v) return (int)(k - begin);
  }
  return 0;
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    reduce(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
           const index_t* __restrict__ perm, const long long* __restrict__ tiles,
           const scalar_t* __restrict__ x, const scalar_t* __restrict__ weight,
           scalar_t* __restrict__ out, place_t* __restrict__ arg, unsigned char* __restrict__ tied,
           acc_t* __restrict__ partial, int* __restrict__ partial_arg, long long num_rows,
           long long num_tiles, long long split, int width, int heads) {
  Item it;
  if (!find_item(it, group_of_launch(), rowptr, tiles, num_rows, num_tiles, split)) return;
  const int f0 = (blockIdx.y * NV * LANES + threadIdx.x % LANES) * VEC, channels = width / heads;
  Best best[NV];
#pragma unroll
  for (int n = 0; n < NV; n++) best[n].clear();
  long long k = it.begin;
  for (; k + BATCH <= it.end; k += BATCH)
    add_batch<true>(best, k, it.begin, it.end, f0, idx, perm, x, weight, width, heads, channels);
  if (k < it.end)
    add_batch<false>(best, k, it.begin, it.end, f0, idx, perm, x, weight, width, heads, channels);
#if WITH_ARG
  const int origin = it.part < 0 ? 0 : (int)(it.begin - rowptr[it.row]);
  const Edges edges = {idx, perm, x, weight, width, heads, channels};
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
#if WITH_ARG
    int places[VEC];
    bool nan = false, any = false;
#pragma unroll
    for (int v = 0; v < VEC; v++) {
      const int first = best[n].first_of(v);
      // Tiles leave it to the merge what the value itself asks for.
      const bool zero = it.part < 0 && value[v] == 0 && it.begin < it.end;
      nan |= value[v] != value[v];
      const bool more = zero || best[n].last_of(v) != first;
      places[v] = more ? ~(origin + first) : origin + first;
      any |= more;
    }
    if (it.part < 0 && (any || nan)) tied[it.row] = 1;
    if (nan) {
#pragma unroll
      for (int v = 0; v < VEC; v++)
        if (value[v] != value[v])
          places[v] = ~(origin + first_nan(edges, it.begin, it.end, f + v));
    }
    if (it.part < 0) {
      place_t found[VEC];
#pragma unroll
      for (int v = 0; v < VEC; v++) found[v] = (place_t)places[v];
      store_words(arg + it.row * width + f, found);
    } else {
      store_words(partial_arg + it.part * width + f, places);
    }
#endif
  }
}

struct Tables {
  const acc_t* partial;
  const int* partial_arg;
  scalar_t* out;
  place_t* arg;
  unsigned char* tied;
  int width;
};

// The first of the partials that attain the result wins, whichever order they are combined in.
struct Merged {
  acc_t value[VEC];
#if WITH_ARG
  int place[VEC];
  unsigned several;  // a bit for each feature whose value several edges attain
#endif

  DEVICE_MEMBER Merged() {}
  DEVICE_MEMBER Merged(const Tables& t, long long part, int f) {
    const long long at = part * t.width + f;
#if WITH_ARG
    several = 0;
#endif
#pragma unroll
    for (int v = 0; v < VEC; v++) {
      value[v] = t.partial[at + v];
#if WITH_ARG
      const int found = t.partial_arg[at + v];
      place[v] = found < 0 ? ~found : found;
      several |= (unsigned)(found < 0) << v;
#endif
    }
  }
  DEVICE_MEMBER void add(const Merged& other) {
#pragma unroll
    for (int v = 0; v < VEC; v++) {
      const acc_t mine = value[v], theirs = other.value[v];
#if WITH_ARG
      const bool both_nan = mine != mine && theirs != theirs, equal = mine == theirs || both_nan;
      const bool take = equal ? other.place[v] < place[v] : beats(theirs, mine);
      if (equal)
        several |= 1u << v;
      else if (take)
        several = (several & ~(1u << v)) | (other.several & 1u << v);
      if (take) place[v] = other.place[v];
#else
      const bool take = beats(theirs, mine);
#endif
      if (take) value[v] = theirs;
    }
  }
  DEVICE_MEMBER void finish(const Tables& t, long long row, int f) {
    const long long at = row * t.width + f;
#if WITH_ARG
#pragma unroll
    for (int v = 0; v < VEC; v++) {
      const bool more = several >> v & 1 || !(value[v] > 0 || value[v] < 0);
      t.arg[at + v] = (place_t)(more ? ~place[v] : place[v]);
      if (more) t.tied[row] = 1;
    }
#endif
    store(t.out + at, value);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_merge(const long long* __restrict__ tiles, const acc_t* __restrict__ partial,
                 const int* __restrict__ partial_arg, scalar_t* __restrict__ out,
                 place_t* __restrict__ arg, unsigned char* __restrict__ tied, long long num_tiles,
                 int width) {
  const Tables tables = {partial, partial_arg, out, arg, tied, width};
  merge_rows<Merged>(tables, tiles, num_tiles, width);
}
