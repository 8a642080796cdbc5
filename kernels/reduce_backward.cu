// reduce_gather, reduce_share, reduce_weight — gradients of reduce.
// Maths     dx[j] = sum of weight[k, h] * d_k over the edges k from j, d_k the share of edge k in
//           grad[i]: grad[i] over the number of edges that share if it is one of them, else 0
//           dw[perm[k], h] = sum_c x[idx[k]] * d_k over the edges k of row i
// Shapes    x, dx [S, width]  grad, best [N, width]  mark [N, width] (place_t)  weight, dw [E, heads]
//           place [E] (in the row by target)  partial [T, width] (acc_t)  unusual [1] (int)
//           rowptr [S + 1 or N + 1]  idx, perm [E]  tiles [T, 4]; weight in the order of the rows
// Mapping   gather: LANES lanes a row or tile by source, NV accesses of VEC numbers a lane, wider
//           rows by blockIdx.y; weight: the same by target, and head (blockIdx.y); share: VEC
//           numbers a thread
// Traffic   gather: E rows of mark and grad, 8 bytes of idx and place each, best and x where several
//           edges share. Where COUNTS: E rows of best and of shares, which take grad, mark and
//           themselves once. weight: E rows of x
// Numerics  acc_t sums in edge order, tiles merged in order (by spmm_merge); no float atomics
// Limits    VEC divides width, and width / heads where heads > 1; marks: see common/marks.cuh
//
// Under "even" stock multiplies by the share where an edge attains the result and by zero where it
// does not, so a share that is not finite reaches all edges of its row. `unusual` tells that there
// is one: reduce_share finds out, or the first launch of gather (strict = 0), after which a second
// (strict = 1) does nothing unless there is, and then multiplies as stock does.
#include "common/marks.cuh"
#include "common/rows.cuh"
#include "common/vec.cuh"
#include "common/weight.cuh"

#ifndef BATCH
#define BATCH 1  // of kernels that take no edges
#define RESIDENT 1
#endif

struct Targets {
  const index_t *idx, *place;  // of each edge by source
  const scalar_t *x, *weight, *grad, *best, *share;
  const place_t* mark;
  int width, heads, channels;

  DEVICE_MEMBER acc_t factor(long long k, int f) const {
    return WEIGHTED ? weight_of(weight, k, f, heads, channels) : 1;
  }
};

// An edge's parts in the gradient, wherever it shares in any; `unusual` if a share is not finite.
DEVICE void parts_of(acc_t (&part)[VEC], const Packed& grad, const place_t (&mark)[VEC], int place,
                     const Packed& best, const Packed& x, acc_t factor, bool* unusual) {
  acc_t results[VEC], values[VEC];
  unpack(grad, part);
  unpack(best, results);
  unpack(x, values);
#pragma unroll
  for (int v = 0; v < VEC; v++) {
    bool shares = mark[v] == place;
    if (COUNTS || (TIES != FIRST && mark[v] < 0)) {
      shares = attains(WEIGHTED ? widen(narrow(values[v] * factor)) : values[v], results[v]);
      part[v] = share_of(part[v], mark[v]);
      *unusual |= !is_finite(part[v]);
    }
    if (!shares) part[v] = TIES == EVEN ? 0 * part[v] : 0;
  }
}

// Adds what edges that tie get or, if strict, what every edge gets: a bit for each edge of a batch.
DEVICE void add_some(acc_t (&sum)[VEC], const Targets& t, long long row, long long k, unsigned edges,
                     int f, bool strict, bool* unusual) {
  const Packed x = load_packed(t.x + row * t.width + f);
  for (; edges; edges &= edges - 1) {
    const long long edge = k + __ffs(edges) - 1;
    const long long at = (long long)__ldg(t.idx + edge) * t.width + f;
    place_t mark[VEC];
    load_words(t.mark + at, mark);
    const Packed grad = load_packed(t.grad + at), best = load_packed(t.best + at);
    const acc_t factor = t.factor(edge, f);
    acc_t part[VEC];
    parts_of(part, grad, mark, COUNTS ? 0 : (int)__ldg(t.place + edge), best, x, factor, unusual);
#pragma unroll
    for (int v = 0; v < VEC; v++)
      if (COUNTS || strict || mark[v] < 0) sum[v] += WEIGHTED ? factor * part[v] : part[v];
  }
}

#if COUNTS
// The shares of the features in which x attains the result, zero in others.
DEVICE void shares_of(acc_t (&part)[VEC], const Packed& x, const Packed& best, const Packed& share,
                      acc_t factor) {
#if PAIRS && VEC % 2 == 0
  unsigned values[VEC / 2], results[VEC / 2], parts[VEC / 2];
  memcpy(values, &x, sizeof(x)), memcpy(results, &best, sizeof(x));
  memcpy(parts, &share, sizeof(x));
#pragma unroll
  for (int w = 0; w < VEC / 2; w++) {
    unsigned equal = equal_pair(values[w], results[w]);
    if (TIES != EVEN)  // two NaN are equal
      equal |= ~(equal_pair(values[w], values[w]) | equal_pair(results[w], results[w]));
    parts[w] &= equal;
  }
  Packed packed;
  memcpy(&packed, parts, sizeof(x));
  unpack(packed, part);
#else
  acc_t values[VEC], results[VEC];
  unpack(x, values);
  unpack(best, results);
  unpack(share, part);
#pragma unroll
  for (int v = 0; v < VEC; v++)
    if (!attains(WEIGHTED ? widen(narrow(values[v] * factor)) : values[v], results[v])) part[v] = 0;
#endif
}

template <bool FULL>
DEVICE void add_batch(acc_t (&sum)[NV][VEC], const Targets& t, const Packed (&x)[NV], long long k,
                      long long end, int f0) {
  index_t target[BATCH];
  Packed best[BATCH][NV], share[BATCH][NV];
#pragma unroll
  for (int u = 0; u < BATCH; u++) target[u] = FULL || k + u < end ? __ldg(t.idx + k + u) : -1;
#pragma unroll
  for (int u = 0; u < BATCH; u++)
#pragma unroll
    for (int n = 0; n < NV; n++) {
      const int f = f0 + n * LANES * VEC;
      const bool inside = (FILLED || f < t.width) && (FULL || target[u] >= 0);
      const scalar_t* results = in_row(t.best, target[u], t.width, f);
      const scalar_t* shares = in_row(t.share, target[u], t.width, f);
      best[u][n] = inside ? load_packed(results) : zero_packed();
      share[u][n] = inside ? load_packed(shares) : zero_packed();
    }
#pragma unroll
  for (int u = 0; u < BATCH; u++)
#pragma unroll
    for (int n = 0; n < NV; n++) {
      const int f = f0 + n * LANES * VEC;
      const bool inside = (FILLED || f < t.width) && (FULL || target[u] >= 0);
      const acc_t factor = inside ? t.factor(k + u, f) : 0;
      acc_t part[VEC];
      shares_of(part, x[n], best[u][n], share[u][n], factor);
#pragma unroll
      for (int v = 0; v < VEC; v++) sum[n][v] += WEIGHTED ? factor * part[v] : part[v];
    }
}
#else
template <bool FULL>
DEVICE void add_batch(acc_t (&sum)[NV][VEC], const Targets& t, long long row, long long k,
                      long long end, int f0, bool* unusual) {
  index_t target[BATCH];
  Marks<VEC> marks[BATCH][NV];
  int place[BATCH];
  Packed grad[BATCH][NV];
#if WEIGHTED
  acc_t factor[BATCH][NV];
#endif
#pragma unroll
  for (int u = 0; u < BATCH; u++) {
    target[u] = FULL || k + u < end ? __ldg(t.idx + k + u) : -1;
    place[u] = FULL || k + u < end ? (int)__ldg(t.place + k + u) : -1;
  }
#pragma unroll
  for (int u = 0; u < BATCH; u++)
#pragma unroll
    for (int n = 0; n < NV; n++) {
      const int f = f0 + n * LANES * VEC;
      const bool inside = (FILLED || f < t.width) && (FULL || target[u] >= 0);
      const place_t* mark = in_row(t.mark, target[u], t.width, f);
      const scalar_t* at = in_row(t.grad, target[u], t.width, f);
      marks[u][n].clear();
      if (inside) marks[u][n].load(mark);
      grad[u][n] = inside ? load_packed(at) : zero_packed();
#if WEIGHTED
      factor[u][n] = inside ? t.factor(k + u, f) : 0;
#endif
    }
  unsigned again[NV] = {};  // a bit for each edge that ties in some feature
#pragma unroll
  for (int u = 0; u < BATCH; u++)
#pragma unroll
    for (int n = 0; n < NV; n++) {
      acc_t value[VEC];
      unpack(grad[u][n], value);
#pragma unroll
      for (int v = 0; v < VEC; v++) {
#if WEIGHTED
        // Stock multiplies the zeros of other edges by the weight too: it may not be finite.
        sum[n][v] += factor[u][n] * (marks[u][n].is(v, place[u]) ? value[v] : 0);
#else
        if (marks[u][n].is(v, place[u])) sum[n][v] += value[v];
#endif
      }
      if (TIES != FIRST) again[n] |= (unsigned)marks[u][n].any_shared() << u;
    }
#if TIES != FIRST
#pragma unroll
  for (int n = 0; n < NV; n++)
    if (again[n]) add_some(sum[n], t, row, k, again[n], f0 + n * LANES * VEC, false, unusual);
#endif
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    reduce_gather(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                  const long long* __restrict__ tiles, const index_t* __restrict__ place,
                  const scalar_t* __restrict__ x, const scalar_t* __restrict__ weight,
                  const place_t* __restrict__ mark, const scalar_t* __restrict__ grad,
                  const scalar_t* __restrict__ best, const scalar_t* __restrict__ share,
                  scalar_t* __restrict__ dx, acc_t* __restrict__ partial, int* unusual,
                  long long num_rows, long long num_tiles, long long split, int width, int heads,
                  int strict) {
#if COUNTS
  strict = TIES == EVEN && *unusual;
#else
  if (strict && !*unusual) return;
#endif
  const Targets targets = {idx, place, x, weight, grad, best, share, mark,
                           width, heads, width / heads};
  const int f0 = (blockIdx.y * NV * LANES + threadIdx.x % LANES) * VEC;
  const long long groups = (long long)gridDim.x * (THREADS / LANES);
  bool found = false;
  for (long long item = group_of_launch(); item < num_rows + num_tiles; item += groups) {
    Item it;
    if (!find_item(it, item, rowptr, tiles, num_rows, num_tiles, split)) continue;
    acc_t sum[NV][VEC] = {};
    long long k = it.begin;
#if COUNTS
    Packed row[NV];
#pragma unroll
    for (int n = 0; n < NV; n++) {
      const int f = f0 + n * LANES * VEC;
      row[n] = FILLED || f < width ? load_packed(x + it.row * width + f) : zero_packed();
    }
    for (; !strict && k + BATCH <= it.end; k += BATCH)
      add_batch<true>(sum, targets, row, k, it.end, f0);
    if (!strict && k < it.end) add_batch<false>(sum, targets, row, k, it.end, f0);
#else
    for (; !strict && k + BATCH <= it.end; k += BATCH)
      add_batch<true>(sum, targets, it.row, k, it.end, f0, &found);
    if (!strict && k < it.end) add_batch<false>(sum, targets, it.row, k, it.end, f0, &found);
#endif
#pragma unroll
    for (int n = 0; n < NV; n++) {
      const int f = f0 + n * LANES * VEC;
      if (!FILLED && f >= width) continue;
      for (k = it.begin; strict && k < it.end; k++)
        add_some(sum[n], targets, it.row, k, 1, f, true, &found);
#if !COUNTS
#pragma unroll
      for (int v = 0; v < VEC; v++) found |= !is_finite(sum[n][v]);
#endif
      if (it.part >= 0)
        store_words(partial + it.part * width + f, sum[n]);
      else
        store(dx + it.row * width + f, sum[n]);
    }
  }
  if (TIES == EVEN && found && !strict) *unusual = 1;
}

// The share of each edge that has one, of all results.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    reduce_share(const scalar_t* __restrict__ grad, const place_t* __restrict__ mark,
                 scalar_t* __restrict__ share, int* unusual, long long count) {
  const long long at = ((long long)blockIdx.x * THREADS + threadIdx.x) * VEC;
  if (at >= count) return;
  acc_t values[VEC];
  place_t marks[VEC];
  load(grad + at, values);
  load_words(mark + at, marks);
  bool found = false;
#pragma unroll
  for (int v = 0; v < VEC; v++) {
    values[v] = share_of(values[v], marks[v]);
    found |= !is_finite(values[v]);
  }
  store(share + at, values);
  if (TIES == EVEN && found) *unusual = 1;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    reduce_weight(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                  const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                  const scalar_t* __restrict__ x, const scalar_t* __restrict__ weight,
                  const place_t* __restrict__ mark, const scalar_t* __restrict__ grad,
                  const scalar_t* __restrict__ best, acc_t* __restrict__ dw, long long num_rows,
                  long long num_tiles, long long split, int channels, int heads) {
  Item it;
  if (!find_item(it, group_of_launch(), rowptr, tiles, num_rows, num_tiles, split)) return;
  const int lane = threadIdx.x % LANES, head = blockIdx.y;
  const unsigned group = group_mask();
  const long long stride = (long long)heads * channels, origin = rowptr[it.row];
  bool unusual = false;
  for (int first = 0; first < channels; first += NV * LANES * VEC) {
    place_t marks[NV][VEC];
    Packed grads[NV], results[NV];
#pragma unroll
    for (int n = 0; n < NV; n++) {
      const int c = first + (n * LANES + lane) * VEC;
      if (c >= channels) continue;
      const long long at = it.row * stride + head * channels + c;
      load_words(mark + at, marks[n]);
      grads[n] = load_packed(grad + at);
      results[n] = TIES == FIRST ? zero_packed() : load_packed(best + at);
    }
    for (long long k = it.begin; k < it.end; k++) {
      const long long source = __ldg(idx + k), edge = perm ? __ldg(perm + k) : k;
      const acc_t factor = weight_of(weight, k, head * channels, heads, channels);
      acc_t dot = 0;
#pragma unroll
      for (int n = 0; n < NV; n++) {
        const int c = first + (n * LANES + lane) * VEC;
        if (c >= channels) continue;
        const Packed row = load_packed(x + source * stride + head * channels + c);
        acc_t part[VEC], values[VEC];
        parts_of(part, grads[n], marks[n], (int)(k - origin), results[n], row, factor, &unusual);
        unpack(row, values);
#pragma unroll
        for (int v = 0; v < VEC; v++) dot += part[v] * values[v];
      }
#pragma unroll
      for (int offset = LANES / 2; offset > 0; offset /= 2)
        dot += __shfl_xor_sync(group, dot, offset);
      if (lane == 0) dw[edge * heads + head] = first ? dw[edge * heads + head] + dot : dot;
    }
  }
}
