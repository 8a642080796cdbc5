// reduce_shares, reduce_gather, reduce_gather_bits, reduce_weight — gradients of reduce.
// Maths     dx[j] = sum of weight * d_k over the edges k from j,  dw[perm[k], h] = sum_c x[j] * d_k,
//           d_k the share of edge k in grad[i]: see common/shares.cuh
// Shapes    x, dx [S, width]  grad, share [N, width]  arg [N, width] (int)  weight, dw [E, heads]
//           hits [E, words] (unsigned)  counts [T, width] (int)  partial [T', width] (acc_t)
// Mapping   shares: a warp a row or tile, WORDS features a lane; gather and weight: as spmm and
//           sddmm; gather_bits: a thread a row or tile by source, and 32 features
// Traffic   shares: arg, grad, share and hits once, x only where edges tie. gather: E times 4 * words
//           bytes of hits, of share the sectors that hold a hit, about N * width numbers. weight: as
//           sddmm
// Numerics  acc_t sums in edge order, tiles merged in order (by spmm_merge); no float atomics
#include "common/message.cuh"
#include "common/rows.cuh"
#include "common/shares.cuh"
#include "common/vec.cuh"

#if defined(SHARES)
#define EDGES 128

// PASS 0: whole rows, but those in which edges tie (none do under "first"). 1: counts of tiles.
// 2: hits of tiles, from the counts of their rows. 3: whole rows in which edges tie.
#define TYING (TIES != FIRST && PASS != 0)

extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_shares(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                  const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                  const scalar_t* __restrict__ x, const scalar_t* __restrict__ weight,
                  const scalar_t* __restrict__ grad, const int* __restrict__ arg,
                  const unsigned char* __restrict__ tied, scalar_t* __restrict__ share,
                  unsigned* __restrict__ hits, int* __restrict__ counts, long long num_rows,
                  long long num_tiles, long long split, int width, int heads, int first,
                  int words) {
  const long long group = group_of_launch();
  Item it;
#if PASS == 0 || PASS == 3
  if (!find_item(it, group, rowptr, tiles, num_rows, 0, split)) return;
  if (TIES != FIRST && __ldg(tied + it.row) != (PASS == 3)) return;
#else
  if (group >= num_tiles) return;
  find_item(it, group, rowptr, tiles, num_rows, num_tiles, split);
#endif
  const int lane = threadIdx.x % 32, w0 = blockIdx.y * WORDS;
  const Edges edges = {idx, perm, x, weight, width, heads, width / heads};
  const long long origin = it.part < 0 ? it.begin : rowptr[it.row];
  int place[WORDS];
  unsigned shared = 0, all = 0;  // a bit for each word: edges tie; all edges have a hit
  scalar_t given[WORDS];         // of grad
#if TYING
  acc_t best[WORDS];
#endif
#pragma unroll
  for (int w = 0; w < WORDS; w++) {
    const int f = first + 32 * (w0 + w) + lane;
    const bool inside = f < width && w0 + w < words;
    place[w] = inside ? __ldg(arg + it.row * width + f) : 0x7fffffff;
    given[w] = TIES != FIRST && PASS != 1 && inside ? __ldg(grad + it.row * width + f) : 0;
  }
#pragma unroll
  for (int w = 0; w < WORDS; w++) {
    const int f = first + 32 * (w0 + w) + lane;
    const long long at = it.row * width + f;
    const bool inside = f < width && w0 + w < words;
    const bool ties = TYING && place[w] < 0;
    place[w] = place[w] < 0 ? ~place[w] : place[w];
    shared |= (unsigned)ties << w;
    int count = 0;
#if TYING
    best[w] = ties ? message(edges, origin + place[w], f) : 0;
    if (ties) {
#if PASS == 2
      // Each tile sums the counts of its row again: few rows are split.
      long long t = it.part;
      while (tiles[4 * t + 3] == 0) t--;
      for (long long p = t; p < t + tiles[4 * t + 3]; p++) count += counts[p * width + f];
#else
#pragma unroll 2
      for (long long k = it.begin; k < it.end; k++)
        count += attains(message(edges, k, f), best[w]);
#endif
    }
#if PASS == 1
    if (inside) counts[it.part * width + f] = count;
#else
    if (ties) given[w] = narrow(widen(given[w]) / (acc_t)(count + (TIES == EVEN && best[w] == 0)));
#endif
#endif
#if TIES != FIRST && PASS != 1
    all |= (unsigned)(TIES == EVEN && inside && !is_finite(widen(given[w]))) << w;
    if (inside && it.begin == origin) share[at] = given[w];
#endif
  }
#if PASS != 1
#if PASS == 0
  // Of short rows, a ballot for each word: the word of edge u and group w goes to lane u * WORDS + w.
  if (it.end - it.begin <= 32 / WORDS) {
    const int n = (int)(it.end - it.begin);
    unsigned mine = 0;
    for (int u = 0; u < n; u++)
#pragma unroll
      for (int w = 0; w < WORDS; w++) {
        const unsigned word = __ballot_sync(0xffffffffu, place[w] == u || all >> w & 1);
        if (lane == u * WORDS + w) mine = word;
      }
    const int u = lane / WORDS, w = w0 + lane % WORDS;
    if (u < n && w < words) hits[(origin + u) * words + w] = mine;
    return;
  }
#endif
  // Else they are gathered in shared memory, from where they go out in whole lines.
  __shared__ unsigned bits[THREADS / 32][WORDS * EDGES];
  unsigned* own = bits[threadIdx.x / 32];
  for (long long k0 = it.begin; k0 < it.end; k0 += EDGES) {
    const int n = (int)min((long long)EDGES, it.end - k0);
    for (int u = lane; u < n * WORDS; u += 32) own[u] = 0;
    __syncwarp();
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      if ((shared | all) >> w & 1) {
        for (int u = 0; u < n; u++) {
          bool hit = all >> w & 1;
#if TYING
          hit |= attains(message(edges, k0 + u, first + 32 * (w0 + w) + lane), best[w]);
#endif
          if (hit) atomicOr(own + u * WORDS + w, 1u << lane);
        }
      } else {
        const long long u = origin + place[w] - k0;
        if (u >= 0 && u < n) atomicOr(own + u * WORDS + w, 1u << lane);
      }
    }
    __syncwarp();
    for (int u = lane; u < n * WORDS; u += 32)
      if (w0 + u % WORDS < words) hits[(k0 + u / WORDS) * words + w0 + u % WORDS] = own[u];
    __syncwarp();
  }
#endif
}
#else

// The share of the edge at `place` of row i in feature f, which has a hit.
DEVICE acc_t part_of(acc_t own, const Edges& e, const index_t* rowptr, const int* arg, long long i,
                     long long k, int f) {
  if (TIES != EVEN || is_finite(own)) return own;
  const int place = arg[i * e.width + f];
  const acc_t best = message(e, rowptr[i] + (place < 0 ? ~place : place), f);
  return (attains(message(e, k, f), best) ? 1 : 0) * own;
}

// The sum for one feature where a share is not finite: edge by edge, asking who attains the result.
static __device__ __noinline__ acc_t exact_sum(const Edges& e, const index_t* rowptr,
                                               const int* arg, const scalar_t* share,
                                               const unsigned* hits, const index_t* idx,
                                               const index_t* perm, long long begin,
                                               long long end, int f, int bit, int words) {
  acc_t sum = 0;
  for (long long k = begin; k < end; k++) {
    const long long i = idx[k], place = perm ? perm[k] : k;
    acc_t part = 0;
    if (hits[place * words + bit / 32] >> bit % 32 & 1)
      part = part_of(widen(share[i * e.width + f]), e, rowptr, arg, i, place, f);
#if WEIGHTED
    const long long edge = e.perm ? e.perm[place] : place;
    part *= widen(e.weight[edge * e.heads + f / e.channels]);
#endif
    sum += part;
  }
  return sum;
}

#define BATCH 4

// Of the rows by source: rowptr, idx, perm (positions in the rows by target), tiles.
extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_gather(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                  const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                  const index_t* __restrict__ to_rowptr, const index_t* __restrict__ to_idx,
                  const index_t* __restrict__ to_perm, const scalar_t* __restrict__ x,
                  const scalar_t* __restrict__ weight, const int* __restrict__ arg,
                  const scalar_t* __restrict__ share, const unsigned* __restrict__ hits,
                  scalar_t* __restrict__ dx, acc_t* __restrict__ partial, long long num_rows,
                  long long num_tiles, long long split, int width, int heads, int first,
                  int words) {
  Item it;
  if (!find_item(it, group_of_launch(), rowptr, tiles, num_rows, num_tiles, split)) return;
  const int f0 = first + (blockIdx.y * NV * LANES + threadIdx.x % LANES) * VEC;
  const int stop = min(width, first + 32 * words);
  const Edges edges = {to_idx, to_perm, x, weight, width, heads, width / heads};
  acc_t sum[NV][VEC] = {};
  for (long long k = it.begin; k < it.end; k += BATCH) {
    long long target[BATCH], place[BATCH];
    unsigned bits[BATCH][NV];
    Packed row[BATCH][NV];
#pragma unroll
    for (int u = 0; u < BATCH; u++) {
      const bool inside = k + u < it.end;
      target[u] = inside ? __ldg(idx + k + u) : -1;
      place[u] = inside && perm ? __ldg(perm + k + u) : k + u;
    }
#pragma unroll
    for (int u = 0; u < BATCH; u++)
#pragma unroll
      for (int n = 0; n < NV; n++) {
        const int f = f0 + n * LANES * VEC, bit = f - first;
        bits[u][n] = 0;
        if (f < stop && target[u] >= 0)
          bits[u][n] = __ldg(hits + place[u] * words + bit / 32) >> bit % 32 & ((1u << VEC) - 1);
      }
#pragma unroll
    for (int u = 0; u < BATCH; u++)
#pragma unroll
      for (int n = 0; n < NV; n++) {
        const int f = f0 + n * LANES * VEC;
        row[u][n] = bits[u][n] ? load_packed(share + target[u] * width + f) : zero_packed();
      }
#pragma unroll
    for (int u = 0; u < BATCH; u++)
#pragma unroll
      for (int n = 0; n < NV; n++) {
        const int f = f0 + n * LANES * VEC;
        acc_t factor = 1;
#if WEIGHTED
        // Stock multiplies the zeros of the other edges by the weight too: it may not be finite.
        if (f >= stop || target[u] < 0) continue;
        const long long edge = to_perm ? __ldg(to_perm + place[u]) : place[u];
        factor = widen(__ldg(weight + edge * heads + f / edges.channels));
#else
        if (!bits[u][n]) continue;
#endif
        acc_t value[VEC];
        unpack(row[u][n], value);
#pragma unroll
        for (int v = 0; v < VEC; v++)
          sum[n][v] += factor * (bits[u][n] >> v & 1 ? value[v] : 0);
      }
  }
#pragma unroll
  for (int n = 0; n < NV; n++) {
    const int f = f0 + n * LANES * VEC;
    if (f >= stop) continue;
#pragma unroll
    for (int v = 0; v < VEC; v++)
      if (TIES == EVEN && !is_finite(sum[n][v]))
        sum[n][v] = exact_sum(edges, to_rowptr, arg, share, hits, idx, perm, it.begin, it.end,
                              f + v, f + v - first, words);
    if (it.part >= 0)
      store_words(partial + it.part * width + f, sum[n]);
    else
      store(dx + it.row * width + f, sum[n]);
  }
}

// The same, a thread a row or tile and word of hits, which it takes bit by bit: for rows by target
// that are long, so that few features of an edge have a hit.
extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_gather_bits(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                   const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                   const index_t* __restrict__ to_rowptr, const index_t* __restrict__ to_idx,
                   const index_t* __restrict__ to_perm, const scalar_t* __restrict__ x,
                   const scalar_t* __restrict__ weight, const int* __restrict__ arg,
                   const scalar_t* __restrict__ share, const unsigned* __restrict__ hits,
                   scalar_t* __restrict__ dx, acc_t* __restrict__ partial, long long num_rows,
                   long long num_tiles, long long split, int width, int heads, int first,
                   int words) {
  __shared__ acc_t sums[32 * (THREADS + 1)];  // feature by feature, so that banks differ
  const long long thread = (long long)blockIdx.x * THREADS + threadIdx.x;
  const int w = (int)(thread % words), f0 = first + 32 * w, lane = threadIdx.x % 32;
  const Edges edges = {to_idx, to_perm, x, weight, width, heads, width / heads};
  Item it;
  const bool works =
      find_item(it, thread / words, rowptr, tiles, num_rows, num_tiles, split);
  acc_t* own = sums + threadIdx.x;
#pragma unroll
  for (int b = 0; b < 32; b++) own[b * (THREADS + 1)] = 0;
  for (long long k = it.begin; works && k < it.end; k += 4) {
    long long target[4];
    unsigned bits[4];
#pragma unroll
    for (int u = 0; u < 4; u++) {
      const bool in_row = k + u < it.end;
      target[u] = in_row ? __ldg(idx + k + u) : 0;
      const long long place = in_row && perm ? __ldg(perm + k + u) : k + u;
      bits[u] = in_row ? __ldg(hits + place * words + w) : 0;
    }
#pragma unroll
    for (int u = 0; u < 4; u++)
      while (bits[u]) {
        const int b = __ffs(bits[u]) - 1;
        bits[u] &= bits[u] - 1;
        own[b * (THREADS + 1)] += widen(__ldg(share + target[u] * width + f0 + b));
      }
  }
  if (TIES == EVEN && works)
    for (int b = 0; b < 32 && f0 + b < width; b++)
      if (!is_finite(own[b * (THREADS + 1)]))
        own[b * (THREADS + 1)] = exact_sum(edges, to_rowptr, arg, share, hits, idx, perm, it.begin,
                                           it.end, f0 + b, 32 * w + b, words);
  __syncwarp();
  // The warp writes one thread's features after another's.
  const unsigned busy = __ballot_sync(0xffffffffu, works);
  for (int t = 0; t < 32; t++) {
    const long long row = __shfl_sync(0xffffffffu, it.row, t);
    const long long part = __shfl_sync(0xffffffffu, it.part, t);
    const int f = __shfl_sync(0xffffffffu, f0, t) + lane;
    if (!(busy >> t & 1) || f >= width) continue;
    const acc_t sum = sums[lane * (THREADS + 1) + threadIdx.x - lane + t];
    if (part >= 0)
      partial[part * width + f] = sum;
    else
      dx[row * width + f] = narrow(sum);
  }
}

// A group of LANES lanes a row or tile by target, and head (blockIdx.y).
extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_weight(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                  const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                  const scalar_t* __restrict__ x, const scalar_t* __restrict__ weight,
                  const int* __restrict__ arg, const scalar_t* __restrict__ share,
                  const unsigned* __restrict__ hits, acc_t* __restrict__ dw, long long num_rows,
                  long long num_tiles, long long split, int width, int heads, int first,
                  int words) {
  Item it;
  if (!find_item(it, group_of_launch(), rowptr, tiles, num_rows, num_tiles, split)) return;
  const int lane = threadIdx.x % LANES, head = blockIdx.y, channels = width / heads;
  const unsigned group = group_mask();
  const Edges edges = {idx, perm, x, weight, width, heads, channels};
  const int start = max(first, head * channels);
  const int stop = min((head + 1) * channels, min(width, first + 32 * words));
  for (long long k = it.begin; k < it.end; k++) {
    const long long source = __ldg(idx + k), edge = perm ? __ldg(perm + k) : k;
    acc_t dot = 0;
    for (int f = start + lane; f < stop; f += LANES) {
      const int bit = f - first;
      const bool hit = __ldg(hits + k * words + bit / 32) >> bit % 32 & 1;
      acc_t part = 0;
      if (hit) part = part_of(widen(share[it.row * width + f]), edges, rowptr, arg, it.row, k, f);
      dot += part * widen(__ldg(x + source * width + f));
    }
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2)
      dot += __shfl_xor_sync(group, dot, offset);
    if (lane == 0) dw[edge * heads + head] += dot;
  }
}
#endif
