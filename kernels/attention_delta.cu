// attention_delta — what the gradients of a target's scores have in common.
// Maths     delta[i] = <grad[i], out[i]> + sum_k softmax_k * more[k], of each head; the first is
//           sum_k weight_k * <grad[i], value_k>, weight_k after dropout
// Shapes    grad, out [N, H*C]  scores, more [E + L, H] (acc_t), more where MORE
//           stats [N, 2*H] (acc_t)  delta [N, H] (acc_t)  partial [T, H]: the parts of tiles
// Mapping   all heads of a row or tile in LANES lanes (heads.cuh), more heads by blockIdx.y; without
//           MORE there are no tiles
// Traffic   grad and out once; scores and more of each edge, in order
// Numerics  the product is summed as those of attend_source.cuh
// Limits    VEC divides C
#define BATCH 1
#include "common/edges.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_delta(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                    const long long* __restrict__ tiles, const scalar_t* __restrict__ grad,
                    const scalar_t* __restrict__ out, const acc_t* __restrict__ scores,
                    const acc_t* __restrict__ stats, const acc_t* __restrict__ more,
                    acc_t* __restrict__ delta, acc_t* __restrict__ partial, long long num_rows,
                    long long num_tiles, long long split, long long num_loops, int heads,
                    int channels) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, num_loops};
  const Edges edges(graph, group_of_launch());
  if (!any_group(edges.row >= 0)) return;
  const Place place(heads, channels);
  const bool first = edges.part < 0 || graph.rowptr[edges.row] == edges.begin;
  acc_t left[NV][VEC], right[NV][VEC], parts[SLOTS][BATCH] = {};
  load_row(grad, first ? edges.row : -1, place, left);
  load_row(out, first ? edges.row : -1, place, right);
#pragma unroll
  for (int n = 0; n < NV; n++)
#pragma unroll
    for (int v = 0; v < VEC; v++)
      parts[n / HEAD_VECS][0] = fma(left[n][v], right[n][v], parts[n / HEAD_VECS][0]);
#pragma unroll
  for (int s = 0; s < SLOTS; s++) {
    combine<HEAD_LANES>(parts[s], place.sub, Plus());
#if MORE
    acc_t sum[BATCH] = {};
    if (edges.row >= 0 && place.has(s)) {
      const acc_t* row = stats + edges.row * 2ll * heads + place.head_of(s);
      for (position_t k = edges.begin + place.sub; k < edges.stop; k += HEAD_LANES) {
        const position_t position = edges.find(idx, nullptr, k);
        if (position == NOWHERE) continue;
        const long long at = (long long)position * heads + place.head_of(s);
        sum[0] = fma(exp(__ldg(scores + at) - __ldg(row)) * __ldg(row + heads), __ldg(more + at), sum[0]);
      }
    }
    combine<HEAD_LANES>(sum, place.sub, Plus());
    parts[s][0] += sum[0];
#endif
    if (edges.row < 0 || place.sub || !place.has(s)) continue;
    acc_t* to = edges.part >= 0 ? partial + (long long)edges.part * heads
                                : delta + (long long)edges.row * heads;
    to[place.head_of(s)] = parts[s][0];
  }
}
