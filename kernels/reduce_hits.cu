// reduce_hits — who shares the gradient of reduce, of rows in which no edges tie.
// Maths     hits of common/shares.cuh
// Shapes    grad [N, width]  arg [N, width] (place_t)  tied [N] (bytes)  hits [E, words] (unsigned)
// Mapping   a warp a row or tile, WORDS words a lane
// Traffic   arg, grad and hits once
// Numerics  exact
// Limits    none
#include "common/rows.cuh"
#include "common/shares.cuh"

#define EDGES 128

// Of rows in which no edges tie, from the places alone.
extern "C" __global__ void __launch_bounds__(THREADS)
    reduce_hits(const index_t* __restrict__ rowptr, const long long* __restrict__ tiles,
                const scalar_t* __restrict__ grad, const place_t* __restrict__ arg,
                const unsigned char* __restrict__ tied, unsigned* __restrict__ hits,
                long long num_rows, long long num_tiles, long long split, int width, int first,
                int words) {
  Item it;
  if (!find_item(it, group_of_launch(), rowptr, tiles, num_rows, num_tiles, split)) return;
  if (TIES != FIRST && __ldg(tied + it.row)) return;
  const int lane = threadIdx.x % 32, w0 = blockIdx.y * WORDS;
  const int skipped = it.part < 0 ? 0 : (int)(it.begin - rowptr[it.row]);
  int place[WORDS];  // in the item
  unsigned all = 0;  // a bit for each word: all edges have a hit
#pragma unroll
  for (int w = 0; w < WORDS; w++) {
    const int f = first + 32 * (w0 + w) + lane;
    const bool inside = f < width && w0 + w < words;
    const long long at = it.row * width + f;
    const int found = inside ? __ldg(arg + at) : -1;
    place[w] = inside ? (found < 0 ? ~found : found) - skipped : -1;
    if (TIES == EVEN && inside) all |= (unsigned)!is_finite(widen(__ldg(grad + at))) << w;
  }
  // Of short items, a ballot for each word: the word w of edge u goes to lane u * WORDS + w.
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
    if (u < n && w < words) hits[(it.begin + u) * words + w] = mine;
    return;
  }
  // Else they are gathered in shared memory, from where they go out in whole lines.
  __shared__ unsigned bits[THREADS / 32][WORDS * EDGES];
  unsigned* own = bits[threadIdx.x / 32];
  for (long long k0 = it.begin; k0 < it.end; k0 += EDGES) {
    const int n = (int)min((long long)EDGES, it.end - k0);
    for (int u = lane; u < n * WORDS; u += 32) own[u] = 0;
    __syncwarp();
#pragma unroll
    for (int w = 0; w < WORDS; w++) {
      const long long u = place[w] - (k0 - it.begin);
      if (all >> w & 1)
        for (int v = 0; v < n; v++) atomicOr(own + v * WORDS + w, 1u << lane);
      else if (u >= 0 && u < n)
        atomicOr(own + u * WORDS + w, 1u << lane);
    }
    __syncwarp();
    for (int u = lane; u < n * WORDS; u += 32)
      if (w0 + u % WORDS < words) hits[(k0 + u / WORDS) * words + w0 + u % WORDS] = own[u];
    __syncwarp();
  }
}
