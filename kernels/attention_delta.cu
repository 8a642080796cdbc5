// attention_delta, attention_extra — what the gradients of a target's scores have in common.
// Maths     common[i] = (largest score, one over the sum of exponentials, delta, 0) of each head,
//           delta[i] = <grad[i], out[i]> + extra[i], extra[i] = sum_k softmax_k * more[k]; the first
//           is sum_k weight_k * <grad[i], value_k>, weight_k after dropout
// Shapes    grad, out [N, H*C]  scores, more [E + L, H]  stats [N, 2*H]  extra [N, H] or null
//           common [N, H, 4]  partial [T, H], all of acc_t
// Mapping   all heads of a row, or tile, in LANES lanes (heads.cuh), more heads by blockIdx.y
// Traffic   grad, out, stats and common once; extra: scores and more of each edge, in order
// Numerics  the product is summed as those of attend_source.cuh
// Limits    VEC divides C
#define BATCH 1
#include "common/edges.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_delta(const scalar_t* __restrict__ grad, const scalar_t* __restrict__ out,
                    const acc_t* __restrict__ stats, const acc_t* __restrict__ extra,
                    acc_t* __restrict__ common, long long num_rows, int heads, int channels) {
  const long long row = group_of_launch() < num_rows ? group_of_launch() : -1;
  if (!any_group(row >= 0)) return;
  const Place place(heads, channels);
  acc_t left[NV][VEC], right[NV][VEC], parts[SLOTS][BATCH] = {};
  load_row(grad, row, place, left);
  load_row(out, row, place, right);
#pragma unroll
  for (int n = 0; n < NV; n++)
#pragma unroll
    for (int v = 0; v < VEC; v++)
      parts[n / HEAD_VECS][0] = fma(left[n][v], right[n][v], parts[n / HEAD_VECS][0]);
#pragma unroll
  for (int s = 0; s < SLOTS; s++) {
    combine<HEAD_LANES>(parts[s], place.sub, Plus());
    if (row < 0 || place.sub || !place.has(s)) continue;
    const acc_t* own = in_row(stats, row, 2 * heads, place.head_of(s));
    Common found = {own[0], own[heads], parts[s][0], 0};
    if (extra != nullptr) found.delta += *in_row(extra, row, heads, place.head_of(s));
    found.store(in_row(common, row, 4 * heads, 4 * place.head_of(s)));
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    attention_extra(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                    const long long* __restrict__ tiles, const acc_t* __restrict__ scores,
                    const acc_t* __restrict__ stats, const acc_t* __restrict__ more,
                    acc_t* __restrict__ extra, acc_t* __restrict__ partial, long long num_rows,
                    long long num_tiles, long long split, long long num_loops, int heads,
                    int channels) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, num_loops};
  const Edges edges(graph, group_of_launch());
  if (!any_group(edges.row >= 0)) return;
  const Place place(heads, channels);
#pragma unroll
  for (int s = 0; s < SLOTS; s++) {
    acc_t sum[BATCH] = {};
    if (edges.row >= 0 && place.has(s)) {
      const acc_t* own = in_row(stats, edges.row, 2 * heads, place.head_of(s));
      for (position_t k = edges.begin + place.sub; k < edges.stop; k += HEAD_LANES) {
        const position_t position = edges.find(idx, nullptr, k);
        if (position == NOWHERE) continue;
        const acc_t score = *in_row(scores, position, heads, place.head_of(s));
        const acc_t given = *in_row(more, position, heads, place.head_of(s));
        sum[0] = fma(exp(score - own[0]) * own[heads], given, sum[0]);
      }
    }
    combine<HEAD_LANES>(sum, place.sub, Plus());
    if (edges.row < 0 || place.sub || !place.has(s)) continue;
    acc_t* to = edges.part >= 0 ? in_row(partial, edges.part, heads, place.head_of(s))
                                : in_row(extra, edges.row, heads, place.head_of(s));
    *to = sum[0];
  }
}
