// transformer_delta, transformer_target — the gradients of the queries and of the scores.
// Maths     grad_query[i] = scale * sum_k s_k * key[idx[k]], s_k as in attend_target.cuh
//           where EDGE_VECS, t_k gets grad_edge[i] . attr[k], and grad_edge_query[i] = scale *
//           sum_k s_k * attr[k]; delta: the part of each tile in delta
// Shapes    as in transformer.cu; grad_weights [E, H] (acc_t) or null  grad_edge, grad_edge_query
//           [N, H*D]  terms [E, H] (acc_t): from attention_values; s_k in the end
//           delta [N, H], of split rows; partial, partial_edge for each tile
// Mapping   as in transformer.cu
// Traffic   gathers E rows of key; scores and terms of each edge, in order, and s_k out
// Numerics  acc_t sums in edge order, tiles merged in order by spmm_merge
// Limits    VEC divides C
#define LOOPS 0
#define EDGES (EDGE_VECS > 0)
#include "common/attend_target.cuh"
#include "common/dots.cuh"

// Weights are handed out before dropout.
#define AFTER false

#if EDGES
// What features of edges add to t.
struct EdgeDots {
  const Edges& edges;
  const Place& place;
  const Operands& from;
  const scalar_t* grad_edge;  // of the row

  DEVICE_MEMBER void operator()(position_t k, acc_t (&parts)[SLOTS][BATCH]) const {
    const scalar_t* attr[BATCH];
#pragma unroll
    for (int u = 0; u < BATCH; u++) attr[u] = from.features(k + u, k + u < edges.end);
    add_edge_dots(grad_edge, attr, from.dim, place, parts);
  }
};
#endif

extern "C" __global__ void __launch_bounds__(THREADS)
    transformer_delta(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                      const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                      const acc_t* __restrict__ scores, const acc_t* __restrict__ stats,
                      const acc_t* __restrict__ grad_weights,
                      const scalar_t* __restrict__ grad_edge, const scalar_t* __restrict__ attr,
                      const long long* __restrict__ seed, acc_t* terms,
                      acc_t* __restrict__ partial_delta, long long num_rows, long long num_tiles,
                      long long split, int heads, int channels, int dim, long long threshold,
                      double keep) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, -1};
  const long long item = group_of_launch();
  const Edges edges(graph, item < num_tiles ? item : num_tiles + num_rows);
  const Place place(heads, channels);
  const Dropout dropout = {seed, threshold, (acc_t)keep};
  const TargetTables tables = {scores, stats, grad_weights, nullptr, terms};
  Target target = {edges, place, dropout, tables, idx};
#if EDGES
  const Operands operands = {nullptr, nullptr, perm, attr, dim};
  const long long own = (edges.row < 0 ? 0 : edges.row) * (long long)heads * dim;
  sum_tile<AFTER>(target, partial_delta, EdgeDots{edges, place, operands, grad_edge + own});
#else
  const NoMore none = {};
  sum_tile<AFTER>(target, partial_delta, none);
#endif
}

struct Backward {
  const Edges& edges;
  const Place& place;
  const Operands& from;
  const Target& target;
  acc_t deltas[SLOTS], sum[NV][VEC];
#if EDGES
  acc_t edge_sum[SLOTS][EDGE_VECS];
#endif

  template <bool FULL> DEVICE_MEMBER void batch(position_t k, const index_t (&mine)[LOADS]) {
    index_t source[BATCH];
    spread<FULL>(mine, source);
    Packed rows[BATCH][NV];
    load_rows<FULL>(from.key, source, place, rows);
    acc_t slopes[SLOTS][BATCH];
    position_t own[BATCH];
    target.slopes<FULL>(k, deltas, slopes, own);
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
                       const acc_t* __restrict__ scores, const acc_t* __restrict__ stats,
                       const acc_t* __restrict__ grad_weights, const acc_t* __restrict__ delta,
                       const scalar_t* __restrict__ grad_edge, const scalar_t* __restrict__ key,
                       const scalar_t* __restrict__ attr, const long long* __restrict__ seed,
                       acc_t* terms, scalar_t* __restrict__ grad_query,
                       scalar_t* __restrict__ grad_edge_query, acc_t* __restrict__ partial,
                       acc_t* __restrict__ partial_edge, long long num_rows, long long num_tiles,
                       long long split, int heads, int channels, int dim, double scale,
                       long long threshold, double keep) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, -1};
  const Edges edges(graph, group_of_launch());
  if (!any_group(edges.row >= 0)) return;
  const Place place(heads, channels);
  const Dropout dropout = {seed, threshold, (acc_t)keep};
  const TargetTables tables = {scores, stats, grad_weights, delta, terms};
  const Operands operands = {key, nullptr, perm, attr, dim};
  Target target = {edges, place, dropout, tables, idx};
  target.start();
#if EDGES
  const long long own = (edges.row < 0 ? 0 : edges.row) * (long long)heads * dim;
  target.sum<AFTER>(edges.part < 0, EdgeDots{edges, place, operands, grad_edge + own});
#else
  target.sum<AFTER>(edges.part < 0, NoMore());
#endif
  Backward step = {edges, place, operands, target};
#pragma unroll
  for (int s = 0; s < SLOTS; s++) step.deltas[s] = target.delta(s);
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
  store_sums(grad_query, partial, edges, place, step.sum);
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

// grad_attr[perm[k]] = sum_h scale * s_k,h * edge_query[i, h] + weight_k,h * grad_edge[i, h]
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
