// transformer_target — the gradient of the queries, and what the pass over the sources needs.
// Maths     grad_query[i] = scale * sum_k s_k * key[idx[k]], s_k as in attend_target.cuh
// Shapes    as in transformer.cu; grad [N, H*C]  grad_weights [E, H] (acc_t) or null  terms [E, 2, H] (acc_t)
//           partial, partial_mass, partial_delta, centre for each tile
// Mapping   as in transformer.cu; a block for each tile then settles its terms
// Traffic   gathers E rows of key and of value; terms out once (twice through the L2)
// Numerics  scores are those of the forward pass, bit for bit
// Limits    VEC divides C
#define LOOPS 0
#define EDGES (EDGE_VECS > 0)
#include "common/attend_target.cuh"
#include "common/dots.cuh"

struct Backward {
  enum { AFTER_DROPOUT = false };  // the weights that are handed out
  typedef Rows Batch;
  const Place& place;
  const Operands& from;
  scalar_t* grad_query;
  acc_t *partial, *partial_mass;
  acc_t scale, query[NV][VEC], grad[NV][VEC], sum[NV][VEC], mass[NV][VEC];
#if EDGES
  const scalar_t *edge_query, *grad_edge;  // of the row
  scalar_t* grad_edge_query;
  acc_t *partial_edge, *partial_edge_mass;
  acc_t edge_sum[SLOTS][EDGE_VECS], edge_mass[SLOTS][EDGE_VECS];
#endif

  template <bool FULL>
  DEVICE_MEMBER void load(Batch& rows, position_t k, const index_t (&source)[BATCH]) const {
    from.load<FULL>(rows, k, source, place);
  }
  DEVICE_MEMBER void dots(const Batch& rows, acc_t (&scores)[SLOTS][BATCH],
                          acc_t (&dots)[SLOTS][BATCH]) const {
    add_dots(query, rows.key, scores);
    add_dots(grad, rows.value, dots);
#if EDGES
    add_edge_dots(edge_query, rows.attr, from.dim, place, scores);
    add_edge_dots(grad_edge, rows.attr, from.dim, place, dots);
#endif
  }
  DEVICE_MEMBER acc_t score(acc_t total) const { return rounded_product(scale, total); }
  DEVICE_MEMBER void add(Batch& rows, const acc_t (&a)[SLOTS][BATCH],
                         const acc_t (&at)[SLOTS][BATCH]) {
    add_weighted(sum, at, rows.key);
    add_weighted(mass, a, rows.key);
#if EDGES
    add_weighted_edges(edge_sum, at, rows.attr, from.dim, place);
    add_weighted_edges(edge_mass, a, rows.attr, from.dim, place);
#endif
  }
  DEVICE_MEMBER void recentre(int s, acc_t by) {
#pragma unroll
    for (int n = s * HEAD_VECS; n < (s + 1) * HEAD_VECS; n++) add_scaled(sum[n], by, mass[n]);
#if EDGES
#pragma unroll
    for (int i = 0; i < EDGE_VECS; i++)
      edge_sum[s][i] = fma(by, edge_mass[s][i], edge_sum[s][i]);
#endif
  }
  DEVICE_MEMBER void finish(const Edges& edges, const acc_t (&shift)[SLOTS]) {
    if (edges.part >= 0) {
      store_partial(partial, edges.part, place, sum);
      store_partial(partial_mass, edges.part, place, mass);
#if EDGES
      store_edges(partial_edge, edges.part, from.dim, place, edge_sum);
      store_edges(partial_edge_mass, edges.part, from.dim, place, edge_mass);
#endif
      return;
    }
#if EDGES
#pragma unroll
    for (int s = 0; s < SLOTS; s++)
#pragma unroll
      for (int i = 0; i < EDGE_VECS; i++)
        edge_sum[s][i] = scale * fma(-shift[s], edge_mass[s][i], edge_sum[s][i]);
    store_edges(grad_edge_query, edges.row, from.dim, place, edge_sum);
#endif
#pragma unroll
    for (int n = 0; n < NV; n++)
#pragma unroll
      for (int v = 0; v < VEC; v++)
        sum[n][v] = scale * fma(-shift[n / HEAD_VECS], mass[n][v], sum[n][v]);
    store_row(grad_query, edges.row, place, sum);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    transformer_target(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                       const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                       const scalar_t* __restrict__ grad, const scalar_t* __restrict__ grad_edge,
                       const acc_t* __restrict__ grad_weights, const scalar_t* __restrict__ query,
                       const scalar_t* __restrict__ key, const scalar_t* __restrict__ value,
                       const acc_t* __restrict__ stats, const scalar_t* __restrict__ attr,
                       const scalar_t* __restrict__ edge_query,
                       const long long* __restrict__ seed, scalar_t* __restrict__ grad_query,
                       scalar_t* __restrict__ grad_edge_query, acc_t* terms,
                       acc_t* __restrict__ partial, acc_t* __restrict__ partial_mass,
                       acc_t* __restrict__ partial_edge, acc_t* __restrict__ partial_edge_mass,
                       acc_t* __restrict__ partial_delta, acc_t* __restrict__ centre,
                       long long num_rows, long long num_tiles, long long split, int heads,
                       int channels, int dim, double scale, long long threshold, double keep) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, -1};
  const Edges edges(graph, group_of_launch());
  if (!any_group(edges.row >= 0)) return;
  const Place place(heads, channels);
  const Dropout dropout = {seed, threshold, (acc_t)keep};
  const Operands operands = {key, value, perm, attr, dim};
  Backward op = {place, operands, grad_query, partial, partial_mass, (acc_t)scale};
#if EDGES
  const long long own = (edges.row < 0 ? 0 : edges.row) * (long long)heads * dim;
  op.edge_query = edge_query + own, op.grad_edge = grad_edge + own;
  op.grad_edge_query = grad_edge_query;
  op.partial_edge = partial_edge, op.partial_edge_mass = partial_edge_mass;
  clear_edges(op.edge_sum), clear_edges(op.edge_mass);
#endif
  load_row(query, edges.row, place, op.query);
  load_row(grad, edges.row, place, op.grad);
  clear(op.sum), clear(op.mass);
  attend_target(op, graph, edges, place, dropout,
                {stats, grad_weights, terms, partial_delta, centre});
}

// grad_attr[perm[k]] = sum_h scale * s_k,h * edge_query[i, h] + weight_k,h * grad_edge[i, h]
extern "C" __global__ void __launch_bounds__(THREADS)
    transformer_attr(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                     const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                     const scalar_t* __restrict__ grad_edge,
                     const scalar_t* __restrict__ edge_query, const acc_t* __restrict__ terms,
                     scalar_t* __restrict__ grad_attr, long long num_rows, long long num_tiles,
                     long long split, int heads, int dim, double scale) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, -1};
  const Edges edges(graph, group_of_launch());
  if (edges.row < 0) return;
  const long long own = (long long)edges.row * heads * dim;
  const long long count = (long long)(edges.end - edges.begin) * dim;
  for (long long n = threadIdx.x % LANES; n < count; n += LANES) {
    const long long position = edges.begin + n / dim;
    const int d = n % dim;
    acc_t total = 0;
    for (int h = 0; h < heads; h++) {
      const acc_t* term = terms + position * 2 * heads + h;
      const long long at = own + (long long)h * dim + d;
      total = fma((acc_t)scale * __ldg(term + heads), widen(__ldg(edge_query + at)), total);
      total = fma(__ldg(term), widen(__ldg(grad_edge + at)), total);
    }
    const long long edge = perm ? (long long)__ldg(perm + position) : position;
    grad_attr[edge * dim + d] = narrow(total);
  }
}
