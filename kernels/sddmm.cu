// sddmm — one dot product per edge and head: the gradient of the weights of spmm.
// Maths     out[perm[k], h] = sum_c a[i, h, c] * b[idx[k], h, c]  over the edges k of row i
// Shapes    a [N, heads * C]  b [S, heads * C]  out [E, heads]  rowptr [N + 1]  idx, perm [E]
//           tiles [T, 4]
// Mapping   LANES lanes a row (or tile) and head, which is blockIdx.y; the lanes keep NV accesses
//           of a's row, wider heads take several turns
// Traffic   gathers E rows of b (and idx, for each head again); a and out once
// Numerics  acc_t products, per lane in order, then by a tree over lanes; mean divides by the degree
// Limits    VEC divides C
#define BATCH 4
#include "common/combine.cuh"
#include "common/rows.cuh"
#include "common/vec.cuh"

// The lanes that have the sum of an edge in the end, and the edges whose sums a lane has.
#define SPREAD (LANES > BATCH ? LANES / BATCH : 1)
#define OWN (BATCH > LANES ? BATCH / LANES : 1)

extern "C" __global__ void __launch_bounds__(THREADS)
    sddmm(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
          const index_t* __restrict__ perm, const long long* __restrict__ tiles,
          const scalar_t* __restrict__ a, const scalar_t* __restrict__ b,
          scalar_t* __restrict__ out, long long num_rows, long long num_tiles, long long split,
          int channels, int heads, int mean) {
  Item it;
  if (!find_item(it, group_of_launch(), rowptr, tiles, num_rows, num_tiles, split)) return;
  const int lane = threadIdx.x % LANES, head = blockIdx.y;
  const long long stride = (long long)heads * channels;
  const unsigned group = group_mask();
  const acc_t degree = mean ? (acc_t)(rowptr[it.row + 1] - rowptr[it.row]) : 1;
  a += it.row * stride + head * channels, b += head * channels;
  acc_t left[NV][VEC];
#pragma unroll
  for (int n = 0; n < NV; n++) {
    const int c = (n * LANES + lane) * VEC;
    if (FILLED || c < channels) load(a + c, left[n]);
  }
  const int count = (int)(it.end - it.begin);
  idx += it.begin;
  for (int k = 0; k < count; k += BATCH) {
    acc_t dot[BATCH] = {};
    index_t source[BATCH];
#pragma unroll
    for (int u = 0; u < BATCH; u++) source[u] = __ldg(idx + min(k + u, count - 1));
#pragma unroll 1
    for (int first = 0; first < channels; first += NV * LANES * VEC) {
      Packed right[BATCH][NV];
#pragma unroll
      for (int u = 0; u < BATCH; u++)
#pragma unroll
        for (int n = 0; n < NV; n++) {
          const int c = first + (n * LANES + lane) * VEC;
          const scalar_t* at = in_row(b, source[u], (int)stride, c);
          right[u][n] = FILLED || c < channels ? load_packed(at) : zero_packed();
        }
#pragma unroll
      for (int n = 0; n < NV; n++) {
        const int c = first + (n * LANES + lane) * VEC;
        if (!FILLED && c >= channels) continue;
        if (channels > NV * LANES * VEC) load(a + c, left[n]);
#pragma unroll
        for (int u = 0; u < BATCH; u++) {
          acc_t value[VEC];
          unpack(right[u][n], value);
#pragma unroll
          for (int v = 0; v < VEC; v++) dot[u] += left[n][v] * value[v];
        }
      }
    }
    combine<LANES>(dot, lane, Plus(), group);
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const int u = lane / SPREAD * OWN + i;
      if (lane % SPREAD || k + u >= count) continue;
      const long long at = it.begin + k + u, edge = perm ? __ldg(perm + at) : at;
      out[edge * heads + head] = narrow(dot[i] / degree);
    }
  }
}
