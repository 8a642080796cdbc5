// reduce_ties, reduce_ties_merge — who shares the gradient of reduce where edges tie, and in what.
// Maths     hits and share of common/shares.cuh
// Shapes    x [S, width]  grad, share [N, width]  arg [N, width] (place_t)  tied [N] (bytes)
//           weight [E, heads]  hits [E, words] (unsigned)  counts [T, width] (int)
// Mapping   as reduce.cu; merge: a warp for each first tile
// Traffic   gathers the rows of x of the edges of tied rows
// Numerics  exact
// Limits    VEC divides width, and width / heads where heads > 1
#include "common/message.cuh"
#include "common/rows.cuh"
#include "common/shares.cuh"
#include "common/vec.cuh"

#define BATCH 4
#define WORD_LANES (LANES * VEC < 32 ? LANES : 32 / VEC)  // that share a word

// A lane's part of the words of one edge, or of all.
struct Bits32 {
  unsigned bits[NV];

  // Combines the parts of lanes that share a word; the first of them has it.
  DEVICE_MEMBER void combine(unsigned group) {
    const int sub = threadIdx.x % WORD_LANES;
#pragma unroll
    for (int n = 0; n < NV; n++) {
      bits[n] <<= sub * VEC;
#pragma unroll
      for (int offset = WORD_LANES / 2; offset > 0; offset /= 2)
        bits[n] |= __shfl_xor_sync(group, bits[n], offset);
    }
  }
};

// The share that each of `count` edges gets.
DEVICE acc_t share_of(acc_t grad, int count, acc_t best) {
  return grad / (acc_t)(count + (TIES == EVEN && best == 0));
}

// The lane's messages of a batch of edges, read in rows.
struct Messages {
  const Edges& edges;
  int f0, stop;
  Packed row[BATCH][NV];

  DEVICE_MEMBER bool inside(int n) const { return f0 + n * LANES * VEC < stop; }
  DEVICE_MEMBER void load(long long k, long long end) {
#pragma unroll
    for (int u = 0; u < BATCH; u++) {
      const long long source = k + u < end ? __ldg(edges.idx + k + u) : -1;
      const scalar_t* from = edges.x + source * edges.width + f0;
#pragma unroll
      for (int n = 0; n < NV; n++)
        row[u][n] = source >= 0 && inside(n) ? load_packed(from + n * LANES * VEC) : zero_packed();
    }
  }
  DEVICE_MEMBER void values(long long k, int u, int n, acc_t (&to)[VEC]) const {
    unpack(row[u][n], to);
#if WEIGHTED
    const int f = f0 + n * LANES * VEC;
    const long long edge = edges.perm ? (long long)__ldg(edges.perm + k + u) : k + u;
    const acc_t factor =
        inside(n) ? widen(__ldg(edges.weight + edge * edges.heads + f / edges.channels)) : 0;
#pragma unroll
    for (int v = 0; v < VEC; v++) to[v] = widen(narrow(to[v] * factor));
#endif
  }
};

#define FEW_EDGES 16  // whose rows are read rather than the one message that attains the result

// Who attains the result among the edges of an item.
DEVICE void find_ties(const Item& it, const index_t* __restrict__ rowptr, const Edges& edges,
                      const scalar_t* __restrict__ grad, const place_t* __restrict__ arg,
                      scalar_t* __restrict__ share, unsigned* hits, int* __restrict__ counts,
                      int first, int words) {
  const unsigned group = group_mask();
  const int width = edges.width, stop = min(width, first + 32 * words);
  const int f0 = first + (blockIdx.y * NV * LANES + threadIdx.x % LANES) * VEC;
  const bool writes = threadIdx.x % WORD_LANES == 0;
  const long long origin = it.part < 0 ? it.begin : rowptr[it.row];
  const bool few = it.part < 0 && it.end - it.begin <= FEW_EDGES;
  Messages messages = {edges, f0, stop};
  acc_t best[NV][VEC] = {};
  int place[NV][VEC], count[NV][VEC] = {};
#pragma unroll
  for (int n = 0; n < NV; n++)
#pragma unroll
    for (int v = 0; v < VEC; v++) {
      const int f = f0 + n * LANES * VEC + v;
      const int found = f < stop ? __ldg(arg + it.row * width + f) : -1;
      place[n][v] = found < 0 ? ~found : found;
      if (!few && f < stop) best[n][v] = message(edges, origin + place[n][v], f);
    }
  for (long long k = it.begin; few && k < it.end; k += BATCH) {
    messages.load(k, it.end);
#pragma unroll
    for (int u = 0; u < BATCH; u++) {
      if (k + u >= it.end) break;
#pragma unroll
      for (int n = 0; n < NV; n++) {
        acc_t values[VEC];
        messages.values(k, u, n, values);
#pragma unroll
        for (int v = 0; v < VEC; v++)
          if (place[n][v] == (int)(k - it.begin) + u) best[n][v] = values[v];
      }
    }
  }
  for (long long k = it.begin; k < it.end; k += BATCH) {
    messages.load(k, it.end);
#pragma unroll
    for (int u = 0; u < BATCH; u++) {
      if (k + u >= it.end) break;
      Bits32 hit;
#pragma unroll
      for (int n = 0; n < NV; n++) {
        acc_t values[VEC];
        messages.values(k, u, n, values);
        hit.bits[n] = 0;
#pragma unroll
        for (int v = 0; v < VEC; v++) {
          const bool equal = attains(values[v], best[n][v]);
          count[n][v] += equal;
          hit.bits[n] |= (unsigned)equal << v;
        }
        if (!messages.inside(n)) hit.bits[n] = 0;
      }
      hit.combine(group);
#pragma unroll
      for (int n = 0; n < NV; n++) {
        const int f = f0 + n * LANES * VEC;
        if (writes && f < stop) hits[(k + u) * words + (f - first) / 32] = hit.bits[n];
      }
    }
  }
  Bits32 all;
#pragma unroll
  for (int n = 0; n < NV; n++) {
    const int f = f0 + n * LANES * VEC;
    all.bits[n] = 0;
    if (f >= stop) continue;
    if (it.part >= 0) {
#pragma unroll
      for (int v = 0; v < VEC; v++) counts[it.part * width + f + v] = count[n][v];
      continue;
    }
    acc_t own[VEC];
    load(grad + it.row * width + f, own);
#pragma unroll
    for (int v = 0; v < VEC; v++) {
      own[v] = share_of(own[v], count[n][v], best[n][v]);
      all.bits[n] |= (unsigned)(TIES == EVEN && !is_finite(own[v])) << v;
    }
    store(share + it.row * width + f, own);
  }
  all.combine(group);
#pragma unroll
  for (int n = 0; n < NV; n++)
    if (writes && all.bits[n])
      for (long long k = it.begin; k < it.end; k++)
        hits[k * words + (f0 + n * LANES * VEC - first) / 32] |= all.bits[n];
}

// Of rows in which edges tie: who attains the result. Of split rows also how many of each tile.
// Few rows have ties as a rule, so that groups take many items.
extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_ties(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                const scalar_t* __restrict__ x, const scalar_t* __restrict__ weight,
                const scalar_t* __restrict__ grad, const place_t* __restrict__ arg,
                const unsigned char* __restrict__ tied, scalar_t* __restrict__ share,
                unsigned* hits, int* __restrict__ counts, long long num_rows, long long num_tiles,
                long long split, int width, int heads, int first, int words) {
  const Edges edges = {idx, perm, x, weight, width, heads, width / heads};
  const long long groups = (long long)gridDim.x * (THREADS / LANES);
  for (long long item = group_of_launch(); item < num_rows + num_tiles; item += groups) {
    if (item >= num_tiles && !__ldg(tied + item - num_tiles)) continue;
    Item it;
    if (!find_item(it, item, rowptr, tiles, num_rows, num_tiles, split)) continue;
    if (__ldg(tied + it.row))
      find_ties(it, rowptr, edges, grad, arg, share, hits, counts, first, words);
  }
}

// The shares of split rows, a warp for each first tile.
extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_ties_merge(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                      const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                      const scalar_t* __restrict__ x, const scalar_t* __restrict__ weight,
                      const scalar_t* __restrict__ grad, const place_t* __restrict__ arg,
                      const unsigned char* __restrict__ tied, scalar_t* __restrict__ share,
                      unsigned* __restrict__ hits, const int* __restrict__ counts,
                      long long num_tiles, int width, int heads, int first, int words) {
  const long long tile = ((long long)blockIdx.x * THREADS + threadIdx.x) / 32;
  if (tile >= num_tiles) return;
  const long long row = tiles[4 * tile], parts = tiles[4 * tile + 3];
  if (!parts || !__ldg(tied + row)) return;
  const Edges edges = {idx, perm, x, weight, width, heads, width / heads};
  const int stop = min(width, first + 32 * words);
  for (int f = first + threadIdx.x % 32; f < stop; f += 32) {
    const long long at = row * width + f;
    const int place = arg[at];
    int count = 0;
    for (long long p = tile; p < tile + parts; p++) count += counts[p * width + f];
    const acc_t best = message(edges, rowptr[row] + (place < 0 ? ~place : place), f);
    const scalar_t own = narrow(share_of(widen(grad[at]), count, best));
    share[at] = own;
    if (TIES == EVEN && !is_finite(widen(own)))
      for (long long k = rowptr[row]; k < rowptr[row + 1]; k++)
        atomicOr(hits + k * words + (f - first) / 32, 1u << (f - first) % 32);
  }
}
