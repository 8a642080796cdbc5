// transformer_target — the gradients of the queries, and of what they ask of edges.
// Maths     grad_query[i] = scale * sum_k s_k * key[idx[k]]
//           where EDGE_VECS, grad_edge_query[i] = scale * sum_k s_k * attr[k]
// Shapes    as in transformer.cu; grad_edge_query [N, H*D]  terms [E, H] (acc_t): s_k, from
//           transformer_source; partial, partial_edge for each tile
// Mapping   as in transformer.cu
// Traffic   gathers E rows of key; terms of each edge, in order
// Numerics  acc_t sums in edge order, tiles merged in order by spmm_merge
// Limits    VEC divides C
#define LOOPS 0
#define EDGES (EDGE_VECS > 0)
#include "common/dots.cuh"

struct Backward {
  const Edges& edges;
  const Place& place;
  const Operands& from;
  const acc_t* terms;
  acc_t sum[NV][VEC];
#if EDGES
  acc_t edge_sum[SLOTS][EDGE_VECS];
#endif

  template <bool FULL> DEVICE_MEMBER void batch(position_t k, const index_t (&mine)[LOADS]) {
    index_t source[BATCH];
    spread<FULL>(mine, source);
    acc_t slopes[SLOTS][BATCH];
#pragma unroll
    for (int s = 0; s < SLOTS; s++)
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        const position_t edge = k + place.own_edge(i);
        const acc_t* at = in_row(terms, edge, place.heads, place.head_of(s));
        slopes[s][i] = edge < edges.end && place.has(s) ? __ldg(at) : 0;
      }
    Packed rows[BATCH][NV];
    load_rows<FULL>(from.key, source, place, rows);
    add_weighted(sum, slopes, rows);
#if EDGES
    const scalar_t* attr[BATCH];
#pragma unroll
    for (int u = 0; u < BATCH; u++) attr[u] = from.features(k + u, FULL || source[u] >= 0);
    add_weighted_edges(edge_sum, slopes, attr, from.dim, place);
#endif
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    transformer_target(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                       const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                       const scalar_t* __restrict__ key, const scalar_t* __restrict__ attr,
                       const acc_t* __restrict__ terms, scalar_t* __restrict__ grad_query,
                       scalar_t* __restrict__ grad_edge_query, acc_t* __restrict__ partial,
                       acc_t* __restrict__ partial_edge, long long num_rows, long long num_tiles,
                       long long split, int heads, int channels, int dim, double scale) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, -1};
  const Edges edges(graph, group_of_launch());
  if (!any_group(edges.row >= 0)) return;
  const Place place(heads, channels);
  const Operands operands = {key, nullptr, perm, attr, dim};
  Backward step = {edges, place, operands, terms};
  clear(step.sum);
#if EDGES
  clear_edges(step.edge_sum);
#endif
  walk(edges, idx, step);
  if (edges.row < 0) return;
#pragma unroll
  for (int n = 0; n < NV; n++)
#pragma unroll
    for (int v = 0; v < VEC; v++) step.sum[n][v] *= (acc_t)scale;
  if (edges.part >= 0)
    store_partial(partial, edges.part, place, step.sum);
  else
    store_row(grad_query, edges.row, place, step.sum);
#if EDGES
#pragma unroll
  for (int s = 0; s < SLOTS; s++)
#pragma unroll
    for (int i = 0; i < EDGE_VECS; i++) step.edge_sum[s][i] *= (acc_t)scale;
  if (edges.part >= 0)
    store_edges(partial_edge, edges.part, dim, place, step.edge_sum);
  else
    store_edges(grad_edge_query, edges.row, dim, place, step.edge_sum);
#endif
}
