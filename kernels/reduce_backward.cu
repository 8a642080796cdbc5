// reduce_gather, reduce_gather_bits, reduce_weight — gradients of reduce.
// Maths     dx[j] = sum of weight * d_k over the edges k from j,  dw[perm[k], h] = sum_c x[j] * d_k,
//           d_k the share of edge k in grad[i]: see common/shares.cuh and reduce_hits.cu
// Shapes    x, dx [S, width]  grad, share [N, width]  arg [N, width] (place_t)  tied [N] (bytes)
//           weight, dw [E, heads]  hits [E, words] (unsigned)  partial [T', width] (acc_t)
// Mapping   gather and weight: as spmm and sddmm; gather_bits: a warp a row or tile by source
// Traffic   gather: E times 4 * words bytes of hits, of shares the sectors that hold a hit, about
//           N * width numbers. weight: as sddmm
// Numerics  acc_t sums in edge order, tiles merged in order (by spmm_merge); no float atomics
// Limits    VEC divides width, and width / heads where heads > 1
#include "common/message.cuh"
#include "common/rows.cuh"
#include "common/shares.cuh"
#include "common/vec.cuh"

// The share of the edge at `place` of row i in feature f, which has a hit.
DEVICE acc_t part_of(acc_t own, const Edges& e, const index_t* rowptr, const place_t* arg, long long i,
                     long long k, int f) {
  if (TIES != EVEN || is_finite(own)) return own;
  const int place = arg[i * e.width + f];
  const acc_t best = message(e, rowptr[i] + (place < 0 ? ~place : place), f);
  return (attains(message(e, k, f), best) ? 1 : 0) * own;
}

// The sum for one feature where a share is not finite: edge by edge, asking who attains the result.
static __device__ __noinline__ acc_t exact_sum(const Edges& e, const index_t* rowptr,
                                               const place_t* arg, const Shares& shares,
                                               const unsigned* hits, const index_t* idx,
                                               const index_t* perm, long long begin,
                                               long long end, int f, int bit, int words) {
  acc_t sum = 0;
  for (long long k = begin; k < end; k++) {
    const long long i = idx[k], place = perm ? perm[k] : k;
    acc_t part = 0;
    if (hits[place * words + bit / 32] >> bit % 32 & 1)
      part = part_of(widen(shares.of(i, e.width)[f]), e, rowptr, arg, i, place, f);
#if WEIGHTED
    const long long edge = e.perm ? e.perm[place] : place;
    part *= widen(e.weight[edge * e.heads + f / e.channels]);
#endif
    sum += part;
  }
  return sum;
}

#ifndef BATCH
#define BATCH 1  // of kernels that take no edges
#endif
#define AT_ONCE 4  // shares that a lane of reduce_gather_bits asks for before it uses them
#ifndef WORDS
#define WORDS 1
#endif

// Edges whose shares are asked for before any is used, and that fit in the lanes of a group.
#define TAKEN (BATCH < LANES ? BATCH : LANES)

// Of the rows by source: rowptr, idx, perm (positions in the rows by target), tiles.
extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_gather(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                  const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                  const index_t* __restrict__ to_rowptr, const index_t* __restrict__ to_idx,
                  const index_t* __restrict__ to_perm, const scalar_t* __restrict__ x,
                  const scalar_t* __restrict__ weight, const place_t* __restrict__ arg,
                  const scalar_t* __restrict__ grad, const unsigned char* __restrict__ tied,
                  const scalar_t* __restrict__ share, const unsigned* __restrict__ hits,
                  scalar_t* __restrict__ dx, acc_t* __restrict__ partial, long long num_rows,
                  long long num_tiles, long long split, int width, int heads, int first,
                  int words) {
  Item it;
  if (!find_item(it, group_of_launch(), rowptr, tiles, num_rows, num_tiles, split)) return;
  const unsigned group = group_mask();
  const Shares shares = {grad, share, tied};
  const int lane = threadIdx.x % LANES, f0 = first + (blockIdx.y * NV * LANES + lane) * VEC;
  const int stop = min(width, first + 32 * words);
  const Edges edges = {to_idx, to_perm, x, weight, width, heads, width / heads};
  acc_t sum[NV][VEC] = {};
  for (long long k0 = it.begin; k0 < it.end; k0 += LANES) {
    // Each lane reads the ends of one edge.
    const bool inside = k0 + lane < it.end;
    const index_t own_target = inside ? __ldg(idx + k0 + lane) : -1;
    const index_t own_place = inside && perm ? __ldg(perm + k0 + lane) : (index_t)(k0 + lane);
    const int count = (int)min((long long)LANES, it.end - k0);
    for (int b = 0; b < count; b += TAKEN) {
      index_t target[TAKEN], place[TAKEN];
      const scalar_t* from[TAKEN];
      unsigned bits[TAKEN][NV];
      Packed row[TAKEN][NV];
#pragma unroll
      for (int u = 0; u < TAKEN; u++) {
        target[u] = __shfl_sync(group, own_target, b + u, LANES);
        place[u] = __shfl_sync(group, own_place, b + u, LANES);
      }
#pragma unroll
      for (int u = 0; u < TAKEN; u++) {
        from[u] = shares.of(target[u] < 0 ? 0 : target[u], width);
#pragma unroll
        for (int n = 0; n < NV; n++) {
          const int f = f0 + n * LANES * VEC, bit = f - first;
          bits[u][n] = 0;
          if (f < stop && target[u] >= 0)
            bits[u][n] = __ldg(hits + (long long)place[u] * words + bit / 32) >> bit % 32 &
                         ((1u << VEC) - 1);
        }
      }
#pragma unroll
      for (int u = 0; u < TAKEN; u++)
#pragma unroll
        for (int n = 0; n < NV; n++)
          row[u][n] =
              bits[u][n] ? load_packed(from[u] + f0 + n * LANES * VEC) : zero_packed();
#pragma unroll
      for (int u = 0; u < TAKEN; u++)
#pragma unroll
        for (int n = 0; n < NV; n++) {
          acc_t factor = 1;
#if WEIGHTED
          // Stock multiplies the zeros of the other edges by the weight too: it may not be finite.
          const int f = f0 + n * LANES * VEC;
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
  }
#pragma unroll
  for (int n = 0; n < NV; n++) {
    const int f = f0 + n * LANES * VEC;
    if (f >= stop) continue;
#pragma unroll
    for (int v = 0; v < VEC; v++)
      if (TIES == EVEN && !is_finite(sum[n][v]))
        sum[n][v] = exact_sum(edges, to_rowptr, arg, shares, hits, idx, perm, it.begin, it.end,
                              f + v, f + v - first, words);
    if (it.part >= 0)
      store_words(partial + it.part * width + f, sum[n]);
    else
      store(dx + it.row * width + f, sum[n]);
  }
}

// The same for rows by target that are long, so that few features of an edge have a hit: a warp's
// lanes stand for edges while hits are read, and for features while shares are summed.
extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_gather_bits(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                       const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                       const index_t* __restrict__ to_rowptr, const index_t* __restrict__ to_idx,
                       const index_t* __restrict__ to_perm, const scalar_t* __restrict__ x,
                       const scalar_t* __restrict__ weight, const place_t* __restrict__ arg,
                       const scalar_t* __restrict__ grad, const unsigned char* __restrict__ tied,
                       const scalar_t* __restrict__ share, const unsigned* __restrict__ hits,
                       scalar_t* __restrict__ dx, acc_t* __restrict__ partial, long long num_rows,
                       long long num_tiles, long long split, int width, int heads, int first,
                       int words) {
  Item it;
  if (!find_item(it, group_of_launch(), rowptr, tiles, num_rows, num_tiles, split)) return;
  const Shares shares = {grad, share, tied};
  const Edges edges = {to_idx, to_perm, x, weight, width, heads, width / heads};
  const int lane = threadIdx.x % 32, w0 = blockIdx.y * WORDS;
  acc_t sum[WORDS] = {};
  for (long long k = it.begin; k < it.end; k += 32) {
    const bool inside = k + lane < it.end;
    const index_t target = inside ? __ldg(idx + k + lane) : 0;
    const long long place = inside && perm ? __ldg(perm + k + lane) : k + lane;
    Bits<4 * WORDS>::type read = {};
    if (inside) read = __ldg((const Bits<4 * WORDS>::type*)(hits + place * words + w0));
    unsigned bits[WORDS];
    memcpy(bits, &read, sizeof(bits));
    const unsigned ties =
        __ballot_sync(0xffffffffu, TIES != FIRST && inside && __ldg(tied + target));
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      const int f = first + 32 * (w0 + w) + lane;
      unsigned left = __ballot_sync(0xffffffffu, bits[w] != 0);  // edges
      while (left) {
        scalar_t value[AT_ONCE];
#pragma unroll
        for (int b = 0; b < AT_ONCE; b++) {
          const int u = left ? __ffs(left) - 1 : 0;
          const unsigned word = __shfl_sync(0xffffffffu, bits[w], u);
          const long long row = __shfl_sync(0xffffffffu, target, u);
          const scalar_t* from = ties >> u & 1 ? share : grad;
          value[b] = left && word >> lane & 1 ? __ldg(from + row * width + f) : 0;
          left &= left - 1;
        }
#pragma unroll
        for (int b = 0; b < AT_ONCE; b++) sum[w] += widen(value[b]);
      }
    }
  }
#pragma unroll
  for (int w = 0; w < WORDS; w++) {
    const int f = first + 32 * (w0 + w) + lane;
    if (f >= width) continue;
    if (TIES == EVEN && !is_finite(sum[w]))
      sum[w] = exact_sum(edges, to_rowptr, arg, shares, hits, idx, perm, it.begin, it.end, f,
                         f - first, words);
    if (it.part >= 0)
      partial[it.part * width + f] = sum[w];
    else
      dx[it.row * width + f] = narrow(sum[w]);
  }
}

// A group of LANES lanes a row or tile by target, and head (blockIdx.y).
extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_weight(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                  const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                  const scalar_t* __restrict__ x, const scalar_t* __restrict__ weight,
                  const place_t* __restrict__ arg, const scalar_t* __restrict__ grad,
                  const unsigned char* __restrict__ tied, const scalar_t* __restrict__ share,
                  const unsigned* __restrict__ hits, acc_t* __restrict__ dw, long long num_rows,
                  long long num_tiles, long long split, int width, int heads, int first,
                  int words) {
  Item it;
  if (!find_item(it, group_of_launch(), rowptr, tiles, num_rows, num_tiles, split)) return;
  const int lane = threadIdx.x % LANES, head = blockIdx.y, channels = width / heads;
  const unsigned group = group_mask();
  const Edges edges = {idx, perm, x, weight, width, heads, channels};
  const Shares shares = {grad, share, tied};
  const scalar_t* own = shares.of(it.row, width);
  const int start = max(first, head * channels);
  const int stop = min((head + 1) * channels, min(width, first + 32 * words));
  for (long long k = it.begin; k < it.end; k++) {
    const long long source = __ldg(idx + k), edge = perm ? __ldg(perm + k) : k;
    acc_t dot = 0;
    for (int f = start + lane; f < stop; f += LANES) {
      const int bit = f - first;
      const bool hit = __ldg(hits + k * words + bit / 32) >> bit % 32 & 1;
      acc_t part = 0;
      if (hit) part = part_of(widen(own[f]), edges, rowptr, arg, it.row, k, f);
      dot += part * widen(__ldg(x + source * width + f));
    }
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2)
      dot += __shfl_xor_sync(group, dot, offset);
    if (lane == 0) dw[edge * heads + head] += dot;
  }
}
