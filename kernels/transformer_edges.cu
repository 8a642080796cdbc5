// transformer_more, transformer_attr — what features of edges have to do with gradients.
// Maths     more[k] = grad_edge[i] . attr[k], through dropout, + grad_weights[k]
//           grad_attr[perm[k]] = sum_h scale * s_k,h * edge_query[i, h] + weight_k,h * grad_edge[i, h]
// Shapes    as in transformer.cu; grad_weights [E, H] (acc_t) or null  grad_edge [N, H*D]
//           more, terms [E, H] (acc_t), terms: s_k, from transformer_source  grad_attr [E, D]
// Mapping   more: as in transformer.cu; attr: a group for a row or tile, its numbers in turns
// Traffic   attr and more once; terms, scores and grad_attr once
// Numerics  acc_t sums
#define LOOPS 0
#define EDGES 1
#include "common/dots.cuh"
#include "common/philox.cuh"

extern "C" __global__ void __launch_bounds__(THREADS)
    transformer_more(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                     const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                     const scalar_t* __restrict__ grad_edge, const acc_t* __restrict__ grad_weights,
                     const scalar_t* __restrict__ attr, const long long* __restrict__ seed,
                     acc_t* __restrict__ more, long long num_rows, long long num_tiles,
                     long long split, int heads, int channels, int dim, long long threshold,
                     double keep) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, -1};
  const Edges edges(graph, group_of_launch());
  if (!any_group(edges.row >= 0)) return;
  const Place place(heads, channels);
  const Dropout dropout = {seed, threshold, (acc_t)keep};
  const Operands operands = {nullptr, nullptr, perm, attr, dim};
  const scalar_t* own = grad_edge + (edges.row < 0 ? 0 : edges.row) * (long long)heads * dim;
  for (position_t k = edges.begin; any_group(k < edges.end); k += BATCH) {
    const scalar_t* rows[BATCH];
#pragma unroll
    for (int u = 0; u < BATCH; u++) rows[u] = operands.features(k + u, k + u < edges.end);
    acc_t parts[SLOTS][BATCH] = {};
    add_edge_dots(own, rows, dim, place, parts);
#pragma unroll
    for (int s = 0; s < SLOTS; s++) {
      combine<HEAD_LANES>(parts[s], place.sub, Plus());
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        const position_t edge = k + place.own_edge(i);
        if (edge >= edges.end || !place.writes(s)) continue;
        const long long at = (long long)edge * heads + place.head_of(s);
#if DROPOUT
        parts[s][i] *= dropout.factor(edge, place.head_of(s));
#endif
        more[at] = grad_weights == nullptr ? parts[s][i] : parts[s][i] + __ldg(grad_weights + at);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    transformer_attr(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                     const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                     const acc_t* __restrict__ scores, const acc_t* __restrict__ stats,
                     const scalar_t* __restrict__ grad_edge,
                     const scalar_t* __restrict__ edge_query, const long long* __restrict__ seed,
                     const acc_t* __restrict__ terms, scalar_t* __restrict__ grad_attr,
                     long long num_rows, long long num_tiles, long long split, int heads, int dim,
                     double scale, long long threshold, double keep) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, -1};
  const Edges edges(graph, group_of_launch());
  if (edges.row < 0) return;
  const Dropout dropout = {seed, threshold, (acc_t)keep};
  const acc_t* row = stats + edges.row * 2ll * heads;
  const long long own = (long long)edges.row * heads * dim;
  const long long count = (long long)(edges.end - edges.begin) * dim;
  for (long long n = threadIdx.x % LANES; n < count; n += LANES) {
    const long long position = edges.begin + n / dim;
    const int d = n % dim;
    acc_t total = 0;
    for (int h = 0; h < heads; h++) {
      const long long term = position * heads + h, at = own + (long long)h * dim + d;
      acc_t weight = exp(__ldg(scores + term) - __ldg(row + h)) * __ldg(row + heads + h);
      if (DROPOUT) weight *= dropout.factor(position, h);
      total = fma((acc_t)scale * __ldg(terms + term), widen(__ldg(edge_query + at)), total);
      total = fma(weight, widen(__ldg(grad_edge + at)), total);
    }
    const long long edge = perm ? (long long)__ldg(perm + position) : position;
    grad_attr[edge * dim + d] = narrow(total);
  }
}
