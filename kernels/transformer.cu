// transformer — attention by dot products of both ends, no row of features stored for an edge.
// Maths     out[i] = sum_k softmax_k(scale * query[i] . key[idx[k]]) * value[idx[k]]
// Shapes    query, out [N, H*C]  key, value [S, H*C]  stats [N, 2*H] (acc_t)  scores [E, H] (acc_t)
//           or null  partial, partial_stats as out, stats, for each tile  rowptr [N + 1]  idx [E]
//           where EDGE_VECS, attr [E, D]  edge_query, edge_out [N, H*D]: scale * edge_query[i] . attr[k]
//           is added to scores, and edge_out[i] = sum_k softmax_k * attr[k]
// Mapping   all heads of a row or tile in LANES lanes (heads.cuh), more heads by blockIdx.y
// Traffic   gathers E rows of key and of value (and idx); query, out and stats once
// Numerics  acc_t sums; a row without edges gives 0, one of scores -inf NaN; tiles merge in order
// Limits    VEC divides C
#define LOOPS 0
#define EDGES (EDGE_VECS > 0)
#include "common/attend.cuh"
#include "common/dots.cuh"

struct Forward {
  enum { RETRIES = false };
  typedef Rows Batch;
  const Place& place;
  const Operands& from;
  scalar_t* out;
  acc_t* partial;
  acc_t scale, query[NV][VEC], sum[NV][VEC];
#if EDGES
  const scalar_t* edge_query;  // of the row
  scalar_t* edge_out;
  acc_t *partial_edge, edge_sum[SLOTS][EDGE_VECS];
#endif

  template <bool FULL>
  DEVICE_MEMBER void load(Batch& rows, position_t k, const index_t (&source)[BATCH]) const {
    from.load<FULL>(rows, k, source, place);
  }
  DEVICE_MEMBER void scores(const Batch& rows, acc_t (&parts)[SLOTS][BATCH]) const {
    add_dots(query, rows.key, parts);
#if EDGES
    add_edge_dots(edge_query, rows.attr, from.dim, place, parts);
#endif
  }
  DEVICE_MEMBER acc_t score(acc_t total) const { return rounded_product(scale, total); }
  DEVICE_MEMBER void add(Batch& rows, const acc_t (&change)[SLOTS],
                         const acc_t (&weights)[SLOTS][BATCH]) {
    rescale(sum, change);
    add_weighted(sum, weights, rows.value);
#if EDGES
    rescale_edges(edge_sum, change);
    add_weighted_edges(edge_sum, weights, rows.attr, from.dim, place);
#endif
  }
  DEVICE_MEMBER void finish(long long row, long long part, const acc_t (&factor)[SLOTS]) {
    rescale(sum, factor);
#if EDGES
    rescale_edges(edge_sum, factor);
    if (part < 0) store_edges(edge_out, row, from.dim, place, edge_sum);
    if (part >= 0) store_edges(partial_edge, part, from.dim, place, edge_sum);
#endif
    if (part < 0) store_row(out, row, place, sum);
    if (part >= 0) store_partial(partial, part, place, sum);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    transformer(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                const scalar_t* __restrict__ query, const scalar_t* __restrict__ key,
                const scalar_t* __restrict__ value, const scalar_t* __restrict__ attr,
                const scalar_t* __restrict__ edge_query, const long long* __restrict__ seed,
                scalar_t* __restrict__ out, scalar_t* __restrict__ edge_out,
                acc_t* __restrict__ stats, acc_t* __restrict__ scores,
                acc_t* __restrict__ partial, acc_t* __restrict__ partial_edge,
                acc_t* __restrict__ partial_stats, long long num_rows, long long num_tiles,
                long long split, int heads, int channels, int dim, double scale,
                long long threshold, double keep) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, -1};
  const Edges edges(graph, group_of_launch());
  if (!any_group(edges.row >= 0)) return;
  const Place place(heads, channels);
  const Dropout dropout = {seed, threshold, (acc_t)keep};
  const Operands operands = {key, value, perm, attr, dim};
  Forward op = {place, operands, out, partial, (acc_t)scale};
  clear(op.sum);
#if EDGES
  op.edge_query = edge_query + (edges.row < 0 ? 0 : edges.row) * (long long)heads * dim;
  op.edge_out = edge_out, op.partial_edge = partial_edge;
  clear_edges(op.edge_sum);
#endif
  load_row(query, edges.row, place, op.query);
  attend(op, graph, edges, place, dropout, {stats, partial_stats, scores});
}
