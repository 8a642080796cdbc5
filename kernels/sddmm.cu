// sddmm — one dot product per edge and head: the gradient of the weights of spmm.
// Maths     out[perm[k], h] = sum_c a[i, h, c] * b[idx[k], h, c]  over the edges k of row i
// Shapes    a [N, heads * C]  b [S, heads * C]  out [E, heads]  rowptr [N + 1]  idx, perm [E]
//           tiles [T, 4]
// Mapping   LANES lanes a row (or tile) and head, which is blockIdx.y; the lanes keep NV accesses
//           of a's row, wider heads take several turns
// Traffic   gathers E rows of b (and idx, for each head again); a and out once
// Numerics  acc_t products, per lane in order, then by a tree over lanes; mean divides by the degree
// Limits    VEC divides C
#include "common/rows.cuh"
#include "common/vec.cuh"

#define BATCH 4

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
    if (c < channels) load(a + c, left[n]);
  }
  for (long long k = it.begin; k < it.end; k += BATCH) {
    acc_t dot[BATCH] = {};
    long long source[BATCH];
#pragma unroll
    for (int u = 0; u < BATCH; u++) source[u] = __ldg(idx + min(k + u, it.end - 1)) * stride;
    for (int first = 0; first < channels; first += NV * LANES * VEC) {
      Packed right[BATCH][NV];
#pragma unroll
      for (int u = 0; u < BATCH; u++)
#pragma unroll
        for (int n = 0; n < NV; n++) {
          const int c = first + (n * LANES + lane) * VEC;
          right[u][n] = c < channels ? load_packed(b + source[u] + c) : zero_packed();
        }
#pragma unroll
      for (int n = 0; n < NV; n++) {
        const int c = first + (n * LANES + lane) * VEC;
        if (c >= channels) continue;
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
#pragma unroll
    for (int offset = LANES / 2; offset > 0; offset /= 2)
#pragma unroll
      for (int u = 0; u < BATCH; u++) dot[u] += __shfl_xor_sync(group, dot[u], offset);
#pragma unroll
    for (int u = 0; u < BATCH; u++)
      if (u % LANES == lane && k + u < it.end) {
        const long long edge = perm ? __ldg(perm + k + u) : k + u;
        out[edge * heads + head] = narrow(dot[u] / degree);
      }
  }
}
