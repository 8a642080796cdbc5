// transformer — attention by dot products of both ends, nothing edge-sized stored.
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
#define ROW_WORDS (NV * VEC * (int)sizeof(scalar_t) / 4)
#define BATCH (ROW_WORDS <= 2 ? 8 : ROW_WORDS <= 4 ? 4 : ROW_WORDS <= 8 ? 2 : 1)
#include "common/attend.cuh"
#include "common/attend_source.cuh"
#include "common/attend_target.cuh"
#include "common/merge.cuh"
#if EDGES
#include "common/edge_features.cuh"
#endif

struct Rows {
  Packed key[BATCH][NV], value[BATCH][NV];
#if EDGES
  const scalar_t* attr[BATCH];
#endif
};

// The tables of sources, and features of edges.
struct Operands {
  const scalar_t *key, *value;
  const index_t* perm;
  const scalar_t* attr;
  int dim;

  template <bool FULL>
  DEVICE_MEMBER void load(Rows& rows, position_t k, const index_t (&source)[BATCH],
                          const Place& place) const {
#if EDGES
#pragma unroll
    for (int u = 0; u < BATCH; u++) {
      position_t edge = 0;  // the weight of no edge is zero
      if (FULL || source[u] >= 0) edge = perm ? (position_t)__ldg(perm + k + u) : k + u;
      rows.attr[u] = attr + (long long)edge * dim;
    }
#endif
    load_rows<FULL>(key, source, place, rows.key);
    load_rows<FULL>(value, source, place, rows.value);
  }
};

struct Forward {
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

extern "C" __global__ void __launch_bounds__(THREADS)
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
  op.edge_query = edge_query + max(edges.row, 0) * (long long)heads * dim;
  op.edge_out = edge_out, op.partial_edge = partial_edge;
  clear_edges(op.edge_sum);
#endif
  load_row(query, edges.row, place, op.query);
  attend(op, graph, edges, place, dropout, {stats, partial_stats, scores});
}

extern "C" __global__ void __launch_bounds__(THREADS)
    transformer_merge(const long long* __restrict__ tiles, const acc_t* __restrict__ partial,
                      const acc_t* __restrict__ partial_stats, scalar_t* __restrict__ out,
                      acc_t* __restrict__ stats, long long num_tiles, int heads, int channels) {
  const AttentionTables tables = {partial, partial_stats, out, stats, heads, channels};
  merge_rows<AttentionSum>(tables, tiles, num_tiles, heads * channels);
}

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

// transformer_target — the gradient of the queries, and what the pass over the sources needs.
// Maths     grad_query[i] = scale * sum_k s_k * key[idx[k]], s_k as in attend_target.cuh
// Shapes    as above; grad [N, H*C]  grad_weights [E, H] (acc_t) or null  terms [E, 2, H] (acc_t)
//           partial, partial_mass, partial_delta, centre for each tile
// Mapping   as above; a block for each tile then settles its terms
// Traffic   gathers E rows of key and of value; terms out once (twice through the L2)
// Numerics  scores are those of the forward pass, bit for bit
// Limits    as above
extern "C" __global__ void __launch_bounds__(THREADS)
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
  const long long own = max(edges.row, 0) * (long long)heads * dim;
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

extern "C" __global__ void __launch_bounds__(THREADS)
    transformer_settle(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                       const long long* __restrict__ tiles, const acc_t* __restrict__ delta,
                       acc_t* __restrict__ terms, long long num_rows, long long num_tiles,
                       long long split, int heads, double keep) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, -1};
  settle_tile(graph, terms, delta, heads, (acc_t)keep);
}

extern "C" __global__ void __launch_bounds__(THREADS)
    transformer_target_merge(const long long* __restrict__ tiles, acc_t* partial,
                             const acc_t* __restrict__ partial_mass,
                             const acc_t* __restrict__ centre, const acc_t* __restrict__ delta,
                             scalar_t* __restrict__ grad_query, long long num_tiles, int heads,
                             int channels, double scale) {
  const TargetMerge tables = {tiles, partial, partial_mass, centre,   delta,
                              nullptr, grad_query, heads,   channels, (acc_t)scale};
  merge_rows<TargetSum>(tables, tiles, num_tiles, heads * channels);
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

struct BackwardSource {
  struct Batch {
    Packed grad[BATCH][NV], query[BATCH][NV];
  };
  const Place& place;
  const scalar_t *grad, *query;
  acc_t sum[NV][VEC], key_sum[NV][VEC];

  template <bool FULL>
  DEVICE_MEMBER void load(Batch& rows, const index_t (&source)[BATCH],
                          const position_t (&own)[BATCH]) const {
    load_rows<FULL>(grad, source, place, rows.grad);
    load_rows<FULL>(query, source, place, rows.query);
  }
  DEVICE_MEMBER void add(Batch& rows, const acc_t (&weights)[SLOTS][BATCH],
                         const acc_t (&slopes)[SLOTS][BATCH]) {
    add_weighted(sum, weights, rows.grad);
    add_weighted(key_sum, slopes, rows.query);
  }
};

// transformer_source — the gradients of keys and values.
// Maths     grad_value[j] = sum_k weight_k * grad[idx[k]]
//           grad_key[j] = scale * sum_k s_k * query[idx[k]]  over the edges k from source j
// Shapes    grad, query [N, H*C]  grad_key, grad_value [S, H*C]  terms [E, 2, H] (acc_t)
//           rows and tiles by source, perm the positions by target; partial [2, T, H*C] (acc_t)
// Mapping   as above
// Traffic   gathers E rows of grad, of query and of terms
// Numerics  acc_t sums in edge order, tiles merged in order by spmm_merge
// Limits    as above
extern "C" __global__ void __launch_bounds__(THREADS)
    transformer_source(const index_t* __restrict__ rowptr, const index_t* __restrict__ idx,
                       const index_t* __restrict__ perm, const long long* __restrict__ tiles,
                       const scalar_t* __restrict__ grad, const scalar_t* __restrict__ query,
                       const acc_t* __restrict__ terms, scalar_t* __restrict__ grad_value,
                       scalar_t* __restrict__ grad_key, acc_t* __restrict__ partial,
                       long long num_rows, long long num_tiles, long long split, int heads,
                       int channels, double scale) {
  const Graph graph = {rowptr, idx, tiles, num_rows, num_tiles, split, -1};
  const Edges edges(graph, group_of_launch());
  if (!any_group(edges.row >= 0)) return;
  const Place place(heads, channels);
  BackwardSource op = {place, grad, query};
  clear(op.sum), clear(op.key_sum);
  attend_source(op, graph, edges, place, perm, terms);
  if (edges.row < 0) return;
#pragma unroll
  for (int n = 0; n < NV; n++)
#pragma unroll
    for (int v = 0; v < VEC; v++) op.key_sum[n][v] *= (acc_t)scale;
  if (edges.part >= 0) {
    store_partial(partial, edges.part, place, op.sum);
    store_partial(partial, num_tiles + edges.part, place, op.key_sum);
  } else {
    store_row(grad_value, edges.row, place, op.sum);
    store_row(grad_key, edges.row, place, op.key_sum);
  }
}
